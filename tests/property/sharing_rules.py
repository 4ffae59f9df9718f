"""The machine's rules that share: a prefix with a new request, all tokens with several, and what that saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from inside import planes_of
from request_model import SLOTS, TOKENS, Request, lengths, picks

from slicedkv import OutOfPagesError, OutOfSlotsError, SlicedKVCache, StateError
from slicedkv.vmm.faulty import FaultyDriver


class SharingRules(RuleBasedStateMachine):
    """Part of `CacheMachine`, which has the cache, the model and what is used of both here."""

    cache: SlicedKVCache
    driver: FaultyDriver
    requests: list[Request]
    active: list[Request]
    exact: bool
    call: Callable[..., Any]
    pick: Callable[[int], Request]
    begin: Callable[..., Request]
    add: Callable[[int], Request]
    free: Callable[[int], None]

    @precondition(lambda self: 0 < len(self.requests) < SLOTS)
    @rule(index=picks, num_tokens=st.integers(1, TOKENS), ahead=st.one_of(st.just(0), lengths))
    def share(self, index: int, num_tokens: int, ahead: int) -> None:
        """A new request gets the first tokens of another."""
        source, target, layout = self.pick(index), self.begin(ahead), self.cache.layout
        if source.handle is not None:
            return
        if num_tokens > source.last:
            with pytest.raises(StateError, match=f"reqid {source.reqid} has {source.last} tokens"):
                self.call(self.cache.share_prefix, source.reqid, target.reqid, num_tokens)
            return
        needed = (layout.pages_for(num_tokens) - layout.whole_pages(num_tokens)) * layout.num_planes
        fits = needed <= self.cache.pages_available()
        shareable, shared = self.cache.shareable_pages(source.reqid, num_tokens), self.cache.stats().pages_shared
        ok = self.call(self.cache.share_prefix, source.reqid, target.reqid, num_tokens)
        assert self.cache.stats().pages_shared - shared == (shareable if ok else 0)
        if self.exact and not ahead and self.cache.pool.extent_pages == 1:
            assert ok == fits
        if ok:
            target.inherit(source, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(index=picks, count=st.integers(1, SLOTS - 1))
    def fork(self, index: int, count: int) -> None:
        """What was swapped out gets its slot again, so that nobody takes the last one from it."""
        source = self.pick(index)
        if count > SLOTS - len(self.requests):
            if source.handle is None and count > SLOTS - len(self.active):
                with pytest.raises(OutOfSlotsError):
                    self.call(self.cache.fork, source.reqid, count)
            return
        reqids: list[int] = []
        if source.handle is None:
            with suppress(OutOfPagesError):
                reqids = self.call(self.cache.fork, source.reqid, count)
        assert len(reqids) == count or source.handle is not None or source.last
        for reqid in reqids:
            self.add(reqid).inherit(source, source.last)
        for _ in range(count - len(reqids)):  # as many requests, or the timing would change the example
            self.begin()

    @precondition(lambda self: self.requests)
    @rule(indices=st.sets(picks, min_size=1), others=st.sets(st.integers(0, SLOTS - 1)))
    def free_several(self, indices: set[int], others: set[int]) -> None:
        """Several requests end; how much memory that gives was said before."""
        ending = {self.pick(index).reqid for index in indices}
        idle = others - {request.reqid for request in self.requests}
        pages, available = self.cache.freeable_pages(ending | idle), self.cache.pages_available()
        for index in reversed(range(len(self.requests))):
            if self.requests[index].reqid in ending:
                self.free(index)
        # Otherwise memory that came free may be behind those already that had asked for more.
        if self.exact and not any(request.wanted > request.tokens for request in self.requests):
            assert self.cache.pages_available() == available + pages

    def saved_bytes(self) -> int:
        """Bytes mapped behind active requests more than once, from the driver's own books."""
        ledger, layout = self.driver.inner._ledger, self.cache.layout
        active, seen, saved = {request.reqid for request in self.active}, set(), 0
        for plane in planes_of(self.cache):
            for address, handle in ledger._at.items():
                slot, _ = divmod(address - plane.address, layout.slot_stride_bytes)
                if plane.address <= address < plane.address + plane.num_bytes and slot in active:
                    saved += ledger._sizes[handle] * (handle in seen)
                    seen.add(handle)
        return saved
