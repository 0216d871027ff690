"""Reads the recipe from the flags, and checks what does not depend on a cluster of several hosts.

    recipe = read_recipe()
    check_sizes(recipe, num_workers=2, num_ps=0)

TensorFlow is not imported: a mistake is reported at once.
"""

import dataclasses
import os
import socket
from typing import TYPE_CHECKING

from data.system import object_store
from data.system.files import is_s3
from data.system.ports import when_released
from strategies.transfer import Transfer
from trainer import flags
from trainer.config import ConfigError, Recipe, data_dir, load_recipe
from trainer.config_checks import check, check_sub_batches, check_virtual_replicas

if TYPE_CHECKING:
    from strategies.cluster.tf_config import Cluster

# Pairs of flags that exclude each other, and pairs of which the first one needs the second one.
_EXCLUSIVE = (
    ("download_only", "model_dir", "trains nothing, so that {} would stay empty"),
    ("download_only", "check", "and {} are two ways to end early"),
    ("quiet", "verbose", "prints none of the lines that {} adds"),
    ("keep_serving", "max_restarts", "restarts this task without a limit, and would ignore {}"),
    ("keep_serving", "chief_timeout_secs", "waits without a limit, and would ignore {}"),
    ("sync_replicas", "max_staleness", "gives all gradients the staleness 0, and would ignore {}"),
)
_NEEDED = (
    ("rejoin_secs", "min_workers", "without it the others wait for a lost host without a limit"),
    ("metrics_host", "metrics_port", "without it nothing is served"),
    ("replicas_to_aggregate", "sync_replicas", "asynchronous steps aggregate nothing"),
)
METRICS_FD = "TRAINER_METRICS_FD"  # Names the descriptor of a socket that a launcher has made.


def read_recipe() -> Recipe:
    """Returns the recipe that --config names, with the fields that flags set, after all checks."""
    config = flags.CONFIG.value
    _check_epochs()
    for name, flag in flags.SHORTCUTS.items():
        if flag.value is None:
            continue
        field = f"config.{name}"
        if field in flags.FLAGS and flags.FLAGS[field].present:
            raise ConfigError(
                f"--{name}={flag.value} is short for --{field}, which is given too: "
                f"{flags.FLAGS[field].value}. Leave one of the two out."
            )
        setattr(config, name, flag.value)
    check(config)
    if any(map(is_s3, (flags.MODEL_DIR.value or "", data_dir(config)))):
        try:
            object_store.require()
        except object_store.MissingObstoreError as error:
            raise ConfigError(str(error.strerror)) from None
    recipe = load_recipe(flags.FLAGS["config"].config_filename)
    return dataclasses.replace(recipe, config=config)


def _check_epochs() -> None:
    epochs = flags.EPOCHS.value
    if epochs is None:
        return
    if epochs <= 0:
        raise ConfigError(f"--epochs must be above 0. Received: {epochs}. Type --epochs=10.")
    names = ("train_steps", "config.train_steps")
    if any(name in flags.FLAGS and flags.FLAGS[name].present for name in names):
        raise ConfigError(
            f"--epochs={epochs:g} and --train_steps both say when training ends. Leave one out."
        )


def metrics_listener(*, is_chief: bool) -> socket.socket | None:
    """Returns a socket for readers of the chief's metrics; None without --metrics_port.

    A launcher listens before it starts the chief, which may be in another network namespace, and
    passes the socket with the variable METRICS_FD.

    Raises ConfigError if nothing can listen at that address.
    """
    host, port = flags.METRICS_HOST.value or "0.0.0.0", flags.METRICS_PORT.value
    if port is None or not is_chief:
        return None
    if inherited := os.environ.pop(METRICS_FD, None):
        return socket.socket(fileno=int(inherited))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # The first of IPv4 if there is one: localhost is 127.0.0.1, too.
        family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return when_released(
            lambda: socket.create_server(address, family=family, dualstack_ipv6=both)
        )
    except OSError as error:
        raise ConfigError(
            f"--metrics_port={port} cannot be listened at on {host}: {error.strerror}. Give "
            "another --metrics_port, or an address of this machine as --metrics_host."
        ) from None


