"""The files that a run writes beside checkpoints, and the functions that read them.

`recorder.py` writes the time of a task while it runs, `goodput.py` adds up the time of all tasks.
`report_upload.py` uploads the reports of a run at s3://. `summary.py` and `tools.py` serve commands
that read runs. ../run_files.py has the names and formats of the files: read it first.
"""
