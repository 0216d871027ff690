"""Callbacks of Keras are called at the steps of `fit`, and act in all tasks."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks as K

from data.tfrecord.split import Split
from strategies.position import Position
from tests.unit.comparing import assert_same
from tests.unit.toy import BATCH, NUM_EXAMPLES, Overshooting, Toy
from trainer.config import Config, ConfigError, Recipe
from trainer.hooks.callbacks import Callbacks, build_callbacks
from trainer.hooks.evaluate import Evaluate
from trainer.loop import train

EPOCH = -(-NUM_EXAMPLES // BATCH)


class Recorded(K.Callback):
    """A callback that records the calls for epochs, evaluations and training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append("test")
        assert logs.keys() == {"loss", "accuracy"}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("end", epoch))
        self.logs.append(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")


def callbacks_hook(
    toy: Toy, callbacks: Sequence[K.Callback], last_step: int, evaluate: Evaluate | None = None
) -> Callbacks:
    return Callbacks(
        toy.executor,
        toy.learner,
        callbacks,
        path="mine.py",
        steps_per_epoch=EPOCH,
        last_step=last_step,
        evaluate=evaluate,
        checkpointer=toy.checkpointer,
    )


def run(
    toy: Toy, callbacks: Sequence[K.Callback], steps: int, *, evaluates: bool = True
) -> tuple[int, Callbacks]:
    evaluate = toy.evaluate(every_steps=EPOCH, last_step=steps) if evaluates else None
    hook = callbacks_hook(toy, callbacks, steps, evaluate)
    hooks = [evaluate, hook] if evaluate else [hook]
    return train(toy.executor, toy.learner, hooks, steps=steps, steps_per_call=1000), hook


def test_epochs_evaluations_and_the_end_are_told(toy: Toy) -> None:
    recorded, history = Recorded(), K.History()
    assert run(toy, [recorded, history], 2 * EPOCH + 3)[0] == 2 * EPOCH + 3
    epochs = [[("epoch", i), "test", ("end", i)] for i in range(3)]
    assert recorded.calls == ["begin", *itertools.chain(*epochs), "end"]
    names = {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert [logs.keys() for logs in recorded.logs] == [names] * 3
    assert history.history["loss"] == [logs["loss"] for logs in recorded.logs]
    assert recorded.logs[2]["loss"] < recorded.logs[0]["loss"]


def test_epoch_that_was_overshot_ends_once(split: Split, tmp_path: Path) -> None:
    recorded, toy = Recorded(), Toy(split, tmp_path, executor=Overshooting)
    toy.start()
    step, _ = run(toy, [recorded], 3 * EPOCH)
    assert step >= 3 * EPOCH
    begun = [call[1] for call in recorded.calls if call[0] == "epoch"]
    ended = [call[1] for call in recorded.calls if call[0] == "end"]
    # How far it overshoots depends on how fast the steps are.
    assert begun == ended == sorted(set(ended))
    assert ended[0] == 0


def test_callback_for_batches_is_called_for_each(toy: Toy) -> None:
    batches: list[int] = []
    losses: list[float] = []

    def note(batch: int, logs: Any) -> None:
        batches.append(batch)
        losses.append(logs["loss"])

    run(toy, [K.LambdaCallback(on_train_batch_end=note)], EPOCH + 2)
    assert batches == [*range(EPOCH), 0, 1]
    assert len(set(losses)) == len(losses)


def test_callback_for_epochs_does_not_make_calls_small(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    stock: Callable[[int], Any] = toy.executor.run

    def run_and_note(num_steps: int) -> Any:
        sizes.append(num_steps)
        return stock(num_steps)

    monkeypatch.setattr(toy.executor, "run", run_and_note)
    saved = K.ModelCheckpoint(str(tmp_path / "model.keras"))
    run(toy, [Recorded(), saved, K.TerminateOnNaN()], 2 * EPOCH)
    assert sizes == [EPOCH, EPOCH]
    kept = keras.models.load_model(tmp_path / "model.keras")
    assert_same(kept.weights, toy.learner.model.weights)


def test_wish_to_stop_completes_training(toy: Toy) -> None:
    class Stop(K.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    step, hook = run(toy, [Stop()], 99 * EPOCH, evaluates=False)
    assert step == 2 * EPOCH
    assert "callback" in hook.done


def test_rate_is_reduced_on_a_plateau_and_epochs_are_logged(toy: Toy, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    plateau = K.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=1e9)
    run(toy, [plateau, K.CSVLogger(str(log))], 3 * EPOCH)
    # The first epoch sets the best loss, and each other one does not improve it by 1e9.
    assert toy.learner.learning_rate == pytest.approx(0.01 / 4)
    head, *rows = [line.split(",") for line in log.read_text().splitlines()]
    assert head == ["epoch", "accuracy", "learning_rate", "loss", "val_accuracy", "val_loss"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert float(rows[2][3]) < float(rows[0][3])


def set_to(optimizer: Any, rate: Any) -> None:
    optimizer.learning_rate = rate


# What a callback does at the begin of training, and the rate after it; it is 0.01 before.
RATES: dict[str, tuple[Callable[[Any], object], float]] = {
    "float": (lambda optimizer: set_to(optimizer, float(optimizer.learning_rate) / 2), 0.005),
    "numpy": (lambda optimizer: set_to(optimizer, optimizer.learning_rate.numpy() / 2), 0.005),
    "array": (lambda optimizer: set_to(optimizer, np.array(optimizer.learning_rate) / 2), 0.005),
    "tensor": (lambda optimizer: set_to(optimizer, optimizer.learning_rate / 2), 0.005),
    "ops": (
        lambda optimizer: set_to(
            optimizer, keras.ops.convert_to_numpy(optimizer.learning_rate) * 3
        ),
        0.03,
    ),
    "assign": (lambda optimizer: optimizer.learning_rate.assign(0.25), 0.25),
    "int": (lambda optimizer: set_to(optimizer, 1 + int(optimizer.iterations)), 1.0),
}


@pytest.mark.parametrize("name", RATES)
def test_rate_is_read_and_set_as_keras_users_do(name: str, toy: Toy) -> None:
    act, rate = RATES[name]

    class Act(K.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            act(self.model.optimizer)

    run(toy, [Act()], 1)
    assert toy.learner.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    "rate", [keras.optimizers.schedules.CosineDecay(0.1, 9), lambda: 0.1], ids=["schedule", "def"]
)
def test_schedule_that_a_callback_sets_is_refused(rate: Any, toy: Toy) -> None:
    class Set(K.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = rate

    with pytest.raises(ConfigError, match=r"on_epoch_end of Set, .* gave .* set config.schedule"):
        run(toy, [Set()], EPOCH)


class Halving(Recorded):
    """Halves the rate when an epoch begins, and takes 0.1% where training and a batch begin."""

    def __init__(self, *, each_batch: bool = False) -> None:
        super().__init__()
        self._each_batch = each_batch
        if each_batch:
            self.on_train_batch_begin = self._on_train_batch_begin

    def _times(self, factor: float) -> None:
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * factor

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin()
        self._times(0.999)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch)
        self._times(0.5)

    def _on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._times(0.999)


@pytest.mark.slow
@pytest.mark.parametrize("each_batch", [False, True], ids=["epochs", "batches"])
@pytest.mark.parametrize(
    ("saved_step", "last_step", "saves_first"),
    [
        (EPOCH + 3, 2 * EPOCH, False),
        (EPOCH, 2 * EPOCH, False),
        (EPOCH, 2 * EPOCH, True),
        (EPOCH, EPOCH, False),
        (EPOCH + 3, EPOCH + 3, False),
        (0, 2 * EPOCH, False),
    ],
    ids=["in an epoch", "between", "before the evaluation", "at the end", "in the last", "start"],
)
def test_resumed_run_has_the_rate_of_an_uninterrupted_one(
    saved_step: int,
    last_step: int,
    saves_first: bool,
    each_batch: bool,
    split: Split,
    tmp_path: Path,
) -> None:
    """`saves_first`: the checkpoint is that before the first evaluation."""

    seen: list[float] = []

    def trained(toy: Toy, steps: int, last_step: int, *, saves: bool = False) -> Halving:
        halving = Halving(each_batch=each_batch)
        see = K.LambdaCallback(
            on_epoch_begin=lambda *_: seen.append(float(toy.learner.optimizer.learning_rate))
        )
        save = toy.save(saved_step, last_step)
        evaluate = toy.evaluate(every_steps=EPOCH, save=save if saves and saves_first else None)
        hook = callbacks_hook(toy, [halving, see], last_step, evaluate)
        hooks = [evaluate, hook, save] if saves else [evaluate, hook]
        train(toy.executor, toy.learner, hooks, steps=steps, steps_per_call=1000)
        return halving

    uninterrupted, former, resumed = (
        Toy(split, tmp_path / name) for name in ("all", "parts", "parts")
    )
    uninterrupted.start()
    trained(uninterrupted, 2 * EPOCH, 2 * EPOCH)
    former.start()
    if saved_step:
        trained(former, saved_step, last_step, saves=True)
    else:
        former.checkpointer.save(0, Position(), {})
        former.checkpointer.wait()
    saved = resumed.restore()
    assert saved.step == saved_step
    resumed.start(saved.position)
    seen.clear()
    halving = trained(resumed, 2 * EPOCH, 2 * EPOCH)
    # No callback sees a rate that another has lowered once more.
    assert seen[-1] == pytest.approx(0.01 / 4, rel=0.1)
    assert halving.calls[:2] == ["begin", ("epoch", saved_step // EPOCH)]
    rates = [toy.learner.learning_rate for toy in (uninterrupted, resumed)]
    assert rates[1] == pytest.approx(rates[0], rel=1e-4)


def test_epoch_is_told_once_if_training_goes_back(toy: Toy) -> None:
    halving = Halving()
    hook = callbacks_hook(toy, [halving], 9 * EPOCH)
    for first, last in ((0, 2 * EPOCH + 3), (EPOCH - 2, 3 * EPOCH)):
        toy.learner.step.assign(first)
        train(toy.executor, toy.learner, [hook], steps=last, steps_per_call=1000)
    told = [call for call in halving.calls if call not in ("begin", "end")]
    assert told == [(kind, i) for i in range(3) for kind in ("epoch", "end")] + [("epoch", 3)]
    assert toy.learner.learning_rate == pytest.approx(0.01 * 0.999 / 2**4)
    # Back once more, and stopped there: a resume tells these epochs again, but keeps the rate.
    toy.learner.step.assign(EPOCH - 2)
    train(toy.executor, toy.learner, [hook], steps=EPOCH + 2, steps_per_call=1000)
    resumed = callbacks_hook(toy, [Halving()], 9 * EPOCH)
    train(toy.executor, toy.learner, [resumed], steps=3 * EPOCH, steps_per_call=1000)
    assert toy.learner.learning_rate == pytest.approx(0.01 * 0.999 / 2**4)


class ForTestBatches(K.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (K.TensorBoard, "TensorBoard, which cannot work here: .*MODEL_DIR/tensorboard"),
        (lambda: K.BackupAndRestore("x"), "which cannot work here: .*--model_dir"),
        (K.SwapEMAWeights, "which cannot work here: .*config.ema.decay"),
        (K.ProgbarLogger, "which cannot work here: .*config.log_every_steps"),
        (lambda: K.EarlyStopping(restore_best_weights=True), r"\(restore_best_weights=True.*best-"),
        (ForTestBatches, "ForTestBatches, which defines on_test_batch_end.*Use on_test_end"),
    ],
)
def test_callback_that_cannot_work_is_refused_with_what_to_use(
    make: Callable[[], K.Callback], said: str
) -> None:
    recipe = Recipe("mine.py", Config(), lambda config: None, build_callbacks=lambda c: make())
    with pytest.raises(ConfigError, match=said):
        build_callbacks(recipe)


@pytest.mark.slow
def test_other_tasks_take_over_the_chiefs_rate_and_stop(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks in turn: what the chief gives to `gathered` is what the other task gets."""
    given: list[int] = []
    chief, other = (Toy(split, tmp_path / name) for name in ("chief", "other"))
    chief.start()
    other.start()

    def gathered(number: int) -> list[int]:
        given.append(number)
        return [number]

    monkeypatch.setattr(chief.executor, "gathered", gathered)
    halve = K.LearningRateScheduler(lambda epoch, rate: rate / 2)
    stop = K.EarlyStopping("val_accuracy", patience=1, min_delta=1.0)
    step, _ = run(chief, [halve, stop], 9 * EPOCH)
    assert stop.monitor_op is keras.ops.greater
    other.executor.is_chief = False
    answers = iter(given)
    monkeypatch.setattr(other.executor, "gathered", lambda n: [next(answers), n])
    recorded = Recorded()
    # The callbacks of the other task are never called.
    assert run(other, [recorded], 9 * EPOCH)[0] == step == 2 * EPOCH
    assert recorded.calls == []
    assert other.learner.learning_rate == pytest.approx(0.01 / 4)
    assert_same(chief.state(), other.state())


@pytest.mark.parametrize(
    ("callback", "evaluates"),
    [
        (K.EarlyStopping("val_acc"), True),
        (K.ReduceLROnPlateau("val_loss"), False),
        (K.ModelCheckpoint("x.keras", monitor="f1", save_best_only=True), True),
    ],
)
def test_metric_that_does_not_exist_is_refused_before_training(
    callback: K.Callback, evaluates: bool, toy: Toy
) -> None:
    with pytest.raises(ConfigError, match=r"there is no such metric. Known: loss, accuracy"):
        run(toy, [callback], EPOCH, evaluates=evaluates)
    assert toy.step == 0


def test_attributes_of_a_callback_of_the_user_stay(toy: Toy) -> None:
    class Mine(K.Callback):
        mode = "append"
        monitor = object()

    mine, auto = Mine(), Recorded()
    auto.monitor, auto.mode = "val_accuracy", "auto"
    run(toy, [mine, auto], 1)
    assert mine.mode == "append"
    assert auto.mode == "max"


def test_epoch_without_an_evaluation_has_none_in_its_logs(toy: Toy) -> None:
    """As with `validation_freq` of `fit`: patience would count an evaluation again."""
    recorded = Recorded()
    evaluate = toy.evaluate(every_steps=2 * EPOCH - 1, last_step=9 * EPOCH)
    hook = callbacks_hook(toy, [recorded], 9 * EPOCH, evaluate)
    hooks = [evaluate, hook]
    train(toy.executor, toy.learner, hooks, steps=3 * EPOCH, steps_per_call=1000)
    assert ["val_loss" in logs for logs in recorded.logs] == [False, True, False]
    assert all("loss" in logs for logs in recorded.logs)


def test_error_of_a_callback_names_its_line(toy: Toy) -> None:
    class Wrong(K.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print(logs["f1"])

    said = r"(?s)on_epoch_end of Wrong.*KeyError: 'f1'.*test_callbacks.py, line \d+.*logs\[\"f1\"\]"
    with pytest.raises(ConfigError, match=said):
        run(toy, [Wrong()], EPOCH)
