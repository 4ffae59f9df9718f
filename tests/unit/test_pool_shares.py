"""Several caches on one pool: who is short takes what others do not need, down to their share and never below.

Cases E3 and E4, and two caches that are short at the same time.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rig import PAGE, SHAPE, TOKENS, Rig, mapped
from stamped_rows import KIB, LAYOUTS, begin, holds

from slicedkv import ConfigError, DriverError, OutOfPagesError, PagePool, SlicedKVCache
from slicedkv.vmm.host import HostDriver

SYNC: dict[str, Any] = {"mapper": "sync", "lookahead_tokens": 0, "reclaim_watermark": 0.0}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=40) as rig:
        yield rig


def grow(cache: SlicedKVCache, pages: int) -> int:
    """A request of so many pages of K and as many of V."""
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: pages * TOKENS})
    return reqid


def most(cache: SlicedKVCache, reqid: int) -> int:
    """Pages per plane that a request can have."""
    while cache.step({reqid: (mapped(cache, reqid) + 1) * TOKENS}):
        pass
    return mapped(cache, reqid)


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_idle_memory_goes_where_it_is_needed_and_no_row_is_lost(mapper: str, layout: str) -> None:
    driver = HostDriver()
    pool = PagePool(driver, page_bytes=64 * KIB, memory_limit=60 * 64 * KIB, extent_pages=4)
    shape: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 96, "dtype": "float32", "device": "cpu"}
    shape |= {"max_batch_size": 4, "max_seq_len": 800, "mapper": mapper, "pool": pool}
    with SlicedKVCache(**shape) as one, SlicedKVCache(**shape | {"num_kv_heads": 1}, layout=layout) as two:
        for round_ in range(4):
            lens = {begin(one, 100, round_): 100, begin(one, 500, round_): 500}
            idle = begin(one, 200, 8)
            one.free_reqid(idle)
            kept = begin(two, 340, round_)
            assert two.stats().mapped_bytes + one.stats().mapped_bytes <= pool.memory_limit
            for reqid, length in lens.items():
                assert holds(one, reqid, length, round_)
                one.free_reqid(reqid)
            assert holds(two, kept, 340, round_)
            two.free_reqid(kept)
        one.check_integrity()
        assert one.trim() + two.trim() > 0
        assert pool.created_pages == 0
    driver.close()


def test_what_is_short_takes_idle_slots_then_margin_but_no_active_pages(rig: Rig) -> None:
    one = rig.open(**SYNC | {"lookahead_tokens": 2 * TOKENS})
    two = rig.open(**SYNC)
    active, idle = grow(one, 5), grow(one, 4)
    one.free_reqid(idle)
    assert mapped(one, active) == 7
    reqid = two.alloc_reqid()
    assert two.pages_available() == 40 - 2 * 5
    assert two.can_admit(15 * TOKENS)
    assert not two.can_admit(15 * TOKENS + 1)
    assert two.step({reqid: 11 * TOKENS})
    assert (mapped(one, active), mapped(one, idle)) == (7, 0), "its idle slots go before its margin"
    assert two.step({reqid: 15 * TOKENS})
    assert mapped(one, active) == 5
    assert not two.step({reqid: 16 * TOKENS})
    assert one.step({active: 5 * TOKENS})
    one.close()
    two.close()


def test_a_share_is_always_there(rig: Rig) -> None:
    one = rig.open(**SYNC, min_share=20 * PAGE)
    two = rig.open(**SYNC, min_share="16MiB")
    assert (one.stats().promised_bytes, two.stats().promised_bytes) == (8 * PAGE, 20 * PAGE)
    assert (one.pages_available(), two.pages_available()) == (32, 20)
    greedy = two.alloc_reqid()
    assert most(two, greedy) == 10
    assert one.pages_available() == 20
    other = one.alloc_reqid()
    assert most(one, other) == 10
    two.free_reqid(greedy)
    assert most(one, other) == 16, "what was freed is had, down to the share of 8 pages"
    assert two.stats().mapped_bytes == 8 * PAGE
    again = two.alloc_reqid()
    assert most(two, again) == 4
    one.free_reqid(other)
    assert most(two, again) == 10
    one.close()
    two.close()


def test_work_ahead_of_need_keeps_to_the_shares(rig: Rig) -> None:
    one = rig.open(reclaim_watermark=0.0, eager_tokens=40 * TOKENS)
    two = rig.open(**SYNC, min_share=30 * PAGE)
    one.prefetch(one.alloc_reqid(), 100 * TOKENS)
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert one.stats().mapped_bytes <= 10 * PAGE
    assert most(two, two.alloc_reqid()) == 15
    one.close()
    two.close()


def test_extents_are_taken_whole_and_never_below_the_share() -> None:
    with Rig(limit_pages=40, extent_pages=4) as rig:
        one = rig.open(**SYNC, min_share=10 * PAGE)
        two = rig.open(**SYNC)
        idle = grow(one, 16)
        assert one.stats().extents_mapped == 8
        one.free_reqid(idle)
        reqid = two.alloc_reqid()
        assert two.pages_available() == 8 + 16
        assert most(two, reqid) == 12
        assert mapped(one, idle) == 8, "4 pages less would leave 8 of 10"
        one.close()
        two.close()


def test_opening_takes_its_share_from_what_is_idle_or_says_what_is_missing(rig: Rig) -> None:
    one = rig.open(**SYNC)
    active, idle = grow(one, 10), grow(one, 8)
    one.free_reqid(idle)
    reserved = rig.fake.reserved
    with pytest.raises(OutOfPagesError, match=r"21 pages .* needed, 20 can be had"):
        rig.open(**SYNC, min_share=21 * PAGE)
    for wrong in (41 * PAGE, 0, -1, "lots", 1.5):
        with pytest.raises(ConfigError, match="min_share"):
            rig.open(**SYNC, min_share=wrong)
    assert (rig.fake.reserved, mapped(one, idle), rig.pool.shares.members) == (reserved, 8, (one._state,))
    two = rig.open(**SYNC, min_share=0.45)
    assert (mapped(one, active), mapped(one, idle), two.pages_available()) == (10, 0, 20)
    two.close()
    assert one.stats().promised_bytes == 0
    assert one.pages_available() == 20
    one.close()


def test_a_cache_that_fails_to_open_is_promised_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig.open(**SYNC)
    with monkeypatch.context() as patched:
        patched.setattr("slicedkv.cache.KVViews", lambda *arguments: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            rig.open(**SYNC, min_share=20 * PAGE)
    gc.collect()
    assert rig.pool.shares.members == (one._state,)
    assert one.pages_available() == 40
    one.close()


def test_limits_know_the_shares(rig: Rig) -> None:
    one = rig.open(**SYNC, min_share=10 * PAGE)
    two = rig.open(**SYNC, min_share=6 * PAGE)
    with pytest.raises(ConfigError, match="16 pages; a limit of 15 pages"):
        one.set_memory_limit(15 * PAGE)
    reqid, idle = grow(one, 7), grow(two, 5)
    two.free_reqid(idle)
    with pytest.raises(OutOfPagesError, match=r"19 pages .* requests need 20"):
        one.set_memory_limit(19 * PAGE)
    one.set_memory_limit(20 * PAGE)
    assert (mapped(two, idle), two.pages_available(), one.pages_available()) == (3, 6, 0)
    two.set_memory_limit(40 * PAGE)
    assert most(one, reqid) == 17, "the pool grows again"
    one.close()
    two.close()


def test_the_work_of_the_other_cache_is_waited_for(rig: Rig) -> None:
    one, two = rig.open(**SYNC), rig.open(**SYNC)
    idle = grow(one, 15)
    rig.fake.hold_fences = True
    one.free_reqid(idle)
    finished: list[float] = []
    unmapped: list[float] = []
    rig.driver.on_call = lambda op, args: unmapped.append(time.monotonic()) if op == "unmap" else None
    timer = threading.Timer(0.05, lambda: finished.append(time.monotonic()) or rig.fake.finish_fences())
    timer.start()
    assert two.step({two.alloc_reqid(): 15 * TOKENS})
    timer.join()
    assert min(unmapped) >= finished[0]
    rig.driver.on_call = None
    one.close()
    two.close()


@pytest.mark.parametrize("op", ["unmap", "create", "map"])
def test_taking_that_fails_at_any_call_loses_nothing(op: str) -> None:
    with Rig(limit_pages=40, extent_pages=4) as rig:
        one, two = rig.open(**SYNC, layout="per_layer", num_layers=2, max_seq_len=9000), rig.open(**SYNC)
        active, idle = one.alloc_reqid(), one.alloc_reqid()
        assert one.step({active: 2 * 1024, idle: 5 * 1024})
        one.free_reqid(idle)
        reqid = two.alloc_reqid()
        failures = 0
        while True:
            rig.driver.heal()
            rig.driver.fail(op, at=failures + 1)
            before = (one.stats().active_bytes, one.stats().used_bytes, two.stats().mapped_bytes)
            try:
                assert two.step({reqid: 14 * TOKENS})
                break
            except DriverError:
                failures += 1
            assert (one.stats().active_bytes, one.stats().used_bytes, two.stats().mapped_bytes) == before
            one.check_integrity()
        assert failures > 0
        assert one.step({active: 2 * 1024})
        rig.driver.heal()
        one.close()
        two.close()


def test_two_that_are_short_at_once_both_get_on(rig: Rig) -> None:
    """Each thread fills its share and frees it, again and again, with mappers at work; nobody waits for ever."""
    caches = [rig.open(min_share=16 * PAGE), rig.open(min_share=16 * PAGE, layout="interleaved")]
    failures: list[BaseException] = []
    turns = [0, 0]

    def work(index: int) -> None:
        cache, numbers = caches[index], random.Random(index)
        try:
            while time.monotonic() < end:
                promised = cache.layout.tokens_backed(8 // cache.layout.num_planes)
                first, second = cache.alloc_reqid(), cache.alloc_reqid(promised)
                assert cache.step({first: promised, second: promised}), "its share is its own"
                cache.step({first: numbers.randrange(4000)})
                if numbers.random() < 0.3:
                    cache.trim()
                cache.free_reqid(first)
                cache.free_reqid(second)
                turns[index] += 1
        except BaseException as error:
            failures.append(error)

    end = time.monotonic() + 2
    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a deadlock"
    assert not failures
    assert min(turns) > 5
    for cache in caches:
        cache.check_integrity()
        cache.close()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_to_be_available_is(seed: int) -> None:
    """Random growth of three caches: `step` is True exactly when the pages needed are available, and shares hold."""
    numbers = random.Random(seed)
    with Rig(limit_pages=60, extent_pages=numbers.choice([1, 4])) as rig:
        layouts = [{"layout": "sliced"}, {"layout": "interleaved"}, {"layout": "per_layer", "num_layers": 3}]
        shares = [10 * PAGE, None, 12 * PAGE]
        caches = [rig.open(**SYNC | own, min_share=share) for own, share in zip(layouts, shares, strict=True)]
        requests: list[dict[int, int]] = [{}, {}, {}]
        for _ in range(300):
            index = numbers.randrange(3)
            cache, mine = caches[index], requests[index]
            if mine and numbers.random() < 0.3:
                cache.free_reqid(mine.popitem()[0])
                continue
            if len(mine) < 4:
                mine[cache.alloc_reqid()] = 0
            reqid = numbers.choice(list(mine))
            length = min(mine[reqid] + numbers.randrange(12 * TOKENS), SHAPE["max_seq_len"])
            fits = cache.pages_needed({reqid: length}) <= cache.pages_available()
            assert cache.step({reqid: length}) is fits
            mine[reqid] = length if fits else mine[reqid]
            cache.check_integrity()
            for other, share in zip(caches, shares, strict=True):
                lacking = (share or 0) - other.stats().mapped_bytes
                assert rig.pool.available_pages * PAGE >= lacking
        for cache in caches:
            cache.close()
