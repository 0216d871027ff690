"""How tensors are sent between the tasks of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """The values of the flags of these names, which trainer/flags/ explains.

    Attributes:
        communication: How multiworker sums: auto, ring or nccl.
        wire_dtype: The type in which gradients are sent.
        read_dtype: The type in which parameter servers send variables to workers.
        bucket_mb: The size of a bucket of gradients in MiB. None: measured, or as recorded in the
            run that is resumed.
    """

    communication: str = "auto"
    wire_dtype: str = "float32"
    read_dtype: str = "float32"
    bucket_mb: float | None = None


AS_COMPUTED = Transfer()  # Not rounded.
