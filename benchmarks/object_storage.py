"""Training rates from s3:// over a slow link, relative to local files: first and later epochs.

    python -m benchmarks.object_storage                         # 30 ms and 200 Mbit/s
    python -m benchmarks.object_storage --rtt_ms=100 --mbit=1000 --repeats=1

Trains on random images of 28 x 28 bytes with --strategy=mirrored and one thread, from local files
and from a bucket behind `benchmarks.slow_link`, in turns. The bucket is `benchmarks.file_bucket`:
both are processes that need CPU, which counts against s3://. Each run from s3:// begins without
copies. A rate is the examples of an epoch by its time, as the trainer reports it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.pairs import summarise
from benchmarks.table import ROOT, train_reports, watched
from data.system.flags import parse_flags

_BATCH = 128
_EPOCHS = 4


def _prepare(directory: Path, num_images: int) -> None:
    from data.prepare.preparing import prepare
    from data.prepare.sources import Options

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (num_images, 28, 28, 1), np.uint8)
    labels = generator.integers(0, 10, num_images)
    source = directory / "images.npz"
    np.savez(source, image=images, label=labels)
    prepare("npz:images", str(directory / "images"), str(source), Options(label="label"))
    source.unlink()


@contextlib.contextmanager
def _process(module: str, *argv: str) -> Iterator[str]:
    """A process that prints its port; yields the port."""
    command = [sys.executable, "-m", module, *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _rates(data_dir: str, config: str, steps: int, env: Mapping[str, str]) -> list[float]:
    """Examples per second of each epoch."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "trainer", f"--config={config}", f"--data_dir={data_dir}"),
            *(f"--model_dir={directory}/run", f"--data_cache_dir={directory}/copies"),
            *(f"--train_steps={steps * _EPOCHS}", f"--config.log_every_steps={steps}"),
            *(f"--batch_size={_BATCH}", "--num_threads=1", "--config.export=false"),
            *("--config.eval_every_steps=0", "--config.checkpoint_every_steps=0"),
        ]
        watched(command, env=env)
        return [line["examples_per_sec"] for line in train_reports(Path(directory, "run"))]


def _main(argv: Sequence[str]) -> None:
    values = flags.FLAGS
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _prepare(directory, values.num_images)
        shards = list((directory / "images").glob("*-train.tfrecord-*"))
        num_bytes = sum(path.stat().st_size for path in shards)
        info = json.loads((directory / "images" / "dataset_info.json").read_text())
        (num_train,) = (
            sum(map(int, split["shardLengths"]))
            for split in info["splits"]
            if split["name"] == "train"
        )
        bucket = _process("benchmarks.file_bucket", f"--directory={directory}")
        port = stack.enter_context(bucket)
        way = [f"--to={port}", f"--link_delay_ms={values.rtt_ms / 2}", f"--mbit={values.mbit}"]
        link = stack.enter_context(_process("benchmarks.slow_link", *way))
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }
        steps = num_train // _BATCH
        data = f"{num_train:,} examples, {num_bytes / 1e6:.0f} MB, {steps} steps an epoch"
        machine = f"load {os.getloadavg()[0]:.1f}, {values.rtt_ms:g} ms, {values.mbit:g} Mbit/s"
        print(f"{data}; {machine}", flush=True)
        first, later = [], []
        for _ in range(values.repeats):
            local = _rates(str(directory / "images"), values.recipe, steps, {})
            remote = _rates("s3://bucket/images", values.recipe, steps, env)
            # The first epoch of a run also has the first calls, of both.
            first.append(remote[0] / local[0])
            later += [ours / theirs for ours, theirs in zip(remote[1:], local[1:], strict=True)]
            shown = ["  ".join(f"{rate:,.0f}" for rate in rates) for rates in (local, remote)]
            print(f"local {shown[0]}   s3 {shown[1]} examples/s", flush=True)
        for name, ratios in (("first", first), ("later", later)):
            print(f"{name} epoch, of the local rate: {summarise(ratios)}")


if __name__ == "__main__":
    flags.DEFINE_float("rtt_ms", 30.0, "Round-trip time.")
    flags.DEFINE_float("mbit", 200.0, "Mbit/s of each direction.")
    flags.DEFINE_integer("num_images", 40_000, "Examples, of which nine tenths are trained on.")
    flags.DEFINE_integer("repeats", 3, "Runs of each kind.")
    flags.DEFINE_string("recipe", "benchmarks/small_cnn.py", "The config file.")
    app.run(_main, flags_parser=parse_flags("benchmarks.object_storage"))
