"""Training from Python: `trainer.train`, `trainer.load_run` and what they return.

`training.py` has `train`: read it first. `arguments.py` turns keyword arguments into words of a
command line, `here.py` trains in this process, and `command.py` in another process. `result.py` is
what a run leaves behind. trainer/__init__.py lists the public names.
"""
