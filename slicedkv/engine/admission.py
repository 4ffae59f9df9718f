"""`Admission`: how requests get slots and what becomes of these at the end. Here they are given out and freed.

`PrefixCache` does the same with prefixes that requests share. Who gets a slot when is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..errors import ConfigError, StateError
from ..layout import KVLayout
from .request import Request

__all__ = ["Admission", "AdmittingCache", "slot_of"]


class AdmittingCache(Protocol):
    """The part of `SlicedKVCache` that admission uses; see there."""

    @property
    def layout(self) -> KVLayout: ...
    def alloc_reqid(self, seq_len: int = 0) -> int: ...
    def free_reqid(self, reqid: int) -> None: ...
    def is_active(self, reqid: int) -> bool: ...
    def can_admit(self, seq_len: int) -> bool: ...
    def pages_available(self) -> int: ...


class Admission:
    """Give slots to requests and take them back. Not thread-safe.

    Parameters
    ----------
    cache : AdmittingCache

    Attributes
    ----------
    num_cached_tokens : int
        Tokens that requests did not have to compute, so far.
    """

    def __init__(self, cache: AdmittingCache) -> None:
        self._cache = cache
        self.num_cached_tokens = 0

    @property
    def held_bytes(self) -> int:
        """Memory kept for requests to come."""
        return 0

    def pages(self, seq_len: int) -> int:
        """Pages over all planes of a request."""
        return self._cache.layout.pages_for(seq_len) * self._cache.layout.num_planes

    def can_admit(self, request: Request, seq_len: int, promised: int, running: Sequence[Request]) -> bool:
        """True when there is a slot for a request, and memory for `seq_len` tokens of it.

        Parameters
        ----------
        request : Request
            Waiting.
        seq_len : int
        promised : int
            Pages that the running requests still need.
        running : sequence of Request
        """
        # Memory first: it is what most are refused for, and with it there is nothing but a slot to ask for.
        return promised + self.pages(seq_len) <= self._cache.pages_available() and self._cache.can_admit(0)

    def is_fresh(self, request: Request) -> bool:
        """True when a waiting request begins with nothing that is computed already."""
        return True

    def admit(self, request: Request) -> int:
        """Return a slot for a request, and note which of its tokens are there already.

        Raises
        ------
        OutOfSlotsError, StateError, DriverError
            The cache has no slot, or failed. The request is as it was.
        """
        return self._cache.alloc_reqid(request.num_tokens)

    def note_computed(self, request: Request) -> None:
        """Note that a running request has computed more tokens."""

    def forget(self, request: Request) -> None:
        """Note that a running request is about to lose its slot and will be computed again."""

    def release(self, request: Request) -> None:
        """Take the slot of a request that is over, unless a failing driver lost it."""
        slot = slot_of(request)
        try:
            self._cache.free_reqid(slot)
        except StateError:
            if self._cache.is_active(slot):
                raise

    def trim(self) -> None:
        """Give up what is kept for requests to come beyond its limit; called when requests are over."""

    def evict(self) -> bool:
        """Give up something that is kept for requests to come; False when there is nothing."""
        return False

    def clear(self) -> None:
        """Give up all that is kept for requests to come."""
        while self.evict():
            pass


def slot_of(request: Request) -> int:
    """Return the slot of a running request."""
    if request.reqid is None:
        raise ConfigError(f"{request!r} holds no slot")
    return request.reqid
