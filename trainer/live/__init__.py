"""The live view: one screen of a run on a terminal, drawn by a process of its own.

`view.py` starts that process and sends it what this process prints. `draw.py` is that process: it
knows the run from these lines, from the files of the run and from /proc (`status.py`), and draws it
(`screen.py`). It has no TensorFlow inside, takes no time of a training step, and restores the
terminal however the run ends. Read `view.py` first, then `draw.py`.
"""
