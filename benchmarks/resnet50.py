"""ResNet-50 on images of 224 x 224 in bfloat16, for benchmarks.gpu.

python -m trainer --config=benchmarks/resnet50.py --data_dir=DIRECTORY_OF_IMAGES
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras

_SHAPE = (224, 224, 3)


def get_config() -> Config:
    """Batches of 256."""
    return Config(dataset="images", batch_size=256, learning_rate=0.05, precision="mixed_bfloat16")


def build_optimizer(config: Config) -> "keras.Optimizer":
    """SGD with momentum."""
    import keras

    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 224, 224, 3] in [0, 1] -> logits float32 [B, 1000]."""
    import keras
    from keras import layers

    images = keras.Input(_SHAPE)
    network = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=_SHAPE, pooling="avg"
    )
    features = network(layers.Rescaling(2.0, offset=-1.0)(images))
    return keras.Model(images, layers.Dense(1000, dtype="float32")(features))
