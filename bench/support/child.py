"""Run a function in a process of its own, because it may crash or hang.

This module imports little: every child imports it again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 90.0


def in_child(call: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Call a function of a module in a fresh process and return its row.

    Raises
    ------
    RuntimeError
        The function raised, or its process ended.
    TimeoutError
        The function took longer than `limit_s`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, call, arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise TimeoutError(f"no result after {limit_s:.0f} s")
        answer: dict[str, Any] | str = ours.recv()
    except EOFError:
        child.join(10)
        raise RuntimeError(f"its process ended with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        ours.close()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _answer(pipe: Connection, call: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> None:
    try:
        pipe.send(call(*arguments))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
