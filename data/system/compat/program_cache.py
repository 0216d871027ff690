"""TensorFlow's cache of the programs that XLA has compiled for CPUs, in this process's memory.

    set_program_cache()             # before TensorFlow's first look for devices
    as_text(entry)                  # of a file in PROGRAM_CACHE

TensorFlow 2.21 reads the flags of TF_XLA_FLAGS once, and does not document them. A damaged entry
ends the step with an error. TensorFlow tries to read an entry as text first, and prints an error if
it is none. Can be deleted when TensorFlow has a documented cache that survives damage.
"""

import os

PROGRAM_CACHE = "ram://compiled"
_VARIABLE = "TF_XLA_FLAGS"
_OPTION = "--tf_xla_persistent_cache_directory"
# Not tried on GPUs, where an error of the cache would end the step. An entry has no computation to
# compare: its name has the computation's hash.
_OPTIONS = (
    f"{_OPTION}={PROGRAM_CACHE} --tf_xla_persistent_cache_device_types=CPU"
    " --tf_xla_disable_strict_signature_checks"
)
_ESCAPES = ((b"\\", b"\\\\"), (b'"', b'\\"'), (b"\n", b"\\n"), (b"\0", b"\\000"))


def set_program_cache() -> None:
    """Makes TensorFlow use PROGRAM_CACHE, unless the user names a cache, or a file of flags."""
    flags = os.environ.get(_VARIABLE, "")
    if _OPTION not in flags and flags.strip()[:1] in ("", "-"):
        os.environ[_VARIABLE] = f"{flags} {_OPTIONS}".strip()


def has_program_cache() -> bool:
    """Returns True if TensorFlow uses PROGRAM_CACHE."""
    return PROGRAM_CACHE in os.environ.get(_VARIABLE, "")


def as_text(entry: bytes) -> bytes:
    """An entry of the cache as text, without the computation, which is not compared."""
    # Here, because this module is imported before TensorFlow.
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    fields = {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(entry))}
    key = {f.field_number: f.data for f in UnknownFieldSet(Empty.FromString(fields[1]))}
    program = fields[3]
    for byte, escaped in _ESCAPES:
        program = program.replace(byte, escaped)
    return (
        b'key { signature_fingerprint: %d cluster_fingerprint: %d device_type: "%s" prefix: "%s" '
        b'compiled_using_pjrt: %d } executable: "%s"'
    ) % (key[1], key[2], key[3], key[4], key.get(5, 0), program)
