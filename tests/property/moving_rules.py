"""Rules of the cache machine that move memory: swapping, pausing, and a second cache on the same pool.

Rows that come back are read again by the machine's own check after each rule; the second cache's are read here.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from inside import held_pages, promised_pages, shares_pages
from request_model import FULL_PAGES, SLOTS, Request, picks

from slicedkv import CapacityError, DriverError, OutOfPagesError, SlicedKVCache, StateError
from slicedkv.vmm.faulty import FaultyDriver

SWAP_LIMIT = 1 << 20
SECOND_SLOTS, SECOND_TOKENS = 2, 100
ENOUGH_PAGES = 2 * FULL_PAGES
"""Pages that hold whatever both caches may need."""

second_caches = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "layout": st.sampled_from(["sliced", "interleaved", "per_layer"]),
            "mapper": st.sampled_from(["sync", "background"]),
            "min_share": st.sampled_from([None, 0.1, 0.25]),
        }
    ),
)
"""Options of the second cache, or None."""


class MovingRules(RuleBasedStateMachine):
    """Part of `CacheMachine`, which has the cache, the model and what is used of both here."""

    cache: SlicedKVCache
    driver: FaultyDriver
    requests: list[Request]
    page_bytes: int
    limit_pages: int
    faulty: int
    exact: bool
    call: Callable[..., Any]
    pick: Callable[[int], Request]

    def __init__(self) -> None:
        super().__init__()
        self.second: SlicedKVCache | None = None
        self.second_lens: dict[int, int] = {}
        self.second_mapper = "sync"

    def open_second(self, options: dict[str, Any] | None, shape: dict[str, Any]) -> None:
        if options is not None:
            slots = {"max_batch_size": SECOND_SLOTS, "max_seq_len": SECOND_TOKENS}
            self.second_mapper = options["mapper"]
            self.second = SlicedKVCache(**shape, **slots, pool=self.cache.pool, **options)

    @property
    def second_bytes(self) -> int:
        """Memory that the second cache has mapped."""
        return self.second.stats().mapped_bytes if self.second else 0

    @property
    def second_share(self) -> int:
        """Pages it is promised."""
        return promised_pages(self.second) if self.second else 0

    @property
    def second_in_step(self) -> bool:
        """True when nothing happens behind our back in it."""
        return not self.second or self.second_mapper == "sync"

    # --- swapping ---------------------------------------------------------------------------------------------------

    @property
    def active(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for request in self.requests if request.handle is None]

    @precondition(lambda self: self.requests)
    @rule(index=picks)
    def swap_out(self, index: int) -> None:
        request = self.pick(index)
        if request.handle is not None:
            return
        before = self.cache.stats().swapped_bytes
        try:
            request.handle = self.call(self.cache.swap_out, request.reqid)
        except CapacityError:
            assert self.cache.stats().swapped_bytes == before
            needed = -(-request.tokens * self.cache.layout.token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            assert needed * SLOTS > SWAP_LIMIT - before, "what three others hold leaves four places at most"
            return
        assert request.handle.seq_len == request.tokens

    @precondition(lambda self: self.requests)
    @rule(index=picks)
    def swap_in(self, index: int) -> None:
        request = self.pick(index)
        handle = request.handle
        if handle is None:
            return
        layout = self.cache.layout
        fits = layout.pages_for(request.tokens) * layout.num_planes <= self.cache.pages_available()
        reqid = self.call(self.cache.swap_in, handle)
        if self.exact:
            assert (reqid is not None) == fits
        if reqid is None:
            return
        assert reqid not in {other.reqid for other in self.active}
        assert not shares_pages(self.cache, reqid)
        request.reqid, request.handle, request.wanted = reqid, None, 0
        with pytest.raises(StateError, match="swapped in or released"):
            self.call(self.cache.swap_in, handle)

    def end(self, request: Request) -> None:
        """Free a request, in its slot or in host memory; neither can be done twice."""
        again: tuple[Any, ...] = (self.cache.free_reqid, request.reqid)
        if request.handle is None:
            self.call(*again)
        else:
            request.handle.release()
            again = self.cache.swap_in, request.handle
        self.requests.remove(request)
        with pytest.raises(StateError, match=r"freed already|released already"):
            self.call(*again)

    @invariant()
    def host_memory_is_what_handles_hold(self) -> None:
        held = sum(request.handle.num_bytes for request in self.requests if request.handle is not None)
        assert self.cache.stats().swapped_bytes == held

    # --- pausing ----------------------------------------------------------------------------------------------------

    @rule(offload=st.booleans())
    def pause_and_resume(self, offload: bool) -> None:
        cache = self.cache
        try:
            self.call(cache.pause, offload=offload)
        except CapacityError:
            assert offload
            return
        except StateError as error:
            if not self.faulty or "the cache stays paused" not in str(error):
                raise
        stats = cache.stats()
        assert stats.idle_bytes == 0
        assert not (offload and stats.mapped_bytes)
        assert stats.active_slots == len(self.active)
        if self.exact and offload:
            assert stats.created_bytes == self.second_bytes
        cache.check_integrity()
        with pytest.raises((StateError, DriverError), match=r"paused; call resume\(\)|injected"):
            cache.trim()  # says what went wrong in the background first
        self.resume(offload)

    def resume(self, offload: bool) -> None:
        """Requests that shared pages may need more memory now: where it is short, they get it."""
        layout = self.cache.layout
        pages = sum(layout.pages_for(request.tokens) for request in self.active if offload)
        fits = pages * layout.num_planes <= self.cache.pages_available()
        try:
            self.call(self.cache.resume)
            assert fits or not self.exact
        except OutOfPagesError:
            assert not (fits and self.exact)
            assert self.faulty or self.limit_pages < ENOUGH_PAGES
            self.limit_pages = ENOUGH_PAGES
            self.call(self.cache.set_memory_limit, ENOUGH_PAGES * self.page_bytes)
            self.resume(offload)

    # --- the second cache -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.second)
    @rule(tokens=st.integers(0, SECOND_TOKENS))
    def second_grows(self, tokens: int) -> None:
        assert self.second
        if len(self.second_lens) < SECOND_SLOTS:
            self.second_lens[self.call(self.second.alloc_reqid)] = 0
        reqid = min(self.second_lens, key=self.second_lens.__getitem__)
        tokens = max(tokens, self.second_lens[reqid])
        fits = self.second.pages_needed({reqid: tokens}) <= self.second.pages_available()
        ok = self.call(self.second.step, {reqid: tokens})
        if self.exact:
            assert ok == fits
        if ok:
            self.second_lens[reqid] = tokens
            for layer in range(self.second.layout.num_layers):
                self.second.k(layer)[reqid, :tokens] = self.second.v(layer)[reqid, :tokens] = reqid + layer

    @precondition(lambda self: self.second_lens)
    @rule()
    def second_frees(self) -> None:
        assert self.second
        reqid = max(self.second_lens)
        self.call(self.second.free_reqid, reqid)
        del self.second_lens[reqid]

    @invariant()
    def second_rows_are_its_own(self) -> None:
        for reqid, tokens in self.second_lens.items():
            assert self.second
            for layer in range(self.second.layout.num_layers):
                for view in (self.second.k(layer), self.second.v(layer)):
                    found = view[reqid, :tokens]
                    assert torch.equal(found, torch.full_like(found, reqid + layer))

    @invariant()
    def shares_are_there(self) -> None:
        if self.second:
            with self.cache.pool.gate.work("test"):
                lacking = self.second_share - held_pages(self.second)
                assert self.cache.pool.available_pages >= lacking

    def close_second(self) -> None:
        if self.second:
            self.second.close()
