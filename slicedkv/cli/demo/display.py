"""Output of a long run: its lines, and how far it is, as a bar on a terminal and as sparse lines in a log."""

from __future__ import annotations

import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Display", "LogDisplay", "TerminalDisplay", "Transcript", "open_display"]

_LINE_END = re.compile(r"(?<=[^\W\d][.!?])\s|\n")  # a letter before the full stop: "1." begins a list


class Display(ABC):
    """Where lines and progress go. A context manager. Use it from one thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def line(self, text: str, number: int | None = None) -> None:
        """Print a line, marked as coming from the request of that number."""

    @abstractmethod
    def progress(self, done: int, total: int, note: str) -> None:
        """Say how far it is. May be called very often."""

    def close(self) -> None:  # noqa: B027 (nothing to do for a log)
        """Take the progress bar away."""


class LogDisplay(Display):
    """Plain lines; progress at most once in `interval_s` seconds."""

    def __init__(self, stream: TextIO, interval_s: float = 10.0) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._last = time.monotonic()

    def line(self, text: str, number: int | None = None) -> None:
        """Print a line."""
        print(text if number is None else f"{_mark(number)}{text}", file=self._stream, flush=True)

    def progress(self, done: int, total: int, note: str) -> None:
        """Print the progress when it is time."""
        if time.monotonic() - self._last >= self._interval_s:
            self._last = time.monotonic()
            self.line(f"-- {_so_far(done, total, note)}")


class TerminalDisplay(Display):
    """A bar of `rich` below the lines, and a colour for each request."""

    _COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def line(self, text: str, number: int | None = None) -> None:
        """Print a line above the bar."""
        from rich.text import Text

        colour = "" if number is None else self._COLOURS[number % len(self._COLOURS)]
        mark = "" if number is None else _mark(number)
        self._progress.console.print(Text.assemble((mark, colour), text), soft_wrap=True)

    def progress(self, done: int, total: int, note: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=total, description=_so_far(done, total, note))

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


class Transcript:
    """Cuts a growing text into lines fit to print: whole sentences, or lines of the text.

    Parameters
    ----------
    decode : callable
        Turns all tokens so far into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown = 0

    def take(self, tokens: Sequence[int], *, last: bool) -> list[str]:
        """Return the lines that are complete and have not been returned; with `last` all the rest."""
        fresh = self._decode(tokens)[self._shown :]
        end = len(fresh) if last else max((match.end() for match in _LINE_END.finditer(fresh)), default=0)
        self._shown += end
        return [line.strip() for line in fresh[:end].splitlines() if line.strip()]


def open_display() -> Display:
    """Return the display that suits standard output."""
    terminal = sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return TerminalDisplay() if terminal and find_spec("rich") else LogDisplay(sys.stdout)


def _mark(number: int) -> str:
    return f"[{number:2}] "


def _so_far(done: int, total: int, note: str) -> str:
    return f"{done:,} of {total:,} tokens, {note}"
