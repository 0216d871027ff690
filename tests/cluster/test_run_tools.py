"""`trainer.evaluate` and `trainer.compare` on real runs."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.runs import ROOT, run, train
from tests.commands import run_python

pytestmark = pytest.mark.nightly


tool = partial(run_python, "-m")


def test_config_file_that_others_can_write_is_executed_only_if_trusted(
    tmp_path: Path,
) -> None:
    executed = tmp_path / "executed"
    config = tmp_path / "mine.py"
    shipped = (ROOT / "configs" / "digits.py").read_text()
    config.write_text(f"{shipped}\nopen({str(executed)!r}, 'w').close()\n")
    model_dir = str(tmp_path / "run")
    flags = (f"--config={config}", "--train_steps=10")
    train("mirrored-1", Path(model_dir), *flags)
    config.chmod(0o666)
    page = tmp_path / "report.html"
    for words, refused in (
        (("trainer.evaluate", model_dir), 2),
        (("trainer.predict", f"--model_dir={model_dir}", "--num_examples=1"), 2),
        (("trainer.report", model_dir, f"--output={page}"), 0),  # Without what the model would say.
    ):
        executed.unlink(missing_ok=True)
        done = tool(*words)
        said = page.read_text() if words[0] == "trainer.report" else done.stderr
        assert done.returncode == refused, done.stderr
        assert f"{config} can be written by every user" in said
        assert not executed.exists()
        done = tool(*words, "--trust")
        assert done.returncode == 0, done.stderr
        assert executed.exists()
    assert "can be written by every user" not in page.read_text()


def test_checkpoints_of_a_cluster_have_the_metrics_that_the_run_reported(
    tmp_path: Path,
) -> None:
    model_dir = tmp_path / "run"
    flags = (
        "--config.ema.decay=0.9",
        "--config.checkpoint_every_steps=20",
        "--config.eval_every_steps=20",
    )
    trained = train("multiworker-2", model_dir, *flags, "--train_steps=40")
    reported = {report["step"]: report for report in trained.metrics("eval")}
    assert set(reported) == {20, 40}
    for checkpoint, step in (("20", 20), ("newest", 40)):
        # From another directory: paths in the run's files are absolute.
        words = ("trainer.evaluate", str(model_dir), f"--checkpoint={checkpoint}", "--json")
        done = tool(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["step"], found["examples"]) == (step, 360)
        for metric in ("loss", "accuracy"):
            assert found[metric] == pytest.approx(reported[step][metric], rel=1e-6, abs=1e-6)
    missing = tool("trainer.evaluate", str(model_dir), "--checkpoint=30")
    assert missing.returncode == 2
    assert "step-00000020" in missing.stderr
    assert "Traceback" not in missing.stderr

    train("mirrored-1", tmp_path / "other", *flags, "--train_steps=20", "--learning_rate=0.01")
    compared = tool("trainer.compare", str(model_dir), str(tmp_path / "other"))
    assert compared.returncode == 1, compared.stderr
    assert "config.learning_rate: 0.002 | 0.01" in compared.stdout
    assert "different at step 20, the first that was compared" in compared.stdout
    assert "dense/kernel" in compared.stdout


def test_metric_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    shipped = (ROOT / "configs" / "digits.py").read_text()
    metric = "metrics = {'bad': lambda labels, outputs: outputs[:, 0] * float('nan')}"
    config.write_text(f"{shipped}\n{metric}\n")
    flags = (f"--config={config}", "--config.best_metric=loss", "--train_steps=2")
    train("mirrored-1", tmp_path / "run", *flags)
    done = tool("trainer.evaluate", str(tmp_path / "run"), "--json")
    assert json.loads(done.stdout, parse_constant=pytest.fail)["bad"] is None


def test_damaged_newest_checkpoint_is_refused_unless_another_is_asked_for(
    tmp_path: Path,
) -> None:
    model_dir = tmp_path / "run"
    flags = ("--train_steps=4", "--config.checkpoint_every_steps=2", "--config.export=False")
    train("mirrored-1", model_dir, *flags)
    newest = model_dir / "checkpoints" / "step-00000004"
    (data,) = newest.glob("variables.data*")
    content = data.read_bytes()
    for damaged, tools in (
        (content[:-1], ("trainer.evaluate",)),
        (content[:-1] + bytes([content[-1] ^ 1]), ("trainer.evaluate", "trainer.predict")),
    ):
        data.write_bytes(damaged)
        for name in tools:
            refused = tool(name, str(model_dir), "--checkpoint=newest")
            assert refused.returncode == 2, refused.stderr
            assert f"{newest} cannot be read: {data.name} has " in refused.stderr
            assert "Type --checkpoint=newest_complete" in refused.stderr
    refused = tool("trainer.compare", str(model_dir), str(model_dir))
    assert refused.returncode == 2, refused.stderr
    assert f"{newest} cannot be compared: {data.name} has " in refused.stderr
    found = tool("trainer.evaluate", str(model_dir), "--checkpoint=newest_complete", "--json")
    assert json.loads(found.stdout)["step"] == 2
    assert f"{newest} cannot be read" in found.stderr


def test_directories_of_any_name_are_read_by_all_tools(digits: Path, tmp_path: Path) -> None:
    top = tmp_path / "a[1] {b}\\c*%20?#"
    data, model_dir = top / "digits", top / "run"
    shutil.copytree(digits, data)
    flags = (f"--data_dir={data}", "--config.checkpoint_every_steps=2")
    train("mirrored-1", model_dir, *flags, "--train_steps=4")
    path = model_dir / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.002', '"learning_rate": 0.01'))
    argv = (f"--model_dir={model_dir}", "--train_steps=6")
    resumed = run(argv, model_dir)
    assert "resuming from step 4\n" in resumed.stdout
    changed = "changed since that step: learning_rate 0.002 -> 0.01, train_steps 4 -> 6\n"
    assert changed in resumed.stdout
    warm = (f"--config.warm_start.path={model_dir}", "--train_steps=1", *flags)
    assert "warm start from" in train("mirrored-1", top / "warm", *warm).stdout
    saved_model = (f"{model_dir}/export/saved_model", f"--data_dir={data}")
    for words in (
        ("trainer.evaluate", str(model_dir)),
        ("trainer.compare", str(model_dir), str(model_dir)),
        ("trainer.predict", str(model_dir), f"--data_dir={data}", f"--output={top}/out.csv"),
        ("trainer.predict", *saved_model, f"--output={top}/saved.csv"),
        ("trainer.report", str(model_dir)),
    ):
        done = tool(*words)
        assert done.returncode == 0, done.stderr
