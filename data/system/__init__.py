"""What the operating system offers: files (local or at a URL), CPU cores, command-line errors.

`files.py` has one set of functions for local paths and for URLs that TensorFlow can open.
`cores.py` counts the CPU cores of this process. `flags.py` turns a mistyped flag into one message
and exit code 2. `stopwatch.py` divides the time of a process into causes. `compat/` has what
depends on private parts of TensorFlow and Keras. Read `files.py` first.
"""
