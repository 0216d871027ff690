"""What the operating system offers: files (local or at a URL), CPU cores, command-line errors.

`files.py` has one set of functions for local paths and for URLs that TensorFlow can open.
`cores.py` counts the CPU cores of this process. `flags.py` turns a mistyped flag into one message
and exit code 2. `quiet.py` hides TensorFlow's start-up messages. `stopwatch.py` divides the time
of a process into causes. Read `files.py` first.
"""
