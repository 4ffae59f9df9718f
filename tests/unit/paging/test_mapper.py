"""Work off the critical path: order, lookahead, eager pages, prefetch, extents, one worker, both mappers.

Cases A11 and E6; over the fake driver. What is taken back, and when, is in test_reclaim.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from rig import PAGE, TOKENS, mapped, settle, wait_until

from slicedkv import SlicedKVCache
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("distance", [1, 2, 40])
def test_lookahead_maps_the_next_page_in_time_and_not_before(open_cache: Open, mapper: str, distance: int) -> None:
    cache, _, _ = open_cache(mapper=mapper, lookahead_tokens=distance)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 1})
    for length in range(2, 5 * TOKENS):
        settle(cache)
        assert mapped(cache, reqid) == -(-(length - 1 + distance) // TOKENS), f"at length {length - 1}"
        assert cache.step({reqid: length})
        assert cache.stats().last_step.stall_us == 0
    assert cache.stats().stalls == 1, "only the first step waited"
    assert cache.stats().pages_growth == 2


def test_no_lookahead_when_it_is_off(open_cache: Open) -> None:
    cache, _, _ = open_cache(lookahead_tokens=0)
    reqid = cache.alloc_reqid()
    for length in range(1, 3 * TOKENS + 1):
        assert cache.step({reqid: length})
        settle(cache)
        assert mapped(cache, reqid) == cache.layout.pages_for(length)
    assert cache.stats().stalls == 3


def test_pages_mapped_ahead_are_no_tokens(open_cache: Open) -> None:
    cache, _, _ = open_cache(lookahead_tokens=TOKENS)
    reqid = cache.alloc_reqid()
    for length in (TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS):
        assert cache.step({reqid: length})
        settle(cache)
        stats = cache.stats()
        assert stats.used_bytes == length * cache.layout.token_bytes
        assert stats.lookahead_bytes == 2 * PAGE
        assert stats.waste_bytes == stats.mapped_bytes - stats.used_bytes


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_prefetch_and_alloc_map_before_the_step(open_cache: Open, mapper: str) -> None:
    cache, _, _ = open_cache(mapper=mapper)
    first, second = cache.alloc_reqid(1000), cache.alloc_reqid()
    cache.prefetch(second, 2000)
    settle(cache)
    assert (mapped(cache, first), mapped(cache, second)) == (cache.layout.pages_for(1000), cache.layout.pages_for(2000))
    assert cache.step({first: 1000, second: 2000})
    stats = cache.stats()
    assert (stats.stalls, stats.pages_growth, stats.lookahead_bytes) == (0, 0, 0)
    assert stats.pages_prefetch == 2 * (cache.layout.pages_for(1000) + cache.layout.pages_for(2000))


def test_a_step_waits_for_what_is_being_mapped_and_maps_nothing_twice(open_cache: Open) -> None:
    cache, driver, _ = open_cache()
    driver.delay("map", 0.001)
    reqid = cache.alloc_reqid(2000)
    wait_until(lambda: driver.counts["map"] > 0)
    assert cache.step({reqid: 2000})
    assert driver.counts["map"] == 2 * cache.layout.pages_for(2000) + 0
    stats = cache.stats()
    assert stats.pages_growth + stats.pages_prefetch == 2 * cache.layout.pages_for(2000)
    assert stats.pages_prefetch > 0
    assert stats.stalls == 1


def test_extents_serve_long_growth_and_no_page_more_is_mapped(open_cache: Open) -> None:
    cache, driver, _ = open_cache(mapper="sync", extent_pages=16)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 37 * TOKENS})
    assert mapped(cache, reqid) == 37
    assert cache.stats().extents_mapped == 2 * 2
    assert driver.counts["map"] == 2 * (2 + 5)
    assert cache.stats().created_bytes == 74 * PAGE


def test_eager_pages_wait_in_the_slot_that_comes_next(open_cache: Open) -> None:
    cache, _, _ = open_cache(eager_tokens=100)
    reqid = cache.alloc_reqid()
    settle(cache)
    stats = cache.stats()
    assert stats.eager_bytes == stats.idle_bytes == cache.layout.bytes_for(100)
    assert cache.pages_available() == 1000, "eager pages are an unpaid margin"
    coming = cache.alloc_reqid(90)
    assert mapped(cache, coming) >= cache.layout.pages_for(90)
    assert cache.step({reqid: 1, coming: 90})
    assert cache.stats().pages_reused == 2 * cache.layout.pages_for(100)


def test_eager_auto_follows_recent_prompts(open_cache: Open) -> None:
    cache, _, _ = open_cache(eager_tokens="auto", mapper="sync", max_batch_size=40)
    for length in (300, 310, 320, 5000, 10):
        cache.step({cache.alloc_reqid(length): length})
    assert cache.stats().eager_bytes == cache.layout.bytes_for(310)


def test_handles_are_created_ahead(open_cache: Open) -> None:
    cache, driver, _ = open_cache(lookahead_tokens=0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 1})
    settle(cache)
    created = driver.counts["create"]
    threads: set[str] = set()
    driver.on_call = lambda op, args: threads.add(threading.current_thread().name) if op == "create" else None
    assert cache.step({reqid: TOKENS + 1})
    settle(cache)
    assert created > 2
    assert "MainThread" not in threads


def test_one_worker_at_a_time(open_cache: Open) -> None:
    cache, driver, _ = open_cache(lookahead_tokens=4)
    inside, most = [0], [0]

    def enter(op: str, args: tuple[Any, ...]) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0002)
        inside[0] -= 1

    driver.on_call = enter
    reqids = [cache.alloc_reqid() for _ in range(4)]
    for length in range(1, 300, 3):
        assert cache.step(dict.fromkeys(reqids, length))
        assert cache.step(dict.fromkeys(reqids, length + 1))
    assert most == [1]


def test_both_mappers_map_the_same(open_cache: Open) -> None:
    found = []
    for mapper in ("sync", "background"):
        cache, _, _ = open_cache(mapper=mapper, lookahead_tokens=8, eager_tokens=64, extent_pages=16)
        lens = {cache.alloc_reqid(500): 500, cache.alloc_reqid(): 3}
        for grow in (0, 25, 60, 700):
            lens = {reqid: length + grow for reqid, length in lens.items()}
            assert cache.step(lens)
            settle(cache)
        cache.free_reqid(0)
        settle(cache)
        found.append([mapped(cache, reqid) for reqid in range(4)])
    assert found[0] == found[1]


def test_fences_of_the_mapper_thread_are_bound(open_cache: Open) -> None:
    cache, _, fake = open_cache()
    cache.step({cache.alloc_reqid(100): 100})
    settle(cache)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    assert {names[ident] for ident in fake.bound_threads} == {"slicedkv-mapper"}


def test_requests_that_start_on_mapped_pages_are_looked_ahead_for_too(open_cache: Open) -> None:
    cache, _, _ = open_cache()
    for _ in range(2):
        reqid = cache.alloc_reqid(TOKENS - 5)
        settle(cache)
        for length in range(TOKENS - 5, 3 * TOKENS):
            assert cache.step({reqid: length})
            settle(cache)
        cache.free_reqid(reqid)
    assert cache.stats().stalls == 0
