"""The end of a cache: shut-down, a cache that nobody closed, a forked child, the interpreter's exit.

`shut_down` is a function of the parts and not a method of the cache, so that a forgotten cache can be finalized.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

from .errors import StateError
from .memory.patience import TIMEOUT_S
from .paging.mapper import Mapper
from .state.cache_state import CacheState
from .unique import Unique

__all__ = ["Closeable", "abandon", "shut_down"]

_PACKAGE = __name__.partition(".")[0]
_FINISH_TRIES = 5
_LAST_CALLS_S, _POLL_S = 2.0, 0.001

_CLOSED = "the cache is closed; open a new one"
_CLOSING = "the cache is being closed; if that failed, call close() again"
_FORKED = "this cache belongs to the parent process; a forked child must open its own"

_opened: weakref.WeakSet[Closeable] = weakref.WeakSet()
_finishing: set[_thread.LockType] = set()
"""A lock for each thread of `_finish_elsewhere`, held while it runs."""


class Closeable(Unique, ABC):
    """A public object that is closed once and belongs to the process that opened it. It is a context manager."""

    def __init__(self) -> None:
        self._refusal: str | None = "the cache is not open"  # until all of it is
        _opened.add(self)

    @property
    def closed(self) -> bool:
        """True when it can no longer be used."""
        return self._refusal == _CLOSED

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise StateError(self._refusal)

    def close(self) -> None:
        """Unmap everything and give all memory back, after all work of the device. A second call does nothing.

        Views keep their addresses reserved, and reading or writing them faults.

        Raises
        ------
        StateError, DriverError
            The driver hangs or fails, or a call on this thread is in the way; `close` may be called again.
        """
        refusal = self._refusal
        if refusal == _CLOSED:
            return
        if refusal not in (None, _CLOSING):
            raise StateError(refusal)
        self._before_close()
        self._refusal = _CLOSING
        self._close()
        self._refusal = _CLOSED

    def _before_close(self) -> None:
        """Raise `StateError` when the calling thread is in the middle of a call: `close` would wait for itself."""

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shut_down(state: CacheState, mapper: Mapper) -> None:
    """Stop the mapper, wait for the device, unmap everything. If a cache opened the pool, its last cache ends it.

    Raises
    ------
    StateError, DriverError
        Something hangs or the driver failed; it may be called again.
    """
    mapper.stop()
    with state.gate.work("close"):
        if state.closed:
            return
        with state.gate.lock:
            state.lengths.reset_all()  # a step that is already past its checks must not find anything mapped
        state.pool.driver.synchronize()
        state.backing.unmap_all(unknown=state.slots.lost)
        state.host.close()
        shares = state.pool.shares
        with state.gate.lock:
            shares.leave(state)
        if shares.own_pool and not shares.members:
            shares.ended = True
            state.pool.trim()
            state.pool.driver.close()
        state.closed = True


def abandon(state: CacheState, mapper: Mapper, owner_pid: int) -> None:
    """Shut down a cache that was dropped, on another thread.

    The collector calls this on any thread, also on one that holds the gate's lock or token, so nothing waits here.
    """
    if os.getpid() == owner_pid:
        _finish_elsewhere(lambda: shut_down(state, mapper))


def _finish_elsewhere(finish: Callable[[], None]) -> None:
    """Run `finish` on a thread of its own, without waiting and without taking a lock; failures are tried again."""
    running = _thread.allocate_lock()
    running.acquire()
    _finishing.add(running)

    def run() -> None:
        nonlocal finish
        for _ in range(_FINISH_TRIES):
            with suppress(Exception):
                finish()
                break
        # What dies with it makes driver calls, too: an interpreter that has ended by then would end the process.
        del finish
        _finishing.discard(running)
        running.release()

    # threading.Thread takes locks of its own, which the thread that collects may hold.
    with suppress(RuntimeError):  # the interpreter is at its end, and so is all memory
        _thread.start_new_thread(run, ())


def _wait_for_finishing() -> None:
    """Wait, for a bounded time, until every `_finish_elsewhere` is done: the interpreter must not end under it."""
    for running in list(_finishing):
        running.acquire(timeout=TIMEOUT_S)


def _refuse_all() -> None:
    """Refuse all calls in a forked child: threads that are not here may hold locks, and memory is the parent's."""
    for opened in list(_opened):
        if not opened.closed:
            opened._refusal = _FORKED


os.register_at_fork(after_in_child=_refuse_all)


@atexit.register
def _close_all() -> None:
    """Close what is open when the interpreter exits: nobody is there to handle an error."""
    left_open = [opened for opened in list(_opened) if not opened.closed]
    for opened in left_open:
        with suppress(Exception):
            opened.close()
    _wait_for_finishing()
    if left_open:
        _wait_for_calls()


def _wait_for_calls() -> None:
    """Wait, for a bounded time, until no daemon thread is inside the library any more.

    Such a thread finds everything closed. One that comes back from a computation of torch when the interpreter has
    ended would end the process.
    """
    own, end = threading.get_ident(), time.monotonic() + _LAST_CALLS_S
    while time.monotonic() < end:
        if not any(_is_inside(frame) for thread, frame in sys._current_frames().items() if thread != own):
            return
        time.sleep(_POLL_S)


def _is_inside(frame: FrameType | None) -> bool:
    """True when a function of this package is running in a frame or called what does."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            return True
        frame = frame.f_back
    return False
