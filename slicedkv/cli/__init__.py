"""The command ``slicedkv``: `info`, `demo`, `plan` and `bench`, one module each, and how errors reach the user.

A subcommand's module has `add_arguments(parser)` and `run(options) -> int`. Only the module of the subcommand that was
called is imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from .. import __version__
from ..errors import SlicedKVError

__all__ = ["main"]

_COMMANDS = {
    "info": "what this machine offers: drivers, memory, packages, attention backends",
    "demo": "serve a small real model and show what its KV cache holds",
    "plan": "memory arithmetic for a model's shape, by layout; touches no device",
    "bench": "run a measurement of the source checkout, or all",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of this process.

    Returns
    -------
    int
        0; 2 after an error of the library, which it prints in one line; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser(words).parse_args(words)
        with _interrupts_raised():
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except SlicedKVError as error:
        print(f"slicedkv: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough; leave nothing to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Make Ctrl-C a KeyboardInterrupt, so that a command closes what it opened. An ignored Ctrl-C stays ignored."""
    former = signal.getsignal(signal.SIGINT)
    if not callable(former) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all subcommands, with the arguments of the one that `words` begin with."""
    parser = argparse.ArgumentParser(
        prog="slicedkv", description="K and V contiguous in virtual memory, physical pages committed as requests grow."
    )
    parser.add_argument("--version", action="version", version=f"slicedkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, summary in _COMMANDS.items():
        found = commands.add_parser(name, help=summary, description=summary)
        if name in words[:1]:
            module = import_module(f"{__name__}.{name}")
            module.add_arguments(found)
            found.set_defaults(run=module.run)
    return parser
