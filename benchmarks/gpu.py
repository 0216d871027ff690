"""`python -m benchmarks.gpu`: this program and its peers on one GPU.

    python -m benchmarks.gpu --parts=resnet,text_lm --out=gpu.json     # on a machine with a GPU
    python -m benchmarks.gpu --parts=resnet --programs=trainer          # one program: under 100 s
    python -m benchmarks.gpu --tiny                                     # all parts on a CPU

Each part can be measured alone, and so can each of its programs. The data are generated. `trainer`
is the real program with default flags; `hand` and `fit` are benchmarks/peers/one_gpu.py. A rate is
the median of the last half of the reports of a run, so compilation does not count.

| part | what |
| --- | --- |
| resnet | ResNet-50, 224 x 224, batch 256, bfloat16, examples in memory |
| resnet_jpeg | the same; JPEGs are read and decoded in each epoch, also by `fit` |
| text_lm | configs/text_lm.py of width 768 with 12 blocks, batch 64 x 256, bfloat16 |
| digits | a small model, on the GPU and with --num_gpus=0 |
| startup | seconds to the first step of a Transformer of width 128: first start and resume |
| switches | resnet_jpeg with and without some settings |

The rate of evaluation is that of the second evaluation of the same run. The share of the GPU's peak
is that of the FLOPs that the model needs (Chowdhery et al., "PaLM", 2022, appendix B): a token
takes 6 N + 12 L W T, with N the parameters of matrix products, 12 L W^2 + 256 W here, L blocks of
width W, and T the length of the sequence; a causal mask is not deducted. Peaks are NVIDIA's, of
dense products in bfloat16.

PyTorch is not among the peers: its models would have to be written anew.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import PIL.Image
from absl import app, flags

from benchmarks.pairs import number, steady
from benchmarks.table import ProgramError, machine, prepare, train_reports, watched
from data.system.flags import parse_flags

_PARTS = flags.DEFINE_list("parts", [], "Parts to measure; all by default.")
_PROGRAMS = flags.DEFINE_list("programs", [], "Programs of these parts to measure, such as trainer")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds to measure.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "gpu.json", "JSON file to write; complete after each program.")
_TINY = flags.DEFINE_bool("tiny", False, "Small models and few steps, which a CPU can train.")

_LENGTH = 256  # Bytes of a sequence.
_TIMEOUT_SECS = 400.0
_PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}
_COLUMNS = {
    "examples_per_sec": "examples/s",
    "ratio": "of the first",
    "tokens_per_sec": "tokens/s",
    "peak_share": "of the peak",
    "evaluation_examples_per_sec": "evaluation, examples/s",
    "first_report_secs": "first report, s",
    "resumed_first_report_secs": "after a resume, s",
}

Figures = dict[str, float]
Measure = Callable[[Path], Figures]  # Called with the directory of the data.


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, its data and the number of steps; a report has `every` steps."""

    config: str
    data: str
    fields: Mapping[str, object]
    steps: int
    every: int

    def trainer(self, *words: str, resumes: bool = False, **env: str) -> Measure:
        """This program; `resumes` measures the start of a second run in the same directory."""

        def measure(data: Path) -> Figures:
            with tempfile.TemporaryDirectory(dir=data) as name:
                run = functools.partial(self._train, words, env, data, Path(name, "run"))
                figures = run(self.steps)
                if resumes:
                    again = run(2 * self.steps)
                    figures["resumed_first_report_secs"] = again["first_report_secs"]
                return figures | self._of_tokens(figures["examples_per_sec"])

        return measure

    def _train(
        self, words: Sequence[str], env: Mapping[str, str], data: Path, model_dir: Path, steps: int
    ) -> Figures:
        command = [
            *(sys.executable, "-m", "trainer", "--strategy=mirrored", f"--config={self.config}"),
            *(f"--config.{name}={value}" for name, value in self.fields.items()),
            *(f"--data_dir={prepared(self.data, data)}", f"--model_dir={model_dir}"),
            *(f"--train_steps={steps}", f"--config.log_every_steps={self.every}"),
            *(f"--config.eval_every_steps={steps // 2}", "--config.export=False", *words),
        ]
        before, first_report, began = len(train_reports(model_dir)), 0.0, time.monotonic()

        def look(pid: int) -> None:
            nonlocal first_report
            if not first_report and len(train_reports(model_dir)) > before:
                first_report = time.monotonic()

        watched(command, look, env=env, timeout_secs=_TIMEOUT_SECS)
        lines = (model_dir / "metrics.jsonl").read_text().splitlines()
        evaluation = [line for line in map(json.loads, lines) if line["split"] == "eval"][-1]
        return {
            "examples_per_sec": steady(
                [report["examples_per_sec"] for report in train_reports(model_dir)[before:]]
            ),
            "evaluation_examples_per_sec": evaluation["examples"] / evaluation["seconds"],
            "first_report_secs": (first_report or time.monotonic()) - began,
        }

    def peer(self, way: str, *, reads: bool = False) -> Measure:
        """Another program: --way and, if `reads`, --records of benchmarks/peers/one_gpu.py."""
        command = [
            *(sys.executable, "-m", "benchmarks.peers.one_gpu", f"--way={way}"),
            *(f"--config={self.config}", f"--fields={json.dumps(dict(self.fields))}"),
            *(f"--num_windows={self.steps // self.every}", f"--window_steps={self.every}"),
        ]

        def measure(data: Path) -> Figures:
            records = (f"--records={prepared(self.data, data)}",) if reads else ()
            output = watched([*command, *records], timeout_secs=_TIMEOUT_SECS)
            figures: Figures = json.loads(output.splitlines()[-1])
            return figures | self._of_tokens(figures["examples_per_sec"])

        return measure

    def with_peers(self, *words: str) -> dict[str, Measure]:
        """This program with `words`, and its peers."""
        return {"trainer": self.trainer(*words), "hand": self.peer("hand"), "fit": self.peer("fit")}

    def _of_tokens(self, examples_per_sec: float) -> Figures:
        if self.data != "text":
            return {}
        figures = {"tokens_per_sec": examples_per_sec * _LENGTH}
        peaks = [peak for name, peak in _PEAK_FLOPS.items() if name in _gpu()["gpu"]]
        width, blocks = self.fields.get("width"), self.fields.get("blocks")
        is_bfloat16 = self.fields.get("precision") == "mixed_bfloat16"
        if peaks and is_bfloat16 and isinstance(width, int) and isinstance(blocks, int):
            flops = figures["tokens_per_sec"] * flops_per_token(width, blocks)
            figures["peak_share"] = flops / peaks[0]
        return figures


