"""`python -m trainer.evaluate RUN`: evaluates a checkpoint of a run on the devices of this machine.

    python -m trainer.evaluate runs/latest                          # the newest checkpoint
    python -m trainer.evaluate runs/a --checkpoint=best --split=train
    best-00000900  train  loss 0.0021  accuracy 0.9993  1,437 examples

The model, the loss, the metrics and the data are those of the run: its config.json and config file
say which. The metrics are the trainer's own, up to rounding. A checkpoint of any strategy works.
"""

from collections.abc import Sequence

from absl import flags

from trainer.exit_codes import EXIT_DONE
from trainer.run_files import json_text, metric_words
from trainer.run_record.tools import prepare_tensorflow, run_tool, runs_of
from trainer.run_record.trust import check_trust, define_trust


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_string(
        "checkpoint",
        "newest",
        "The checkpoint that is evaluated: newest, newest_complete (if the newest is damaged), "
        "best, or a step such as 1000.",
    )
    flags.DEFINE_string("split", None, "Split to read; by default the evaluation split.")
    flags.DEFINE_string(
        "data_dir", None, "Directory with TFRecord files; by default that of the run."
    )
    flags.DEFINE_boolean("json", False, "Print JSON.")
    define_trust()


def main(argv: Sequence[str]) -> int:
    """Prints the metrics; returns the exit code."""
    (model_dir,) = runs_of(argv, command="trainer.evaluate", number=1)
    check_trust(model_dir)
    prepare_tensorflow()
    from trainer.session import evaluate  # It imports TensorFlow.

    found = evaluate(model_dir, flags.FLAGS.checkpoint, flags.FLAGS.split, flags.FLAGS.data_dir)
    if flags.FLAGS.json:
        print(json_text(found))
        return EXIT_DONE
    shown = [*metric_words(found), f"{found['examples']:,} examples"]
    words = [found["checkpoint"], found["split"], *shown]
    print("  ".join(words))
    return EXIT_DONE


if __name__ == "__main__":
    run_tool(main, define_flags)
