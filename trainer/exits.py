"""Exit codes, which a scheduler can act on, and the one line that says why."""

EXIT_DONE = 0
# A bug, or training diverged.
EXIT_BUG = 1
# Bad usage, config or data: starting again would end in the same way.
EXIT_USAGE = 2
# A peer was lost, or this task was asked to stop: what was saved is whole, start it again.
EXIT_RESTART = 75


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type if it says nothing."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