def flops_per_token(width: int, blocks: int) -> int:
    """FLOPs of a training step of configs/text_lm.py; the head of this module has the formula."""
    num_parameters = 12 * blocks * width**2 + 256 * width
    return 6 * num_parameters + 12 * blocks * width * _LENGTH


def all_parts(*, tiny: bool) -> dict[str, dict[str, Measure]]:
    """The programs of each part, by name."""
    bfloat16: dict[str, object] = {"precision": "mixed_bfloat16"}
    resnet = Work("benchmarks/resnet50.py", "images", bfloat16, 160, 20)
    large: dict[str, object] = {"width": 768, "blocks": 12, "heads": 12, "batch_size": 64}
    text_lm = Work("configs/text_lm.py", "text", large | bfloat16, 160, 20)
    startup = Work("configs/text_lm.py", "text", {"width": 128, "blocks": 4}, 4, 1)
    digits = Work("configs/digits.py", "digits", {}, 4000, 200)
    if tiny:
        resnet_8: dict[str, object] = {"blocks_per_stage": 1, "batch_size": 8}
        resnet = Work("configs/cifar10_resnet.py", "images", resnet_8 | bfloat16, 8, 2)
        small: dict[str, object] = {"width": 16, "blocks": 1, "heads": 2, "batch_size": 8}
        text_lm = dataclasses.replace(text_lm, fields=small | bfloat16, steps=8, every=2)
        startup = dataclasses.replace(startup, fields=small)
        digits = dataclasses.replace(digits, steps=40, every=10)
    cores = os.cpu_count() or 1
    return {
        "resnet": resnet.with_peers(f"--config.data.cache_bytes={1 << 30}"),
        "resnet_jpeg": {"trainer": resnet.trainer(), "fit": resnet.peer("fit", reads=True)},
        "text_lm": text_lm.with_peers(),
        "digits": {"trainer": digits.trainer(), "--num_gpus=0": digits.trainer("--num_gpus=0")},
        "startup": {"trainer": startup.trainer(resumes=True)},
        "switches": {
            "trainer": resnet.trainer(),
            "gpu_private": resnet.trainer(TF_GPU_THREAD_MODE="gpu_private"),
            f"--num_threads={cores}": resnet.trainer(f"--num_threads={cores}"),
            "jit": resnet.trainer("--config.jit_compile=True"),
            "nojit": resnet.trainer("--config.jit_compile=False"),
        },
    }


