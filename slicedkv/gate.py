"""`Gate`: the one lock over a cache's bookkeeping, and the right to talk to the driver.

Bookkeeping is guarded by a lock that is only ever held for moments. Mapping takes long, so it is done without the
lock, by whoever holds the *work token*: one thread at a time (mapping from two threads is no faster than from one on
an H200, see bench/mapper.py). Whoever holds the token may change what is mapped; the lock is taken again to commit.
A foreground thread that wants the token goes before the mapper. Every wait is bounded.

Knows nothing of what it guards. Caches that share a pool share its gate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import StateError

__all__ = ["Gate"]


class Gate:
    """A lock for bookkeeping and a token for driver work.

    Attributes
    ----------
    lock : threading.Condition
        Held for moments; notified when the token is handed back or when there is news for a mapper.
    mutex : threading.Lock
        The lock inside `lock`, for the one call that must be quick and waits for nothing.
    timeout_s : float
        Longest wait for the token, in seconds.
    """

    def __init__(self, timeout_s: float = 4.0) -> None:
        self.mutex = threading.Lock()
        self.lock = _Condition(self.mutex)
        self.timeout_s = timeout_s
        self._claim: _Claim | None = None
        self._foreground_waiting = 0

    @contextmanager
    def work(self, purpose: str) -> Iterator[None]:
        """Hold the work token for a foreground call; `purpose` appears in the error others get.

        Raises
        ------
        StateError
            The token did not come free within `timeout_s`: a driver call hangs. Nothing was changed.
        """
        claim = _Claim(purpose)
        try:
            self._take(claim)
            yield
        finally:  # no call comes before the token is free: an interrupt would be raised there
            if self._claim is claim:
                self._claim = None
            self._tell()

    def _take(self, claim: _Claim) -> None:
        with self.lock:
            self._foreground_waiting += 1
            try:
                self.lock.wait_for(lambda: self._claim is None, self.timeout_s)
            finally:
                self._foreground_waiting -= 1
            holder = self._claim
            if holder is None:
                self._claim = claim
                return
        raise StateError(
            f"{claim.purpose}: waited {self.timeout_s:g} s for {holder.purpose} to finish its driver calls; "
            "the driver hangs or is overloaded. Nothing was changed; try again or close the cache"
        )

    def try_claim(self, purpose: str) -> bool:
        """Take the token for a mapper unless it is taken or wanted by the foreground. Call with the lock held."""
        if self._claim is not None or self._foreground_waiting:
            return False
        self._claim = _Claim(purpose)
        return True

    def release_claim(self) -> None:
        """Undo `try_claim`. Call with the lock held, before it was given up."""
        self._claim = None

    def hand_back(self) -> None:
        """Give the token back and wake whoever waits for it."""
        self._claim = None
        self._tell()

    def _tell(self) -> None:
        with self.lock:
            self.lock.notify_all()


class _Claim:
    """Who holds the token: each claim is an object of its own."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose


class _Condition(threading.Condition):
    """A condition that is entered and left by its lock's own methods, which are C.

    Those of `threading` are Python, where Ctrl-C may be raised between taking the lock and saying so to ``with``: then
    it is never given back, and whoever wants it next waits for ever.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)
