"""Checkpoints: what is saved, in the background, and how a damaged one is detected and skipped.

`checkpointer.py` saves and restores: read it first. `marks.py` says whether a checkpoint is
complete. `snapshot.py` copies the variables so that training can continue meanwhile.
`table_files.py` writes and reads tables in pieces. `file_checks.py` has checksums and the errors of
a full disk, `finite.py` refuses to save values that are not finite. `warm_start.py` takes the first
weights from another run.
"""
