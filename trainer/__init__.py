"""What happens: `python -m trainer`, from the command line to the last checkpoint.

`__main__.py` parses the command line, `task.py` runs one task from top to bottom, and `loop.py` is
the training loop. `learner.py` has the maths of a step, which all strategies share. Read `task.py`
first, then `loop.py`. Only cli/ and two functions of `task.py` ask which strategy is in use.
"""
