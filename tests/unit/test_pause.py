"""Pause and resume: memory goes and comes, addresses and rows stay; a failure at every call leaves all as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from rig import SMALL, TOKENS, Rig, mapped, settle
from stamped_rows import KIB, LAYOUTS, MIB, begin, expected, holds

from slicedkv import CapacityError, DriverError, OutOfPagesError, SlicedKVCache, StateError

MakeCache = Callable[..., SlicedKVCache]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_bytes", [64 * KIB, 2 * MIB])
@pytest.mark.parametrize("zero_on_reuse", [False, True])
def test_offloaded_requests_come_back_where_they_were(
    make_cache: MakeCache, mapper: str, layout: str, page_bytes: int, zero_on_reuse: bool
) -> None:
    cache = make_cache(
        mapper=mapper, layout=layout, page_bytes=page_bytes, head_dim=96, zero_on_reuse=zero_on_reuse, max_seq_len=800
    )
    lens = {begin(cache, length, length): length for length in (1, 170, 800)}
    empty = cache.alloc_reqid()
    idle = begin(cache, 300, 9)
    cache.free_reqid(idle)
    views = [view[reqid, :length] for reqid, length in lens.items() for view in (cache.k(1), cache.v(2))]
    used, created = cache.stats().used_bytes, cache.stats().created_bytes
    assert cache.pause(offload=True) >= created
    stats = cache.stats()
    assert (stats.created_bytes, stats.mapped_bytes, stats.used_bytes, stats.waste_bytes) == (0, 0, 0, 0)
    assert cache.pool.driver.used_bytes() == 0  # type: ignore[attr-defined]
    assert (stats.active_slots, stats.swapped_bytes >= used) == (4, True)
    cache.check_integrity()
    cache.resume()
    assert (cache.stats().used_bytes, cache.stats().swapped_bytes) == (used, 0)
    for reqid, length in lens.items():
        assert holds(cache, reqid, length, length)
    rows = [expected(cache, length, length, *which) for length in lens.values() for which in ((1, 0), (2, 1))]
    assert all(map(torch.equal, views, rows)), "views taken before see the rows again"
    assert cache.step(dict.fromkeys(lens, 800) | {empty: 5})
    for reqid, length in lens.items():
        assert holds(cache, reqid, length, length)
        if zero_on_reuse:
            assert not cache.k(0)[reqid, length:].any()


def test_without_offload_requests_keep_their_pages(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", lookahead_tokens=200, eager_tokens=300, max_seq_len=800, head_dim=96)
    reqid, idle = begin(cache, 100, 1), begin(cache, 400, 2)
    cache.free_reqid(idle)
    stats = cache.stats()
    assert stats.lookahead_bytes > 0
    assert stats.idle_bytes > 0
    assert cache.pause() == stats.created_bytes - cache.layout.bytes_for(100)
    assert cache.stats().created_bytes == cache.layout.bytes_for(100)
    assert holds(cache, reqid, 100, 1)
    cache.resume()
    assert cache.step({reqid: 150})
    assert holds(cache, reqid, 100, 1)


def test_host_memory_short_is_an_error_before_anything(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", swap_limit=128 * KIB)
    reqid, idle = begin(cache, 400, 1), begin(cache, 50, 2)
    cache.free_reqid(idle)
    before = cache.stats()
    with pytest.raises(CapacityError, match="swap_limit"):
        cache.pause(offload=True)
    assert cache.stats() == before
    assert cache.step({reqid: 400})
    cache.pause()
    cache.resume()


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_closing_while_paused(mapper: str) -> None:
    cache = SlicedKVCache(**SMALL, mapper=mapper)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    cache.pause(offload=True)
    cache.close()
    assert cache.closed


def test_the_mapper_rests(rig: Rig) -> None:
    cache = rig.open(eager_tokens=100, lookahead_tokens=TOKENS)
    reqid = cache.alloc_reqid(300)
    assert cache.step({reqid: 300})
    settle(cache)
    cache.pause(offload=True)
    maps = rig.driver.counts["map"]
    with cache._gate.lock:
        cache._mapper.wake()
    settle(cache)
    assert (rig.driver.counts["map"], rig.fake.mapped, rig.fake.created_bytes) == (maps, 0, 0)
    cache.resume()
    settle(cache)
    assert mapped(cache, reqid) >= cache.layout.pages_for(300)
    assert cache.stats().eager_bytes > 0
    cache.close()


def totals(cache: SlicedKVCache) -> tuple[object, ...]:
    stats = cache.stats()
    cache.check_integrity()
    return stats.mapped_bytes, stats.created_bytes, stats.used_bytes, stats.active_slots, stats.swapped_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["copy", "unmap", "release"])
def test_a_pause_that_fails_at_any_call_did_not_happen(rig: Rig, layout: str, op: str) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=3, max_seq_len=2000)
    lens = {cache.alloc_reqid(): 40, cache.alloc_reqid(): 1500}
    assert cache.step(lens)
    failures, paused = 0, False
    while not paused:
        before = totals(cache)
        rig.driver.heal()
        rig.driver.fail(op, at=failures + 1)
        with suppress(DriverError):
            cache.pause(offload=True)
            paused = True
        if not paused:
            failures += 1
            for handle in rig.fake._ledger.idle_handles():
                assert op == "release", "what the driver will not release is gone for us: let it go here too"
                rig.fake.release(handle)
            assert totals(cache) == before
            assert cache.step(lens)
    rig.driver.heal()
    assert failures >= 2 * cache.layout.num_planes
    assert (rig.fake.mapped, rig.fake.created_bytes) == (0, 0)
    cache.resume()
    assert totals(cache) == before
    cache.close()


@pytest.mark.parametrize("zero_on_reuse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["create", "map", "set_access", "copy"])
def test_a_resume_that_fails_at_any_call_did_not_happen(rig: Rig, layout: str, op: str, zero_on_reuse: bool) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=3, max_seq_len=2000, zero_on_reuse=zero_on_reuse)
    lens = {cache.alloc_reqid(): 40, cache.alloc_reqid(): 1500}
    assert cache.step(lens)
    cache.pause(offload=True)
    failures, resumed = 0, False
    while not resumed:
        before = totals(cache)
        rig.driver.heal()
        rig.driver.fail(op, at=failures + 1)
        with suppress(DriverError):
            cache.resume()
            resumed = True
        if not resumed:
            failures += 1
            assert totals(cache) == before
            with pytest.raises(StateError, match="paused"):
                cache.step(lens)
    assert failures >= 2 * cache.layout.num_planes
    assert cache.step(lens)
    cache.close()


def test_a_device_without_memory_for_it_keeps_it_paused(rig: Rig) -> None:
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 1000})
    cache.pause(offload=True)
    before = totals(cache)
    rig.driver.fail("create", name="CUDA_ERROR_OUT_OF_MEMORY", times=100)
    with pytest.raises(OutOfPagesError):
        cache.resume()
    assert totals(cache) == before
    rig.driver.heal()
    cache.resume()
    assert cache.step({reqid: 1000})
    cache.close()


def test_a_pause_that_cannot_be_undone_stays_and_loses_nothing(rig: Rig) -> None:
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    rig.driver.fail("release", at=8)
    rig.driver.fail("create")
    with pytest.raises(StateError, match=r"stays paused; call resume\(\)"):
        cache.pause(offload=True)
    with pytest.raises(StateError, match="paused"):
        cache.step({reqid: 1})
    for handle in rig.fake._ledger.idle_handles():
        rig.fake.release(handle)
    cache.resume()
    assert cache.step({reqid: 100})
    assert len(rig.fake.copies) == 4
    cache.close()


def test_a_slot_whose_mapping_is_unknown_is_lost_and_the_cache_is_not_paused(rig: Rig) -> None:
    cache = rig.open(mapper="sync", max_batch_size=2)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map")
    with pytest.raises(StateError, match=f"reqid {reqid}: pages .* out of use"):
        cache.pause(offload=True)
    with pytest.raises(StateError, match=f"reqid {reqid} is not active"):
        cache.step({reqid: 1})
    assert cache.step({cache.alloc_reqid(): 10})
    cache.check_integrity()
    cache.close()
