"""Faults that this cache once had, each as the smallest test that shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inside import background_failure
from rig import PAGE, TOKENS, Rig, mapped, settle, wait_until

from slicedkv import ConfigError, DriverError, SlicedKVCache, StateError
from slicedkv.paging.planner import Planner

MakeCache = Callable[..., SlicedKVCache]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def totals(cache: SlicedKVCache) -> tuple[int, ...]:
    stats = cache.stats()
    assert stats.created_bytes == stats.free_bytes + stats.mapped_bytes
    return stats.created_bytes, stats.free_bytes, stats.mapped_bytes, stats.active_slots


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_a_full_slot_refuses_a_length_above_max_seq_len(make_cache: MakeCache, mapper: str) -> None:
    cache = make_cache(mapper=mapper, max_seq_len=400)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 400})
    for length in (401, 10**6):
        with pytest.raises(ConfigError, match=rf"seq_lens\[{reqid}\] is {length}"):
            cache.step({reqid: length})
    assert cache.stats().used_bytes == 400 * cache.layout.token_bytes


def test_margin_taken_back_and_mapped_again_is_zeroed(make_cache: MakeCache) -> None:
    cache = make_cache(
        mapper="sync", lookahead_tokens=200, reclaim_watermark=0.0, max_seq_len=2000, zero_on_reuse=True, extent_pages=1
    )
    first, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 1, other: 700})
    for layer in range(cache.layout.num_layers):
        cache.k(layer)[other, :700] = cache.v(layer)[other, :700] = 7.0
    cache.free_reqid(other)
    planes, had = cache.layout.num_planes, mapped(cache, first)
    assert had > cache.layout.pages_for(1), "it has margin, zeroed already"
    # So low a limit that the margin and the other's pages are unmapped; some of those it wrote stay in the pool.
    cache.set_memory_limit(4 * planes * cache.layout.page_bytes)
    assert (mapped(cache, first), mapped(cache, other)) == (1, 0)
    cache.prefetch(first, cache.layout.tokens_backed(had))
    assert mapped(cache, first) == had
    assert cache.step({first: cache.layout.tokens_backed(had)})
    for layer in range(cache.layout.num_layers):
        rows = slice(1, cache.layout.tokens_backed(had))
        assert not cache.k(layer)[first, rows].any()
        assert not cache.v(layer)[first, rows].any()


def test_free_handles_survive_a_release_that_fails_beside_them() -> None:
    with Rig(limit_pages=6, extent_pages=4) as rig:
        pool = rig.pool
        handles = pool.take(pages=2, extents=1)
        with pool.gate.lock:
            pool.give_back(handles)
        rig.driver.fail("release")
        with pytest.raises(DriverError, match="release"):
            pool.take(pages=4)  # the two that are free, and two more in place of the extent
        assert (pool.created_pages, pool.free_pages) == (2, 2), "what the driver will not release is gone for us"
        pool.check_integrity()
        rig.fake.release(handles.extents[0])


def test_a_failed_map_leaves_free_extents_whole() -> None:
    with Rig(extent_pages=16) as rig:
        cache = rig.open(mapper="sync")
        extent = rig.pool.take(pages=0, extents=1)
        with rig.pool.gate.lock:
            rig.pool.give_back(extent)
        before = totals(cache)
        reqid = cache.alloc_reqid()
        rig.driver.fail("map")
        with pytest.raises(DriverError):
            cache.step({reqid: 1})
        cache.free_reqid(reqid)
        assert totals(cache) == before, "what was created for the step is released, and no extent in its place"
        cache.close()


def test_no_polling_when_memory_is_low_and_only_the_next_slot_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(limit_pages=10) as rig:
        cache = rig.open(lookahead_tokens=0, reclaim_watermark=0.9)
        busy, done = cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step({busy: 2 * TOKENS, done: TOKENS})
        cache.free_reqid(done)
        planned: list[float] = []
        plan = Planner.next
        monkeypatch.setattr(Planner, "next", lambda planner: planned.append(time.monotonic()) or plan(planner))
        cache.prefetch(busy, 0)
        wait_until(lambda: planned)
        settle(cache)
        assert cache.pool.available_pages < 9
        planned.clear()
        time.sleep(0.3)
        assert not planned
        cache.close()


def test_background_work_that_keeps_failing_is_not_tried_again_without_news() -> None:
    with Rig(limit_pages=40) as rig:
        cache = rig.open(lookahead_tokens=0, reclaim_watermark=0.9)
        busy, first, second = (cache.alloc_reqid() for _ in range(3))
        assert cache.step({busy: 32, first: 128, second: 64})
        rig.driver.fail("unmap", times=10**6)
        cache.free_reqid(second)
        cache.free_reqid(first)
        wait_until(lambda: background_failure(cache) is not None)
        tried = rig.driver.counts["unmap"]
        with pytest.raises(DriverError):
            cache.step({busy: 2})
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            assert cache.step({busy: 2}), "quiet steps are no news"
        assert rig.driver.counts["unmap"] == tried
        rig.driver.heal()
        cache.close()


def test_a_request_whose_slot_is_lost_is_told_so_and_hurts_no_other() -> None:
    with Rig() as rig:
        cache = rig.open(mapper="sync", lookahead_tokens=TOKENS)
        lost, other = cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step({lost: 1})
        assert cache.stats().lookahead_bytes == 2 * PAGE
        rig.driver.fail("unmap", at=2)
        rig.driver.fail("map")
        with pytest.raises(StateError, match=f"reqid {lost}: pages .* out of use"):
            cache.trim()
        for call in (
            lambda: cache.step({lost: 1}),
            lambda: cache.step({lost: TOKENS, other: 1}),
            lambda: cache.prefetch(lost, 5),
            lambda: cache.free_reqid(lost),
        ):
            with pytest.raises(StateError, match=f"reqid {lost} is not active"):
                call()
        cache.check_integrity()
        assert cache.step({other: 3 * TOKENS})
        assert lost not in {cache.alloc_reqid(), cache.alloc_reqid()}
        cache.check_integrity()
        cache.close()
        assert rig.fake.mapped == 0


def test_an_allocation_is_not_lost_when_another_thread_is_long_at_work(rig: Rig) -> None:
    cache = rig.open(mapper="sync", max_batch_size=2)
    rig.pool.gate.timeout_s = 0.05
    first = cache.alloc_reqid()
    arrived, go_on = threading.Event(), threading.Event()

    def wait(op: str, args: tuple[Any, ...]) -> None:
        if op == "map" and not arrived.is_set():
            arrived.set()
            go_on.wait(5)

    rig.driver.on_call = wait
    thread = threading.Thread(target=cache.step, args=({first: 1},))
    thread.start()
    arrived.wait(5)
    second = cache.alloc_reqid(100)
    assert second != first
    assert cache.stats().active_slots == 2
    cache.prefetch(second, 200)
    cache.free_reqid(second)
    assert cache.alloc_reqid(100) == second
    go_on.set()
    thread.join()
    assert cache.step({first: 1, second: 100})
    cache.close()
