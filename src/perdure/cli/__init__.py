"""The command line: it starts processes and talks to running ones. Every verb imports what it needs only when it is used."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage or refused to start."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        # Answered before anything is imported that takes time.
        from importlib.metadata import version

        print(f"perdure {version('perdure')}")
        return 0
    from perdure.cli.application import run_command

    return run_command(arguments)
