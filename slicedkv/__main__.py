"""The command ``slicedkv``, also ``python -m slicedkv``, as a process: Ctrl-C ends it without a traceback."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["run"]


def run() -> int:
    """Run the command and return the exit code; 130 after Ctrl-C.

    While nothing runs yet, or no more, Ctrl-C ends the process on the spot: an exception in the middle of an import,
    or of the interpreter's end, would be printed by whoever meets it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background, which ignores it
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from .cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
