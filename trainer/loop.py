"""The loop: run steps up to the next step of a hook, call the hooks, repeat.

It knows neither the strategy nor the cluster. Under multiworker every worker runs it; under ps only
the chief does.
"""

from collections.abc import Sequence

from strategies.base import Executor, Learner
from trainer.hooks.base import Hook


def train(
    executor: Executor, learner: Learner, hooks: Sequence[Hook], *, steps: int, steps_per_call: int
) -> int:
    """Trains until `steps`, a hook is done or a stop is requested; returns the last step.

    Hooks are called in their order, at steps where no step is in flight. The counter is re-read
    after each call, never counted here: asynchronous steps may overshoot.
    """
    step = int(learner.step.numpy())
    for hook in hooks:
        hook.begin(step)
    while step < steps and not executor.stopping and not any(hook.done for hook in hooks):
        stop = min(steps, step + steps_per_call, *(hook.next_step(step) for hook in hooks))
        metrics = executor.run(stop - step)
        step = int(learner.step.numpy())
        for hook in hooks:
            hook(step, metrics)
    for hook in hooks:
        hook.end(step)
    return step