def prepared(name: str, directory: Path) -> Path:
    """The directory of the data set `name`, which is written at the first call."""
    out = directory / name
    if not out.exists():
        if name == "digits":
            prepare("digits", out)
        elif name == "text":
            words = ["once", "upon", "a", "time", "there", "was", "a", "mouse", "and", "a", "cat"]
            num_words = (100 if _TINY.value else 5000) * _LENGTH // 4
            source = directory / "words.txt"
            source.write_text(" ".join(np.random.default_rng(0).choice(words, num_words)))
            prepare("text:text", out, f"--source={source}")
        else:
            source = directory / "folders"
            write_jpegs(source, *((32, 40, 16) if _TINY.value else (224, 1024, 1280)))
            prepare("folder:images", out, f"--source={source}")
    return out


def write_jpegs(directory: Path, size: int, num_train: int, num_test: int) -> None:
    """Folders of 10 classes of JPEGs: random colours on a coarse grid, with noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", num_train), ("test", num_test)):
        for index in range(count):
            grid = random.integers(0, 224, (size // 16, size // 16, 3), np.uint8)
            noise = random.integers(0, 32, (size, size, 3), np.uint8)
            pixels = grid.repeat(16, 0).repeat(16, 1) + noise
            path = directory / split / f"class{index % 10}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels).save(path, quality=85)


@functools.cache
def _gpu() -> dict[str, str]:
    """Name and driver of the first GPU, from nvidia-smi: TensorFlow would use its memory here."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"gpu": "none", "driver": "none"}
    return dict(zip(("gpu", "driver"), found.splitlines()[0].split(", "), strict=True))


@dataclasses.dataclass
class Row:
    """The figures of a program of a part, one for each round, or the last error."""

    part: str
    program: str
    figures: list[Figures] = dataclasses.field(default_factory=list)
    error: str | None = None

    def cells(self, first: "Row") -> list[str]:
        """Of the table: medians of the rounds. `first` is that of the first program of the part."""
        if self.error:
            return [self.part, self.program, "failed", *[""] * (len(_COLUMNS) - 1)]
        found = {name: [figures[name] for figures in self.figures] for name in self.figures[0]}
        if first.figures:
            base = statistics.median(figures["examples_per_sec"] for figures in first.figures)
            found["ratio"] = [rate / base for rate in found["examples_per_sec"]]
        cells = [number(found[name]) if name in found else "" for name in _COLUMNS]
        return [self.part, self.program, *cells]


def measured(
    programs: Mapping[str, Measure], rows: Sequence[Row], data: Path, num_rounds: int
) -> Iterator[None]:
    """Fills `rows`, of `programs`, which take turns. Yields after each program."""
    for turn in range(num_rounds):
        for row in rows[:: -1 if turn % 2 else 1]:
            try:
                row.figures.append(programs[row.program](data))
            except (ProgramError, ValueError, OSError, LookupError) as error:
                row.error = str(error)
                print(f"{row.part}, {row.program}: {error}", file=sys.stderr, flush=True)
            yield


def _end_with(message: str) -> NoReturn:
    print(f"benchmarks.gpu: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    parts = all_parts(tiny=_TINY.value)
    known = {program: 0 for programs in parts.values() for program in programs}
    for flag, given, names in (("parts", _PARTS, parts), ("programs", _PROGRAMS, known)):
        if wrong := [name for name in given.value if name not in names]:
            _end_with(f"--{flag}={wrong[0]}: it takes {', '.join(names)}.")
    if _gpu()["gpu"] == "none" and not _TINY.value:
        _end_with("nvidia-smi finds no GPU. Add --tiny to try all parts on a CPU.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras")}
    about = {**_gpu(), "machine": machine(), **versions, "tiny": _TINY.value}
    rows: list[Row] = []

    def save() -> None:
        report = {**about, "results": [dataclasses.asdict(row) for row in rows]}
        partial = Path(f"{_OUT.value}.partial")
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.replace(_OUT.value)

    print(f"{', '.join(f'{name} {value}' for name, value in about.items())}:\n")
    print(f"| part | program | {' | '.join(_COLUMNS.values())} |")
    print("| --- " * (2 + len(_COLUMNS)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for part in _PARTS.value or parts:
            wanted = [n for n in parts[part] if n in (_PROGRAMS.value or parts[part])]
            own = [Row(part, program) for program in wanted]
            rows += own
            for _ in measured(parts[part], own, Path(name), _ROUNDS.value):
                save()
            for row in own:
                print(f"| {' | '.join(row.cells(own[0]))} |", flush=True)
    if any(row.error for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.gpu"))
