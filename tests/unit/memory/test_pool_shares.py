"""Several caches on one pool: who is short takes what others do not need, down to their share and never below.

Cases E3 and E4.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from inside import are_all_members
from rig import PAGE, QUIET, SHAPE, SMALL, TOKENS, Rig, grow, mapped, memory_files, most, settle, wait_until
from stamped_rows import KIB, LAYOUTS, begin, holds

from slicedkv import ConfigError, OutOfPagesError, PagePool, SlicedKVCache
from slicedkv.vmm.host import HostDriver


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=40) as rig:
        yield rig


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
    one = rig.open(**QUIET | {"lookahead_tokens": 2 * TOKENS})
    two = rig.open(**QUIET)
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
    one = rig.open(**QUIET, min_share=20 * PAGE)
    two = rig.open(**QUIET, min_share="16MiB")
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
    two = rig.open(**QUIET, min_share=30 * PAGE)
    one.alloc_reqid(100 * TOKENS)  # asked for in one call, so that it comes before the eager pages
    wait_until(lambda: one.stats().mapped_bytes >= 10 * PAGE)
    settle(one)
    assert one.stats().mapped_bytes == 10 * PAGE
    assert most(two, two.alloc_reqid()) == 15
    one.close()
    two.close()


def test_extents_are_taken_whole_and_never_below_the_share() -> None:
    with Rig(limit_pages=40, extent_pages=4) as rig:
        one = rig.open(**QUIET, min_share=10 * PAGE)
        two = rig.open(**QUIET)
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
    one = rig.open(**QUIET)
    active, idle = grow(one, 10), grow(one, 8)
    one.free_reqid(idle)
    reserved = rig.fake.reserved
    with pytest.raises(OutOfPagesError, match=r"21 pages .* needed, 20 can be had"):
        rig.open(**QUIET, min_share=21 * PAGE)
    for wrong in (41 * PAGE, 0, -1, "lots", 1.5):
        with pytest.raises(ConfigError, match="min_share"):
            rig.open(**QUIET, min_share=wrong)
    assert (rig.fake.reserved, mapped(one, idle)) == (reserved, 8)
    assert are_all_members(rig.pool, one)
    two = rig.open(**QUIET, min_share=0.45)
    assert (mapped(one, active), mapped(one, idle), two.pages_available()) == (10, 0, 20)
    two.close()
    assert one.stats().promised_bytes == 0
    assert one.pages_available() == 20
    one.close()


def test_a_cache_that_fails_to_open_is_promised_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig.open(**QUIET)
    with monkeypatch.context() as patched:
        patched.setattr("slicedkv.cache.KVViews", lambda *arguments: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            rig.open(**QUIET, min_share=20 * PAGE)
    gc.collect()
    assert are_all_members(rig.pool, one)
    assert one.pages_available() == 40
    one.close()


def test_limits_know_the_shares(rig: Rig) -> None:
    one = rig.open(**QUIET, min_share=10 * PAGE)
    two = rig.open(**QUIET, min_share=6 * PAGE)
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


@pytest.mark.parametrize("first_opened_first", [True, False])
def test_a_pool_that_a_cache_opened_ends_with_the_last_of_its_caches(first_opened_first: bool) -> None:
    files = memory_files()
    one = SlicedKVCache(**SMALL)
    two = SlicedKVCache(**SMALL | {"memory_limit": None}, pool=one.pool)
    first, last = (one, two) if first_opened_first else (two, one)
    for cache in (one, two):
        begin(cache, 100, 1)
    first.close()
    assert memory_files() == files + 1
    assert last.step({last.alloc_reqid(): 200})
    assert holds(last, 0, 100, 1)
    last.check_integrity()
    last.close()
    assert memory_files() == files


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_to_be_available_is(seed: int) -> None:
    """Random growth of three caches: `step` is True exactly when the pages needed are available, and shares hold."""
    numbers = random.Random(seed)
    with Rig(limit_pages=60, extent_pages=numbers.choice([1, 4])) as rig:
        layouts = [{"layout": "sliced"}, {"layout": "interleaved"}, {"layout": "per_layer", "num_layers": 3}]
        shares = [10 * PAGE, None, 12 * PAGE]
        caches = [rig.open(**QUIET | own, min_share=share) for own, share in zip(layouts, shares, strict=True)]
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


def test_a_cache_may_be_opened_while_the_books_are_compared(rig: Rig) -> None:
    """Who maps handles of the pool is one more in the middle of looking at all of them."""
    one = rig.open(**QUIET)
    opened: list[SlicedKVCache] = []
    thread = threading.Thread(target=lambda: opened.append(rig.open(**QUIET)))

    class Holding:
        held_pages = leaving_pages = 0

        def mapped_handles(self) -> list[int]:
            if not thread.ident:
                thread.start()
                thread.join(0.1)
            return []

    class Member:
        min_share_pages, backing = 0, Holding()

    member = Member()
    with rig.pool.gate.lock:
        rig.pool.shares.join(member)
    one.check_integrity()
    thread.join(5)
    assert len(opened) == 1
    for cache in (one, *opened):
        cache.close()
