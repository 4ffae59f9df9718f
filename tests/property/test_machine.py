"""A cache on real host memory, driven at random, against a plain dictionary: no token of any request is ever lost.

Every row of every layer of K and V is stamped when `step` makes it available, and all stamps of all active requests
are read again after each rule, with failures injected into the driver, limits moved and memory taken back in between.
What is drawn never depends on what the cache did, so that the timing of the mapper's thread changes no example.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from inside import is_offloaded
from moving_rules import SWAP_LIMIT, MovingRules, second_caches
from request_model import FULL_PAGES, HEAD_DIM, LAYERS, SLOTS, TOKENS, Request, deltas, lengths, mark, picks
from sharing_rules import SharingRules

from slicedkv import ConfigError, DriverError, OutOfPagesError, OutOfSlotsError, PagePool, SlicedKVCache, StateError
from slicedkv.vmm import MemoryInfo
from slicedkv.vmm.faulty import FaultyDriver
from slicedkv.vmm.host import HostDriver


class AmpleHost(HostDriver):
    """The host with memory to spare. What there is takes longer to read than most rules."""

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 34, 1 << 34)


class CacheMachine(SharingRules, MovingRules):
    """Rules are the public calls; the model is the list of requests, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.writes = 0
        self.faulty = 0

    @initialize(
        page_bytes=st.sampled_from(sorted(HEAD_DIM)),
        extent_pages=st.sampled_from([1, 4]),
        limit_pages=st.integers(FULL_PAGES // 8, FULL_PAGES // 2),
        layout=st.sampled_from(["sliced", "interleaved", "per_layer"]),
        mapper=st.sampled_from(["sync", "background"]),
        guard_tokens=st.sampled_from([0, 3]),
        lookahead_tokens=st.sampled_from([None, 0, 5, 40]),
        eager_tokens=st.sampled_from([0, 50, "auto"]),
        reclaim_watermark=st.sampled_from([0.0, 0.1, 0.5]),
        swap_limit=st.sampled_from([None, SWAP_LIMIT]),
        debug=st.booleans(),
        second=second_caches,
    )
    def open(
        self, page_bytes: int, extent_pages: int, limit_pages: int, mapper: str, second: Any, **options: Any
    ) -> None:
        self.driver = FaultyDriver(AmpleHost(), record=False)
        self.page_bytes, self.limit_pages, self.in_step = page_bytes, limit_pages, mapper == "sync"
        pool = PagePool(
            self.driver, page_bytes=page_bytes, memory_limit=limit_pages * page_bytes, extent_pages=extent_pages
        )
        shape = {"num_layers": LAYERS, "num_kv_heads": 1, "head_dim": HEAD_DIM[page_bytes], "dtype": torch.float32}
        self.cache = SlicedKVCache(
            **shape, max_batch_size=SLOTS, max_seq_len=TOKENS, mapper=mapper, pool=pool, **options
        )
        self.open_second(second, shape)

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """True when nothing happens behind our back, so that what the cache says now holds until the next call."""
        return self.in_step and self.second_in_step and not self.faulty

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call, and call again while an injected failure shows up, here or in the background before."""
        for _ in range(4):
            try:
                return method(*arguments, **options)
            except DriverError as error:
                if not self.faulty or "injected" not in str(error):
                    raise
                if not is_offloaded(self.cache):
                    self.check()
        raise AssertionError("one injected failure was raised four times")

    def pick(self, index: int) -> Request:
        return self.requests[index % len(self.requests)]

    def grown(self, request: Request, length: int) -> None:
        """A step was True: write all rows that it may write now, the guard rows too, which must be mapped as well."""
        if not length:
            return
        self.writes += 1
        request.fill(self.cache, request.write(length, self.cache.layout.guard_tokens, self.writes))

    # --- requests ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < SLOTS)
    @rule(seq_len=st.one_of(st.just(0), lengths), step=st.booleans())
    def alloc(self, seq_len: int, step: bool) -> None:
        admitted = self.cache.can_admit(seq_len)
        request = self.begin(seq_len)
        if step and seq_len:
            ok = self.call(self.cache.step, {request.reqid: seq_len})
            assert ok or not (self.exact and admitted), "it was said to fit"
            if ok:
                self.grown(request, seq_len)

    def begin(self, seq_len: int = 0) -> Request:
        self.add(self.call(self.cache.alloc_reqid, seq_len))
        self.requests[-1].wanted = seq_len
        return self.requests[-1]

    def add(self, reqid: int) -> Request:
        assert reqid not in {other.reqid for other in self.active}
        self.requests.append(Request(reqid))
        return self.requests[-1]

    @precondition(lambda self: len(self.requests) == SLOTS)
    @rule()
    def alloc_too_many(self) -> None:
        if len(self.active) < SLOTS:
            return
        with pytest.raises(OutOfSlotsError):
            self.call(self.cache.alloc_reqid)
        assert not self.cache.can_admit(0)

    @precondition(lambda self: self.requests)
    @rule(changes=st.lists(deltas, min_size=SLOTS, max_size=SLOTS), form=st.sampled_from([dict, list, torch, np]))
    def step(self, changes: list[int | None], form: Any) -> None:
        self.step_to(
            {
                request.reqid: min(max(request.tokens + change, 0), TOKENS)
                for request, change in zip(self.active, changes, strict=False)
                if change is not None
            },
            form,
        )

    @precondition(lambda self: self.requests)
    @rule(index=picks, slack=st.integers(-1, 1), changes=st.lists(deltas, min_size=SLOTS, max_size=SLOTS))
    def step_to_the_brink(self, index: int, slack: int, changes: list[int | None]) -> None:
        """One request takes all there is, about, while others grow a little."""
        layout, request = self.cache.layout, self.pick(index)
        if request.handle is not None:
            return
        pairs = zip(self.active, changes, strict=False)
        lens = {other.reqid: min(other.tokens + change % 4, TOKENS) for other, change in pairs if change is not None}
        pages = layout.pages_for(request.tokens) + self.cache.pages_available() // layout.num_planes + slack
        lens[request.reqid] = min(max(layout.tokens_backed(max(pages, 0)), request.tokens), TOKENS)
        self.step_to(lens)

    def step_to(self, lens: dict[int, int], form: Any = dict) -> None:
        vector = [lens.get(reqid, 0) for reqid in range(SLOTS)]
        given = {dict: lens, list: vector, torch: torch.tensor(vector), np: np.array(vector, dtype=np.int32)}[form]
        fits = self.cache.pages_needed(given) <= self.cache.pages_available()
        ok = self.call(self.cache.step, given)
        if self.exact:
            assert ok == fits
        if ok:
            for request in self.active:
                self.grown(request, lens.get(request.reqid, 0))

    @precondition(lambda self: self.requests)
    @rule(index=picks, seq_len=lengths)
    def prefetch(self, index: int, seq_len: int) -> None:
        request = self.pick(index)
        if request.handle is not None:
            return
        self.call(self.cache.prefetch, request.reqid, seq_len)
        request.wanted = max(request.wanted, seq_len)

    @precondition(lambda self: self.requests)
    @rule(index=picks)
    def free(self, index: int) -> None:
        self.end(self.pick(index))

    # --- memory -----------------------------------------------------------------------------------------------------

    @rule()
    def trim(self) -> None:
        assert self.call(self.cache.trim) >= 0
        if self.exact:
            stats = self.cache.stats()
            assert (stats.free_bytes, stats.idle_bytes) == (0, 0)
            assert stats.created_bytes == stats.active_bytes + self.second_bytes

    @rule(pages=st.integers(1, FULL_PAGES * 3 // 4))
    def set_memory_limit(self, pages: int) -> None:
        try:
            self.call(self.cache.set_memory_limit, pages * self.page_bytes)
        except ConfigError:
            assert self.second_share > pages
        except OutOfPagesError:
            others = max(self.second_bytes, self.second_share * self.page_bytes)
            assert self.cache.stats().active_bytes + others > pages * self.page_bytes
        else:
            self.limit_pages = pages

    # --- what must not work -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.requests)
    @rule(index=picks)
    def refused(self, index: int) -> None:
        request = self.pick(index)
        reqid = request.reqid
        if request.handle is not None:
            return
        for method, arguments in (
            ("step", ({reqid: TOKENS + 1},)),
            ("step", ([-1] * SLOTS,)),
            ("prefetch", (reqid, TOKENS + 1)),
            ("alloc_reqid", (TOKENS + 1,)),
            ("free_reqid", (SLOTS,)),
            ("share_prefix", (reqid, reqid, 1)),
            ("fork", (reqid, 0)),
            ("set_memory_limit", (0,)),
        ):
            with pytest.raises(ConfigError):
                self.call(getattr(self.cache, method), *arguments)
        for idle in set(range(SLOTS)) - {request.reqid for request in self.active}:
            with pytest.raises(StateError, match=f"reqid {idle} is not active"):
                self.call(self.cache.step, {reqid: TOKENS, idle: 1})

    @precondition(lambda self: not self.faulty)
    @rule(
        rules=st.integers(1, 4),
        op=st.sampled_from(["create", "map", "set_access", "unmap", "protect", "copy"]),
        at=st.integers(1, 4),
        name=st.sampled_from(["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"]),
    )
    def inject(self, rules: int, op: str, at: int, name: str) -> None:
        """Make one call of the driver fail, should it come within some rules from now."""
        self.driver.fail(op, at, name)
        self.faulty = rules + 1

    @invariant()
    def recover(self) -> None:
        if self.faulty == 1:
            self.heal()
        self.faulty = max(0, self.faulty - 1)

    def heal(self) -> None:
        """Forget what was injected, and let the mapper's last failure be raised if there is one."""
        self.driver.heal()
        self.cache.check_integrity()  # waits for driver work under way, which may have met the failure
        for cache in filter(None, (self.cache, self.second)):
            self.call(cache.set_memory_limit, self.limit_pages * self.page_bytes)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        cache = self.cache
        cache.check_integrity()
        with cache.pool.gate.work("test"):
            stats, used_bytes = cache.stats(), self.driver.inner.used_bytes()
            on_device = Counter(self.driver.inner._ledger._at.values())
            holdings = [member.backing for member in cache.pool.shares.members]
            assert on_device == Counter(handle for holding in holdings for handle in holding.mapped_handles())
            second_bytes, saved_bytes = self.second_bytes, self.saved_bytes()
        assert used_bytes == stats.created_bytes == stats.free_bytes + stats.mapped_bytes + second_bytes
        assert stats.created_bytes <= stats.memory_limit_bytes == self.limit_pages * self.page_bytes
        assert stats.active_slots == len(self.active)
        assert stats.saved_bytes == saved_bytes <= stats.mapped_bytes * (SLOTS - 1)
        tokens = [request.tokens for request in self.active]
        assert stats.used_bytes + saved_bytes == sum(tokens) * cache.layout.token_bytes
        assert stats.active_bytes + saved_bytes >= sum(map(cache.layout.bytes_for, tokens))
        for request in self.active:
            span = slice(0, request.tokens)
            rows = request.rows(span)
            for layer in range(LAYERS):
                for kv, view in enumerate((cache.k(layer), cache.v(layer))):
                    found = view[request.reqid, span]
                    assert torch.equal(found, (rows + mark(layer, kv)).expand_as(found))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        try:
            self.heal()
            self.faulty = 0
            self.check()
            while self.requests:
                self.free(0)
            self.close_second()
            end = time.monotonic() + 5
            while self.cache.trim() or self.cache.stats().created_bytes:
                assert not self.in_step or self.cache.stats().created_bytes == 0
                assert time.monotonic() < end, "the mapper must come to rest"
        finally:
            self.driver.heal()
            self.close_second()
            self.cache.close()
        self.cache.pool.trim()
        assert self.driver.inner.used_bytes() == 0
        self.driver.close()


class LongCacheMachine(CacheMachine):
    """The same, with a search of its own."""


def examples(machine: type[CacheMachine], count: int) -> type[TestCase]:
    machine.TestCase.settings = settings(
        max_examples=count,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


TestCache = examples(CacheMachine, 80)
TestCacheThoroughly = pytest.mark.thorough(examples(LongCacheMachine, 400))
