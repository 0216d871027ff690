"""Advice on a model and a loss that do not fit each other, although training runs."""

import keras

from data.system.compat.keras_layers import maker_of
from strategies.base import Batch
from trainer.step.keras_losses import KerasLoss, LossSpec, ModelLoss, overrides
from trainer.step.losses import PerExample

# The parts of keras.Model that a class overrides for metrics of its own.
_OF_METRICS = ("compute_metrics", "get_metrics_result", "metrics")


def advice(
    model: keras.Model,
    given_loss: LossSpec | None,
    loss: PerExample | KerasLoss | ModelLoss,
    path: str,
) -> list[str]:
    """Returns lines for the user; empty if nothing is remarkable.

    `given_loss` is the loss as the config file at `path` gives it; None: it gives none.
    """
    kind = type(model).__name__
    own = [name for name in _OF_METRICS if overrides(model, name)]
    lines = [
        f"{', '.join(own)} of {kind}: not used. Define `metrics` in {path}, or a Learner whose "
        "`evaluate` measures them."
    ] * bool(own)
    if overrides(model, "predict_step"):
        lines.append(f"predict_step() of {kind} is not called: `call` makes the predictions.")
    if isinstance(loss, ModelLoss):
        lines += [
            f"{name}() of {kind} is not called: a step takes the gradient of its compute_loss(), "
            "as keras.Model does."
            for name in ("train_step", "test_step")
            if overrides(model, name)
        ]
        return lines
    if getattr(model, "compiled", False):
        lines.append(
            "model.compile(...) in build_model has no effect: define loss, metrics and "
            f"build_optimizer in {path}."
        )
    activation = _activation(model)
    if given_loss is None:
        if activation == "softmax":
            lines.append(
                "The model ends with softmax, but the default loss applies softmax too. Remove the "
                "activation of the last layer, or define loss = 'sparse_categorical_crossentropy'."
            )
    elif isinstance(loss, KerasLoss):
        lines += loss.notes
        lines += _activation_advice(given_loss, activation)
    return lines


def shape_advice(labels: Batch, outputs: Batch) -> str:
    """Names the layer that is probably missing if `outputs` have too many axes; else ""."""
    labels_shape, outputs_shape = getattr(labels, "shape", ()), getattr(outputs, "shape", ())
    if len(labels_shape) != 1 or len(outputs_shape) <= 2:
        return ""
    return (
        ". Outputs of one example should have one axis: is layers.Flatten() or "
        "layers.GlobalAveragePooling2D() missing?"
    )


def _activation_advice(loss: object, activation: str) -> list[str]:
    if isinstance(loss, str):
        name, from_logits = loss, False
    elif isinstance(loss, keras.Loss) and type(loss).__module__.startswith("keras."):
        name, from_logits = type(loss).__name__, bool(getattr(loss, "from_logits", False))
    else:
        return []
    if "crossentropy" not in name.lower():
        return []
    if from_logits and activation in ("softmax", "sigmoid"):
        return [
            f"The model ends with {activation}, but {name}(from_logits=True) applies it too. "
            "Remove the activation of the last layer, or from_logits=True."
        ]
    if not from_logits and activation == "linear":
        return [
            f"{name} expects probabilities, but the last layer of the model has no activation. "
            "Give it softmax (or sigmoid for a single output), or use a loss with from_logits=True."
        ]
    return []


def _activation(model: keras.Model) -> str:
    """Returns the activation of the layer that makes the only output of `model`, or ""."""
    outputs = getattr(model, "outputs", None) or []
    if len(outputs) != 1:
        return ""
    layer = maker_of(outputs[0])
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    if isinstance(layer, keras.Model):
        return _activation(layer)
    return str(getattr(getattr(layer, "activation", None), "__name__", ""))
