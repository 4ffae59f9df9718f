"""Pause and resume: memory goes and comes, addresses and rows stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rig import SMALL, TOKENS, Rig, mapped, settle
from stamped_rows import KIB, LAYOUTS, MIB, begin, expected, holds

from slicedkv import CapacityError, ConfigError, SlicedKVCache, StateError

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


REFUSED: dict[str, Callable[[SlicedKVCache, Any], object]] = {
    "alloc_reqid": lambda cache, handle: cache.alloc_reqid(5),
    "prefetch": lambda cache, handle: cache.prefetch(0, 5),
    "free_reqid": lambda cache, handle: cache.free_reqid(0),
    "step": lambda cache, handle: cache.step({0: 1}),
    "a step that grows": lambda cache, handle: cache.step({0: 300}),
    "swap_out": lambda cache, handle: cache.swap_out(0),
    "swap_in": lambda cache, handle: cache.swap_in(handle),
    "trim": lambda cache, handle: cache.trim(),
    "set_memory_limit": lambda cache, handle: cache.set_memory_limit(MIB),
    "pause": lambda cache, handle: cache.pause(),
}


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_refused_and_what_works_meanwhile(make_cache: MakeCache, mapper: str, offload: bool) -> None:
    cache = make_cache(mapper=mapper)
    handle = cache.swap_out(begin(cache, 50, 2))
    reqid = begin(cache, 100, 1)
    assert reqid == 0
    with pytest.raises(StateError, match="not paused"):
        cache.resume()
    with pytest.raises(ConfigError, match="offload is 1"):
        cache.pause(offload=1)  # type: ignore[arg-type]
    cache.pause(offload=offload)
    before = cache.stats()
    for call in REFUSED.values():
        with pytest.raises(StateError, match=r"the cache is paused; call resume\(\) first"):
            call(cache, handle)
    assert cache.stats() == before
    assert not cache.can_admit(1)
    assert cache.pages_available() > 0
    assert cache.pages_needed({reqid: 200}) > 0
    assert cache.k(0).shape[0] == 6
    cache.check_integrity()
    cache.resume()
    assert holds(cache, reqid, 100, 1)
    assert holds(cache, cache.swap_in(handle), 50, 2)


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


def test_others_wait_or_are_refused_while_it_happens(make_cache: MakeCache) -> None:
    cache = make_cache(max_batch_size=4)
    lens = {begin(cache, 200 + index, index): 200 + index for index in range(3)}
    stop, failures, steps = threading.Event(), [], [0]

    def keep_stepping() -> None:
        while not stop.is_set():
            try:
                assert cache.step(lens)
                steps[0] += 1
            except StateError as error:
                if "paused" not in str(error):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=keep_stepping)
    thread.start()
    for _ in range(20):
        cache.pause(offload=True)
        cache.resume()
    stop.set()
    thread.join()
    assert not failures
    assert steps[0] > 0
    for index, (reqid, length) in enumerate(lens.items()):
        assert holds(cache, reqid, length, index)
