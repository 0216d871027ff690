"""`--strategy=ps`: parameter servers hold the variables, workers compute the gradients.

The chief hands out work and does not train. `executor.py` has what both kinds share,
`asynchronous.py` applies each gradient when it arrives, and `sync/` sums the first n gradients of a
step. `worker_step.py` is what a worker computes. `recovery.py` is how the next chief continues.
Read `executor.py` first, then `worker_step.py`.
"""
