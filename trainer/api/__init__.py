"""Training from Python: `trainer.train`, `trainer.load_run` and what they return.

`training.py` has `train`, and runs the command in another process: read it first. `arguments.py`
turns keyword arguments into words of a command line, and `here.py` trains in this process.
`result.py` is what a run leaves behind. trainer/__init__.py lists the public names.
"""
