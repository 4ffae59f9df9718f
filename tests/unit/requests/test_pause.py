"""Pause and resume: memory goes and comes, addresses and rows stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from inside import wake_mapper
from rig import SMALL, TOKENS, Rig, mapped, settle
from stamped_rows import KIB, LAYOUTS, MIB, begin, expected, holds

from slicedkv import CapacityError, SlicedKVCache

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
    with rig.pool.gate.lock:
        wake_mapper(cache)
    settle(cache)
    assert (rig.driver.counts["map"], rig.fake.mapped, rig.fake.created_bytes) == (maps, 0, 0)
    cache.resume()
    settle(cache)
    assert mapped(cache, reqid) >= cache.layout.pages_for(300)
    assert cache.stats().eager_bytes > 0
    cache.close()
