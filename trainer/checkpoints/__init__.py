"""Checkpoints: what is saved, in the background, and how a damaged one is detected and skipped.

`checkpointer.py` saves and restores: read it first. It is the sum of `store.py` (one checkpoint on
disk), `identity.py` (may a run continue from it?), `retention.py` (which ones are removed?) and
`snapshot.py`, which copies the variables so that training can continue meanwhile.
`marks.py` tells if a checkpoint is complete, with the checksums of `file_checks.py`. `finite.py`
refuses to save values that are not finite. `last_step.py` saves the last step after an error, and
`survivors.py` after the death of another task. `warm_start.py` takes the first weights from another
run.
"""