def check_strategy_of_flags() -> None:
    """Refuses flags of other strategies."""
    strategy = flags.STRATEGY.value
    for name, scope in flags.SCOPES.items():
        flag = flags.FLAGS[name]
        if flag.present and strategy not in scope.strategies:
            raise ConfigError(
                f"--{name}={flag.value} is for --strategy={' or '.join(scope.strategies)}, and "
                f"would be ignored under {strategy}. Leave it out."
            )


def check_pairs() -> None:
    """Refuses two flags of which one would be ignored, and a flag without one that it needs."""
    for name, other, why in _EXCLUSIVE:
        if _is_given(name) and _is_given(other):
            says = why.format(flags.FLAGS[other].serialize())
            raise ConfigError(f"--{name} {says}. Leave one of the two out.")
    for name, other, why in _NEEDED:
        if _is_given(name) and not _is_given(other):
            given = flags.FLAGS[name].serialize()
            raise ConfigError(f"{given} needs --{other}: {why}. Add it, or leave --{name} out.")


def _is_given(name: str) -> bool:
    return flags.FLAGS[name].present and flags.FLAGS[name].value is not False


def check_sizes(recipe: Recipe, num_workers: int, num_ps: int) -> None:
    """Refuses flags that do not fit the number of workers, or of parameter servers."""
    num_summed = num_to_aggregate(recipe, num_workers)
    parts = recipe.config.virtual_replicas
    if (recipe.config.deterministic or parts) and num_ps and num_summed < num_workers:
        option = f"config.virtual_replicas={parts}" if parts else "--deterministic"
        raise ConfigError(
            f"{option}: the steps of ps depend on which workers are fast, unless each step "
            "sums the gradients of all. Add --sync_replicas, without --replicas_to_aggregate."
        )
    secs, limit = recipe.config.local_steps.every_secs, flags.STALL_TIMEOUT_SECS.value
    if limit and secs > limit / 2:
        raise ConfigError(
            f"config.local_steps.every_secs={secs:g}: a task ends after --stall_timeout_secs="
            f"{limit:g} without an average. Type --stall_timeout_secs={4 * secs:g}, for example."
        )
    transfer = Transfer(**flags.values_of(Transfer))
    if parts:
        transfer.check_exact(parts)
        if flags.MIN_WORKERS.present and not num_ps:
            check_virtual_replicas(recipe.config, flags.MIN_WORKERS.value)
    if flags.STRATEGY.value == "multiworker":
        transfer.check_between_workers(num_workers)
    if num_ps and (flags.NUM_GPUS.value or 0) > 1:
        raise ConfigError(
            f"--num_gpus={flags.NUM_GPUS.value}: a worker of ps computes on one GPU. Leave it out, "
            "and start a worker for each GPU: the tasks of a host divide its GPUs."
        )
    if flags.PS_STANDBY.value and num_ps < 2:
        raise ConfigError(
            f"--ps_standby={flags.PS_STANDBY.value} copies the variables of each ps to another ps, "
            f"but the number of ps tasks is {num_ps}. Leave it out, or type --ps=2."
        )


def serves(cluster: "Cluster") -> bool:
    """Returns True if this task only executes the ops that a chief in another process sends."""
    return cluster.is_server and (flags.KEEP_SERVING.value or not cluster.is_chief)


def num_to_aggregate(recipe: Recipe, num_workers: int) -> int:
    """Returns the number of gradients of a synchronous step, after checks; 0 if asynchronous."""
    wanted = flags.REPLICAS_TO_AGGREGATE.value
    if not flags.SYNC_REPLICAS.value:
        return 0
    wanted = num_workers if wanted is None else wanted
    if not 1 <= wanted <= num_workers:
        raise ConfigError(
            f"--replicas_to_aggregate must be from 1 to the number of workers, {num_workers}. "
            f"Received: {wanted}. A step cannot wait for more gradients than there are workers."
        )
    check_sub_batches(recipe.config, wanted, num_workers)
    return int(wanted)
