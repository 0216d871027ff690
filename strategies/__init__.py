"""Where training happens: the only package in which the strategies differ.

`base.py` has the contract, `Executor`: when `run(n)` returns, no step is in flight. `mirrored.py`
has the training step and runs it in one process; `multiworker.py` runs the same step on many hosts;
`ps/` has parameter servers, asynchronous and synchronous. `gradients/` sends gradients between
devices; `cluster/` knows the tasks. Read `base.py` first, then `mirrored.py`.
"""
