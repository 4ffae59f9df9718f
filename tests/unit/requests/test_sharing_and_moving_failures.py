"""Requests that share pages and leave the device: failures at every call, the order of work, memory that is short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from inside import fence_of, shares_pages
from rig import QUIET, TOKENS, Rig, mapped

from slicedkv import OutOfPagesError, SlicedKVCache, StateError

SHARED = 4 * TOKENS + 5


def begin_sharers(cache: SlicedKVCache, count: int = 2, seq_len: int = SHARED) -> list[int]:
    source = cache.alloc_reqid()
    assert cache.step({source: seq_len})
    return [source, *cache.fork(source, count - 1)]


def books(cache: SlicedKVCache) -> tuple[Any, ...]:
    """What no failure may change."""
    stats = cache.stats()
    cache.check_integrity()
    reqids = filter(cache.is_active, range(cache.layout.max_batch_size))
    lengths = {reqid: cache.seq_len(reqid) for reqid in reqids}
    return stats.active_slots, stats.swapped_bytes, stats.swaps_out, stats.swaps_in, lengths


def totals(cache: SlicedKVCache) -> tuple[Any, ...]:
    """What a failure may change only where sharing is lost in undoing it."""
    stats = cache.stats()
    names = ("mapped_bytes", "created_bytes", "used_bytes", "saved_bytes", "shared_bytes")
    mappings = [mapped(cache, reqid) for reqid in range(cache.layout.max_batch_size)]
    return (*books(cache), *(getattr(stats, name) for name in names), mappings)


def _collect(found: list[Any], call: Callable[..., Any], *arguments: Any) -> None:
    found.append(call(*arguments))


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_a_sharer_that_fails_to_leave_at_any_call_is_still_there(rig: Rig, layout: str) -> None:
    cache = rig.open(layout=layout, num_layers=3, **QUIET)
    reqids = begin_sharers(cache, seq_len=1500)
    handles: list[Any] = []
    count = rig.sweep(cache, "copy", partial(_collect, handles, cache.swap_out, reqids[0]), lambda: totals(cache))
    assert count == cache.layout.num_planes
    assert (cache.stats().saved_bytes, mapped(cache, reqids[1])) == (0, cache.layout.pages_for(1500))
    cache.trim()
    for op in ("create", "map", "set_access", "copy"):
        back: list[Any] = []
        count = rig.sweep(cache, op, partial(_collect, back, cache.swap_in, handles[-1]), lambda: totals(cache))
        assert count >= cache.layout.num_planes
        assert not shares_pages(cache, back[0])
        handles.append(cache.swap_out(back[0]))
        cache.trim()
    cache.close()


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("op", ["copy", "unmap", "release"])
def test_a_pause_of_sharers_that_fails_at_any_call_loses_nothing(rig: Rig, layout: str, op: str) -> None:
    cache = rig.open(layout=layout, num_layers=3, max_batch_size=5, **QUIET)
    reqids = begin_sharers(cache, 3, seq_len=1500)
    idle = cache.alloc_reqid()
    assert cache.step({idle: 100})
    cache.free_reqid(idle)
    used = 3 * 1500 * cache.layout.token_bytes
    # What was released in part can only come back without sharing, and idle pages stay away.
    count = rig.sweep(cache, op, lambda: cache.pause(offload=True), lambda: books(cache))
    assert count >= 3 * cache.layout.num_planes
    assert (rig.fake.mapped, rig.fake.created_bytes, cache.stats().used_bytes) == (0, 0, 0)
    for again in ("create", "map", "set_access", "copy"):
        assert rig.sweep(cache, again, cache.resume, lambda: totals(cache)) >= 3 * cache.layout.num_planes
        assert cache.stats().used_bytes == used
        cache.pause(offload=True)
    cache.resume()
    assert cache.step(dict.fromkeys(reqids, 1501))
    cache.close()


@pytest.mark.parametrize("op", ["copy", "unmap"])
def test_a_pause_that_fails_before_anything_left_keeps_what_is_shared(rig: Rig, op: str) -> None:
    cache = rig.open(**QUIET)
    reqids = begin_sharers(cache, 3)
    assert rig.sweep(cache, op, lambda: cache.pause(offload=True), lambda: totals(cache)) == 3 * cache.layout.num_planes
    cache.resume()
    assert cache.step(dict.fromkeys(reqids, SHARED + 1))
    cache.close()


def test_slots_lost_in_a_pause_do_not_take_the_cache_with_them(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    first, second = begin_sharers(cache)
    rig.driver.fail("unmap", at=3)
    rig.driver.fail("map")
    with pytest.raises(StateError, match=rf"reqid {first}: pages .*, reqid {second}: pages .* out of use"):
        cache.pause(offload=True)
    cache.check_integrity()
    assert cache.step({cache.alloc_reqid(): SHARED})
    cache.check_integrity()
    cache.close()


def test_books_are_right_while_sharers_are_being_unmapped(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    begin_sharers(cache, 3)
    seen: list[Any] = []
    rig.driver.on_call = lambda op, args: seen.append(cache.stats()) if op == "unmap" else None
    cache.pause(offload=True)
    rig.driver.on_call = None
    assert len(seen) == 3 * cache.layout.num_planes
    for stats in seen:
        assert stats.mapped_bytes + stats.free_bytes == stats.created_bytes > 0
        assert (stats.active_bytes, stats.used_bytes, stats.saved_bytes) == (0, 0, 0)
    cache.resume()
    cache.close()


@pytest.mark.parametrize("way_out", ["a higher limit", "a request less"])
def test_memory_for_all_that_was_shared_is_asked_for_before_anything_comes_back(rig: Rig, way_out: str) -> None:
    cache = rig.open(**QUIET)
    reqids = begin_sharers(cache, 3)
    cache.set_memory_limit(20 * cache.layout.page_bytes)
    assert cache.stats().active_bytes == 14 * cache.layout.page_bytes
    cache.pause(offload=True)
    before = totals(cache)
    with pytest.raises(OutOfPagesError, match=r"30 pages .* needed, 20 can be had"):
        cache.resume()
    assert totals(cache) == before
    with pytest.raises(StateError, match="paused"):
        cache.step({reqids[0]: 1})
    if way_out == "a higher limit":
        cache.set_memory_limit(30 * cache.layout.page_bytes)
    else:
        cache.free_reqid(reqids.pop(0))
    cache.resume()
    assert cache.step(dict.fromkeys(reqids, SHARED))
    assert cache.stats().used_bytes == len(reqids) * SHARED * cache.layout.token_bytes
    cache.close()


def test_rows_leave_after_those_that_another_stream_copies_here(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    rig.fake.hold_fences = True
    rig.fake.current_stream = "shares"
    _, child = begin_sharers(cache)
    copied = fence_of(cache, child)
    rig.fake.current_stream = "swaps"
    cache.swap_out(child)
    assert rig.fake.ordered[-1] == ("swaps", copied)
    assert fence_of(cache, child) is rig.fake.fences[-1]
    assert rig.fake.fences[-1].num_bytes == SHARED * cache.layout.token_bytes, "the copy's own, which is after both"
    rig.fake.finish_fences()
    cache.close()


def test_a_shared_page_is_not_written_under_the_copy_out_of_another(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source, child = begin_sharers(cache)
    assert cache.step({source: 1})
    rig.fake.hold_fences = True
    cache.swap_out(child)
    copied = fence_of(cache, child)
    assert copied is not None
    done: list[bool] = []
    rig.driver.on_call = lambda op, args: done.append(copied.done) if op == "unmap" else None  # type: ignore[attr-defined]
    timer = threading.Timer(0.05, rig.fake.finish_fences)
    timer.start()
    assert cache.step({source: 2})
    timer.join()
    assert done == [True] * cache.layout.num_planes
    assert cache.stats().pages_copied == 0, "the other let go of it first"
    cache.close()


def test_what_comes_back_does_not_get_pages_that_an_idle_slot_shares(rig: Rig) -> None:
    cache = rig.open(max_batch_size=2, **QUIET)
    alone = cache.alloc_reqid()
    assert cache.step({alone: 2 * TOKENS})
    handle = cache.swap_out(alone)
    source, child = begin_sharers(cache)
    rig.fake.hold_fences = True
    cache.free_reqid(child)
    assert shares_pages(cache, child)
    timer = threading.Timer(0.05, rig.fake.finish_fences)
    timer.start()
    assert cache.swap_in(handle) == child
    timer.join()
    assert mapped(cache, child) == 2
    assert not shares_pages(cache, child)
    assert cache.step({source: SHARED + 1})
    rig.fake.finish_fences()
    cache.close()
