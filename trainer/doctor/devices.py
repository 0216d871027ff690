"""Sums and copies known vectors on the devices of this process, and compares them by value.

    checked = check_devices(strategy)   # {"replicas": 2, "wrong_sums": [], "copies": [{...}]}

Broken peer-to-peer copies between GPUs give wrong values, or never end: training then has losses of
NaN, or stops without a message.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from strategies.base import Tensor
from strategies.gradients.all_reduce import all_reduced
from trainer.doctor.exchange import Json

_NUM_VALUES = 4 << 20  # Of float32: 16 MiB.
_NUM_COPIED = 16 << 20  # 64 MiB take longer than the small ops before and after a copy.
_NUM_COPIES = 3


def known_vector(replica: Tensor, num_values: int = _NUM_VALUES) -> Tensor:
    """Returns [num_values] of float32, different for each replica; whole: sums are exact."""
    return tf.range(num_values, dtype=tf.float32) % 1021.0 + tf.cast(replica, tf.float32)


def check_devices(strategy: tf.distribute.Strategy) -> Json:
    """Checks the sum over all replicas, and the copies between the GPUs of this process."""
    gpus = [device for device in strategy.extended.worker_devices if "GPU" in device]
    return {
        "replicas": int(strategy.num_replicas_in_sync),
        "wrong_sums": wrong_sums(strategy),
        "copies": copies(gpus),
    }


def wrong_sums(
    strategy: tf.distribute.Strategy, vector_of: Callable[[Tensor], Tensor] = known_vector
) -> list[str]:
    """Returns the devices of this process on which the sum over all replicas is wrong.

    All workers of `strategy` must call it. `vector_of` returns the vector of a replica.
    """

    @tf.function
    def summed() -> Tensor:
        def of_replica() -> Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return all_reduced([vector_of(replica)])[0]

        return strategy.run(of_replica)

    number = strategy.num_replicas_in_sync
    expected = number * known_vector(0) + number * (number - 1) / 2
    sums = strategy.experimental_local_results(summed())
    devices = strategy.extended.worker_devices
    return [
        _short(device)
        for device, found in zip(devices, sums, strict=True)
        if not np.array_equal(found, expected)
    ]


def copies(devices: Sequence[str], copied: Callable[[Tensor], Tensor] = tf.identity) -> list[Json]:
    """Measures the rate of copies between all `devices`, and compares the values that arrive.

    `copied` copies a tensor to the current device.
    """
    found = []
    for source, target in itertools.permutations(devices, 2):
        secs = []
        for _ in range(_NUM_COPIES):
            # A new tensor each time: TensorFlow keeps the copy of a tensor on another device.
            with tf.device(source):
                sent = known_vector(0, _NUM_COPIED)
                sent[0].numpy()  # Waits until the GPU has computed the tensor.
            with tf.device(target):
                began = time.monotonic()
                arrived = copied(sent)
                arrived[0].numpy()
                secs.append(time.monotonic() - began)
        found.append(
            {
                "from": _short(source),
                "to": _short(target),
                "mb_per_sec": round(4e-6 * _NUM_COPIED / min(secs), 1),
                "is_right": bool(np.array_equal(sent, arrived)),
            }
        )
    return found


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"
