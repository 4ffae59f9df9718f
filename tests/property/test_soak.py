"""Hundreds of thousands of steps with random arrivals and lengths: memory and threads stay flat, nothing is left over.

Run with ``-m slow``. Prints how many steps waited for the driver and for how long.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from pathlib import Path

import pytest
import torch

from slicedkv import PagePool, SlicedKVCache
from slicedkv.vmm import Driver
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.host import HostDriver

pytestmark = pytest.mark.slow

PAGE_BYTES = 64 << 10
SLOTS = 32
MAX_TOKENS = 4000
GROWTH_BYTES = 3 << 20
"""What the process may grow by after its first steps: less than 20 bytes a step over 160,000 steps."""


class Load:
    """Requests that come at random, decode one token a step, and leave; the youngest goes when memory is short."""

    def __init__(self, cache: SlicedKVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.lens = torch.zeros(SLOTS, dtype=torch.int64)
        self.ends: dict[int, int] = {}
        self.order: deque[int] = deque(maxlen=SLOTS)
        self.finished = self.preempted = 0

    def step(self) -> None:
        """Let a request in now and then, make one step, and let those go that are done."""
        if len(self.ends) < SLOTS and self.random.random() < 0.05:
            self._arrive()
        grown = self.lens + (self.lens > 0)
        while not self.cache.step(grown):
            youngest = self.order[-1]
            self._leave(youngest)
            grown[youngest] = 0
            self.preempted += 1
        self.lens = grown
        for reqid in [reqid for reqid, end in self.ends.items() if grown[reqid] >= end]:
            self._leave(reqid)
            self.finished += 1

    def _arrive(self) -> None:
        prompt = self.random.choice((1, 20, 300, 2000))
        if not self.cache.can_admit(prompt):
            return
        reqid = self.cache.alloc_reqid(prompt)
        self.lens[reqid] = prompt
        self.ends[reqid] = min(prompt + self.random.randint(1, 1000), MAX_TOKENS)
        self.order.append(reqid)

    def _leave(self, reqid: int) -> None:
        self.cache.free_reqid(reqid)
        self.lens[reqid] = 0
        del self.ends[reqid]
        self.order.remove(reqid)

    def end(self) -> None:
        for reqid in list(self.ends):
            self._leave(reqid)


def open_cache(driver: Driver, limit_pages: int) -> SlicedKVCache:
    """A cache whose limit lets about half of the slots be busy: rows of 1 KiB, 64 in a page."""
    pool = PagePool(driver, page_bytes=PAGE_BYTES, memory_limit=limit_pages * PAGE_BYTES)
    return SlicedKVCache(
        num_layers=2,
        num_kv_heads=2,
        head_dim=128,
        dtype=torch.float16,
        max_batch_size=SLOTS,
        max_seq_len=MAX_TOKENS,
        eager_tokens="auto",
        pool=pool,
    )


def resident_bytes() -> int:
    """Memory of this process that no file lies behind."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096


def mapper_threads() -> int:
    return sum(thread.name == "slicedkv-mapper" for thread in threading.enumerate())


def report(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    stats, name = load.cache.stats(), load.cache.pool.driver.name
    with capsys.disabled():
        print(
            f"\n{name}: {stats.steps} steps, {load.finished} requests, {load.preempted} preempted; "
            f"{stats.stalls} stalls, {stats.stall_us / 1e6:.2f} s; pages: {stats.pages_growth} growth, "
            f"{stats.pages_lookahead} lookahead, {stats.pages_prefetch} prefetch, {stats.pages_eager} eager, "
            f"{stats.pages_reused} reused, {stats.pages_reclaimed} reclaimed"
        )


def test_200_000_steps_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    driver = FakeDriver(PAGE_BYTES)
    threads = threading.active_count()
    cache = open_cache(driver, limit_pages=1000)
    load = Load(cache, seed=1)
    warm = 0
    for count in range(200_000):
        load.step()
        if count % 1000 == 999:
            driver.fences.clear()  # it keeps them for tests to look at
            cache.check_integrity()
            assert (threading.active_count(), mapper_threads()) == (threads + 1, 1)
        if count == 40_000:
            warm = resident_bytes()
    assert resident_bytes() - warm < GROWTH_BYTES
    stats = cache.stats()
    report(load, capsys)
    assert load.finished > 2000
    assert load.preempted > 0
    assert stats.pages_reclaimed > 0
    load.end()
    cache.close()
    cache.pool.trim()
    assert (driver.created_bytes, driver.mapped, threading.active_count()) == (0, 0, threads)


def test_20_000_steps_on_real_memory_lose_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    driver = HostDriver()
    cache = open_cache(driver, limit_pages=600)
    load = Load(cache, seed=2)
    keys, values = cache.k(1)[:, :, 1, 5], cache.v(0)[:, :, 0, 3]
    warm = 0
    for count in range(20_000):
        before = load.lens.clone()
        load.step()
        active = torch.tensor(sorted(load.ends), dtype=torch.int64)
        last = load.lens[active] - 1
        keys[active, last], values[active, last] = (last % 2000).half(), -(active + 1).half()
        for reqid in active[before[active] == 0].tolist():  # a prompt: all its rows are new
            rows = int(load.lens[reqid])
            keys[reqid, :rows], values[reqid, :rows] = (torch.arange(rows) % 2000).half(), -float(reqid + 1)
        if count % 100 == 0:
            for reqid in load.ends:
                rows = int(load.lens[reqid])
                assert torch.equal(keys[reqid, :rows], (torch.arange(rows) % 2000).half())
                assert bool((values[reqid, :rows] == -(reqid + 1)).all())
        if count == 5000:
            warm = resident_bytes()
    assert resident_bytes() - warm < GROWTH_BYTES
    report(load, capsys)
    load.end()
    cache.close()
    cache.pool.trim()
    assert driver.used_bytes() == 0
    driver.close()
