"""Work off the critical path: order, lookahead, eager pages, prefetch, extents, reclaim behind fences, both mappers.

Cases A11, B1, B2's order, D1, E6; over the fake driver, whose fences end when a test says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slicedkv import PagePool, SlicedKVCache, StateError
from slicedkv.vmm.fake import FakeDriver, FaultyDriver

PAGE = 2 << 20
TOKENS = 32  # of Llama-3-8B in one page
Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]


@pytest.fixture
def open_cache() -> Iterator[Open]:
    """Open caches of Llama-3-8B's shape over a fake driver."""
    opened: list[SlicedKVCache] = []

    def make(
        *, limit_pages: int = 1000, extent_pages: int = 1, **options: Any
    ) -> tuple[SlicedKVCache, FaultyDriver, FakeDriver]:
        fake = FakeDriver(PAGE, total_bytes=1 << 40)
        driver = FaultyDriver(fake)
        pool = PagePool(driver, page_bytes=PAGE, memory_limit=limit_pages * PAGE, extent_pages=extent_pages)
        shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.float16}
        shape |= {"max_batch_size": 4, "max_seq_len": 8192} | options
        opened.append(SlicedKVCache(**shape, pool=pool))
        return opened[-1], driver, fake

    yield make
    for cache in opened:
        cache.pool.driver.inner.finish_fences()  # type: ignore[attr-defined]
        cache.check_integrity()
        cache.close()


def mapped(cache: SlicedKVCache, reqid: int) -> int:
    return cache._state.backing.mapped(reqid)


def settle(cache: SlicedKVCache) -> None:
    """Wait until the mapper has nothing more to do."""
    wait_until(lambda: not cache._mapper._news and cache.pool.gate._holder is None)


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


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


def test_reclaim_below_the_watermark_takes_the_largest_and_spares_the_next(open_cache: Open) -> None:
    cache, _, fake = open_cache(limit_pages=100, reclaim_watermark=0.3, lookahead_tokens=0)
    lens = {cache.alloc_reqid(): pages * TOKENS for pages in (5, 20, 12)}
    assert cache.step(lens)
    small, large, middle = lens
    fake.hold_fences = True
    for reqid in (small, large, middle):
        cache.free_reqid(reqid)
    time.sleep(0.05)
    assert [mapped(cache, reqid) for reqid in lens] == [5, 20, 12], "the GPU may still be reading them"
    fake.finish_fences()
    wait_until(lambda: mapped(cache, large) == 0)
    settle(cache)
    assert [mapped(cache, reqid) for reqid in lens] == [5, 0, 12]
    assert cache.stats().pages_reclaimed == 40


def test_nothing_is_unmapped_under_running_work(open_cache: Open) -> None:
    cache, driver, fake = open_cache(limit_pages=40, mapper="sync", lookahead_tokens=0)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 15 * TOKENS})
    fake.hold_fences = True
    cache.free_reqid(first)
    finished: list[float] = []

    def finish() -> None:
        finished.append(time.monotonic())
        fake.finish_fences()

    timer = threading.Timer(0.1, finish)
    timer.start()
    unmapped_at: list[float] = []
    driver.on_call = lambda op, args: unmapped_at.append(time.monotonic()) if op == "unmap" else None
    assert cache.step({second: 15 * TOKENS}), "the step waits for the GPU, as it says"
    timer.join()
    assert unmapped_at
    assert min(unmapped_at) >= finished[0]


def test_a_fence_that_never_ends_is_a_bounded_error(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, fake = open_cache(limit_pages=40, mapper="sync", lookahead_tokens=0)
    monkeypatch.setattr("slicedkv.reclaim._FENCE_TIMEOUT_S", 0.05)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 15 * TOKENS})
    fake.hold_fences = True
    cache.free_reqid(first)
    with pytest.raises(StateError, match=f"device work on freed reqid {first}"):
        cache.step({second: 15 * TOKENS})
    assert mapped(cache, first) == 15
    fake.finish_fences()
    assert cache.step({second: 15 * TOKENS})


def test_a_slot_given_away_at_once_is_ordered_after_its_last_request(open_cache: Open) -> None:
    cache, _, fake = open_cache(max_batch_size=1)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    fake.hold_fences = True
    fake.current_stream, fake.current_device = "stream A", 1
    cache.free_reqid(reqid)
    with pytest.raises(StateError, match="freed already"):
        cache.free_reqid(reqid)
    fake.current_stream = "stream B"
    assert cache.alloc_reqid() == reqid
    (fence,) = fake.fences
    assert fence.stream == "stream A"
    assert fake.ordered == [("stream B", fence)]


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


def test_a_request_that_grows_into_its_margin_keeps_it(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=8, mapper="sync", lookahead_tokens=TOKENS, reclaim_watermark=0.0)
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({one: TOKENS, two: 1})
    assert (mapped(cache, one), mapped(cache, two)) == (2, 2)
    lens = {one: TOKENS + 1, two: 3 * TOKENS}
    assert cache.pages_needed(lens) > cache.pages_available()
    assert cache.step(lens) is False, "8 pages are mapped; one's margin is no longer to be had"
    lens = {one: TOKENS, two: 3 * TOKENS}
    assert cache.pages_needed(lens) <= cache.pages_available()
    assert cache.step(lens)
    cache.check_integrity()


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


def test_pages_asked_for_are_not_promised_twice(open_cache: Open) -> None:
    cache, driver, _ = open_cache(limit_pages=20)
    driver.delay("map", 0.01)
    admitted = []
    while cache.can_admit(8 * TOKENS):
        admitted.append(cache.alloc_reqid(8 * TOKENS))
    assert len(admitted) == 1, "16 of 20 pages are asked for"
    assert cache.step({admitted[0]: 8 * TOKENS})


def test_what_a_growing_request_does_not_need_of_its_slot_may_go(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=40, mapper="sync", reclaim_watermark=0.0)
    big, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({big: 18 * TOKENS, other: TOKENS})
    cache.free_reqid(big)
    small = cache.alloc_reqid()
    assert mapped(cache, small) == 18
    assert cache.step({small: 2 * TOKENS, other: 15 * TOKENS})
    assert mapped(cache, small) >= 2


def test_a_device_that_fails_to_answer_does_not_end_the_thread(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, driver, fake = open_cache(limit_pages=60, reclaim_watermark=1.0, lookahead_tokens=0)
    reqids = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step(dict.fromkeys(reqids, 8 * TOKENS))
    settle(cache)
    fake.hold_fences = True
    with monkeypatch.context() as patched:
        asked: list[object] = []
        # No at first, when work is planned; then it fails, when the mapper wants to know how long to sleep.
        patched.setattr(driver, "fence_done", lambda fence: asked.append(fence) or (len(asked) > 1 and 1 // 0))
        for reqid in reqids[:2]:
            cache.free_reqid(reqid)  # one of them is handed out next and spared, the other is asked about
            cache._mapper.failure = None
        wait_until(lambda: cache._mapper._failed)
    cache._mapper.failure = None
    cache.prefetch(reqids[2], 10 * TOKENS)
    wait_until(lambda: mapped(cache, reqids[2]) == 10)
