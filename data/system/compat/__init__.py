"""What depends on private or undocumented behaviour of TensorFlow, Keras, gRPC, glibc or CPython.

One file for each use. Its docstring says what the use is for, with which versions it was seen, and
when the file can be deleted. `make compat` runs tests/unit/compat with the newest TensorFlow and
Keras: a test fails if a use no longer works, or if it is no longer needed. Read this folder before
you move to another version. Files that are imported before TensorFlow do not import it.
"""
