"""`Admission`: gives slots to requests and frees them when requests are over.

`PrefixCache` is an admission that lets requests share prefixes. The scheduler decides who gets a slot, and when.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError, StateError
from .request import Request
from .served_cache import ServedCache

__all__ = ["Admission", "slot_of"]


class Admission:
    """Give slots to requests and take them back. Not thread-safe.

    Parameters
    ----------
    cache : ServedCache

    Attributes
    ----------
    num_cached_tokens : int
        Tokens that requests did not have to compute, so far.
    """

    def __init__(self, cache: ServedCache) -> None:
        self._cache = cache
        self.num_cached_tokens = 0

    @property
    def held_bytes(self) -> int:
        """Memory kept for later requests."""
        return 0

    def pages(self, seq_len: int) -> int:
        """Pages over all planes that `seq_len` tokens of a request need."""
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
        # Memory first: most refusals are for memory. `can_admit(0)` then asks for a slot alone.
        return promised + self.pages(seq_len) <= self._cache.pages_available() and self._cache.can_admit(0)

    def is_fresh(self, request: Request) -> bool:
        """True when no slot has computed what a waiting request begins with."""
        return True

    def admit(self, request: Request) -> int:
        """Return a slot for a request, and note which of its tokens need not be computed.

        Raises
        ------
        OutOfSlotsError, StateError, DriverError
            The cache has no slot, or failed. The request is as it was.
        """
        return self._cache.alloc_reqid(request.num_tokens)

    def note_computed(self, request: Request) -> None:
        """Note that a running request has computed more tokens."""

    def forget(self, request: Request) -> None:
        """Note that a running request is about to lose its slot."""

    def release(self, request: Request) -> None:
        """Free the slot of a request that is over, unless a failing driver lost it."""
        slot = slot_of(request)
        try:
            self._cache.free_reqid(slot)
        except StateError:
            if self._cache.is_active(slot):
                raise

    def trim(self) -> None:
        """Keep no more for later requests than the limit allows. The scheduler calls it when requests are over."""

    def evict(self) -> bool:
        """Give up one thing that is kept for later requests. False: there is nothing."""
        return False

    def clear(self) -> None:
        """Give up all that is kept for later requests."""
        while self.evict():
            pass


def slot_of(request: Request) -> int:
    """Return the slot of a running request."""
    if request.reqid is None:
        raise ConfigError(f"{request!r} holds no slot")
    return request.reqid
