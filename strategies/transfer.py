"""How tensors are sent between the tasks of a run."""

from dataclasses import dataclass

from data.system.errors import UsageError


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

    def check_between_gpus(self) -> None:
        """Raises UsageError if gradients cannot be sent in this way between GPUs.

        TensorFlow has NCCL sum float16, float32, float64 and integers only (nccl_manager.cc, 2.21).
        """
        if self.wire_dtype == "bfloat16" and self.communication != "ring":
            raise UsageError(
                "--wire_dtype=bfloat16 cannot be used between GPUs: TensorFlow's NCCL does not sum "
                "it. Type --wire_dtype=float16, or leave it out."
            )

    def check_exact(self, parts: int) -> None:
        """Raises UsageError if what is sent is rounded, with config.virtual_replicas=`parts`."""
        if (self.wire_dtype, self.read_dtype) != ("float32", "float32"):
            raise UsageError(
                f"config.virtual_replicas={parts}: what is rounded on its way depends on the "
                "number of replicas, so their bits cannot be equal. Leave out --wire_dtype and "
                "--read_dtype."
            )

    def check_between_workers(self, num_workers: int) -> None:
        """Raises UsageError if `num_workers` workers of multiworker send no gradients."""
        if self.wire_dtype != "float32" and num_workers == 1:
            raise UsageError(
                f"--wire_dtype={self.wire_dtype} is for gradients that are sent to other workers, "
                "but there is one worker. Leave it out, or give --workers=2."
            )


AS_COMPUTED = Transfer()  # Not rounded.
