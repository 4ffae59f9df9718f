"""`Gate`: the one lock over a cache's bookkeeping, and the right to talk to the driver.

A lock guards the books; everybody holds it for moments only. Mapping takes long, so it needs the *work token* instead.
One thread has it at a time (on an H200, two threads map no faster than one, see bench/mapper.py); it changes what is
mapped, then takes the lock and writes that into the books. A foreground thread that wants the token goes before the
mapper.

Every wait is bounded, and no thread waits for itself. A signal's handler or a finalizer may call on a thread that is
inside already; `is_inside` and `is_working` tell. Caches that share a pool share its gate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import StateError
from .patience import TIMEOUT_S

__all__ = ["Claim", "Gate"]


class Claim:
    """Who holds the work token, and what for. Each holder makes an object of its own."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.thread = threading.get_ident()


class Gate:
    """A lock for bookkeeping and a token for driver work.

    Attributes
    ----------
    lock : threading.Condition
        Held for moments; notified when the token is handed back or when there is news for a mapper.
    mutex : threading.RLock
        The lock inside `lock`, for the one call that must be quick and waits for nothing. It knows its owner, so that a
        call on the thread that is inside can be refused; nobody takes it twice.
    claim : Claim or None
        Who holds the token.
    is_inside : function
        Returns True when the calling thread holds the lock.
    timeout_s : float
        Longest wait for the token, in seconds.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.mutex = threading.RLock()
        self.lock = _Condition(self.mutex)
        self.timeout_s = timeout_s
        self.claim: Claim | None = None
        self.is_inside: Callable[[], bool] = self.mutex._is_owned  # type: ignore[attr-defined]
        self._foreground_waiting = 0

    def is_working(self) -> bool:
        """True when the calling thread holds the work token already."""
        claim = self.claim
        return claim is not None and claim.thread == threading.get_ident()

    def refuse_inside(self) -> None:
        """Raise `StateError` when the calling thread holds the lock: it would wait for itself."""
        if self.is_inside():
            raise StateError(
                "this thread is in the middle of another call of the cache, which a signal's handler or a finalizer "
                "interrupted; only free_reqid and handles can be given back there. Call again when that call is over"
            )

    @contextmanager
    def work(self, purpose: str) -> Iterator[None]:
        """Hold the work token for a foreground call; `purpose` appears in the error others get.

        Raises
        ------
        StateError
            The token did not come free within `timeout_s`: a driver call hangs. Or the calling thread has it: it was
            interrupted in the middle of driver work. Nothing was changed.
        """
        claim = Claim(purpose)
        try:
            self._take(claim)
            yield
        finally:  # no call comes before the token is free: an interrupt would be raised there
            if self.claim is claim:
                self.claim = None
            self._tell()

    def _take(self, claim: Claim) -> None:
        with self.lock:
            if self.is_working():
                raise StateError(
                    f"{claim.purpose}: this thread is in the middle of {self._purpose()}; call again when that is over"
                )
            self._foreground_waiting += 1
            try:
                self.lock.wait_for(lambda: self.claim is None, self.timeout_s)
            finally:
                self._foreground_waiting -= 1
            if self.claim is None:
                self.claim = claim
                return
            purpose = self._purpose()
        raise StateError(
            f"{claim.purpose}: waited {self.timeout_s:g} s for {purpose} to finish its driver calls; "
            "the driver hangs or is overloaded. Nothing was changed; try again or close the cache"
        )

    def _purpose(self) -> str:
        return "nothing" if self.claim is None else self.claim.purpose

    def try_claim(self, purpose: str) -> bool:
        """Take the token for a mapper unless it is taken or wanted by the foreground. Call with the lock held."""
        if self.claim is not None or self._foreground_waiting:
            return False
        self.claim = Claim(purpose)
        return True

    def drop_claim(self) -> None:
        """Undo `try_claim`. Call with the lock held, before it was given up."""
        self.claim = None

    def hand_back(self) -> None:
        """Give the token back and wake whoever waits for it."""
        self.claim = None
        self._tell()

    def _tell(self) -> None:
        with self.lock:
            self.lock.notify_all()


class _Condition(threading.Condition):
    """A condition that is entered and left by its lock's own methods, which are C.

    Those of `threading` are Python, where Ctrl-C may be raised between taking the lock and saying so to ``with``: then
    it is never given back, and whoever wants it next waits for ever.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)
