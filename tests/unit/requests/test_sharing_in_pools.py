"""Caches that share pages between their requests and draw on one pool: what is counted, taken and kept for whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rig import PAGE, QUIET, SHAPE, TOKENS, Rig, assert_stamped, mapped, stamp
from stamped_rows import KIB

from slicedkv import OutOfPagesError, PagePool, SlicedKVCache, SwapHandle
from slicedkv.vmm.host import HostDriver


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=40) as opened:
        yield opened
        opened.fake.finish_fences()


def begin_sharers(cache: SlicedKVCache, pages: int, count: int) -> list[int]:
    """Requests that share so many pages of K and as many of V."""
    source = cache.alloc_reqid()
    assert cache.step({source: pages * TOKENS})
    return [source, *cache.fork(source, count - 1)]


def test_what_sharers_free_is_available_to_others_with_the_last_of_them(rig: Rig) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET)
    sharers = begin_sharers(one, 4, 3)
    rig.fake.hold_fences = True  # idle sharers stay mapped
    for freed, available in zip(sharers, (32, 32, 40), strict=True):
        one.free_reqid(freed)
        assert two.pages_available() == one.pages_available() == available
        assert two.can_admit(available // 2 * TOKENS)
        assert not two.can_admit(available // 2 * TOKENS + 1)
    assert [mapped(one, reqid) for reqid in sharers] == [4, 4, 4]
    rig.fake.finish_fences()
    assert two.step({two.alloc_reqid(): 20 * TOKENS}), "all of it"
    assert [mapped(one, reqid) for reqid in sharers] == [0, 0, 0]
    one.close()
    two.close()


def test_active_sharers_lose_nothing_to_others(rig: Rig) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET)
    source, first, second = begin_sharers(one, 4, 3)
    one.free_reqid(first)
    reqid = two.alloc_reqid()
    assert two.step({reqid: 16 * TOKENS})
    assert two.step({reqid: 16 * TOKENS + 1}) is False
    with pytest.raises(OutOfPagesError):
        two.set_memory_limit(39 * PAGE)
    assert (mapped(one, source), mapped(one, second)) == (4, 4)
    one.free_reqid(source)
    assert two.step({reqid: 16 * TOKENS + 1}) is False, "the last sharer holds them all"
    one.check_integrity()
    one.close()
    two.close()


def test_a_share_is_counted_in_memory_not_in_mappings(rig: Rig) -> None:
    one, two = rig.open(**QUIET, min_share=16 * PAGE), rig.open(**QUIET)
    sharers = begin_sharers(one, 4, 3)
    assert one.stats().mapped_bytes == 8 * PAGE
    assert (two.stats().promised_bytes, two.pages_available()) == (8 * PAGE, 24)
    assert two.step({two.alloc_reqid(): 12 * TOKENS})
    assert two.can_admit(1) is False
    assert one.step({sharers[0]: 8 * TOKENS}), "its share is its own"
    rig.fake.hold_fences = True
    for reqid in sharers:
        one.free_reqid(reqid)
    assert (two.stats().promised_bytes, two.pages_available()) == (0, 0), "it holds its share, idle or not"
    rig.fake.finish_fences()
    one.close()
    two.close()


def test_others_take_no_more_of_idle_sharers_than_is_beyond_the_share(rig: Rig) -> None:
    one, two = rig.open(**QUIET, min_share=10 * PAGE), rig.open(**QUIET)
    first, second = begin_sharers(one, 6, 2)
    assert one.step({second: 8 * TOKENS})
    rig.fake.hold_fences = True
    one.free_reqid(first)
    one.free_reqid(second)
    assert one.stats().mapped_bytes == 16 * PAGE
    assert two.pages_available() == 40 - 10
    rig.fake.finish_fences()
    reqid = two.alloc_reqid()
    assert two.step({reqid: 15 * TOKENS})
    assert one.stats().mapped_bytes == 10 * PAGE
    assert two.step({reqid: 15 * TOKENS + 1}) is False
    one.check_integrity()
    one.close()
    two.close()


def test_a_copy_takes_its_page_from_another_cache_or_changes_nothing(rig: Rig) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET, min_share=20 * PAGE)
    source, child = begin_sharers(one, 9, 2)
    assert one.step({child: 1})
    idle = two.alloc_reqid()
    assert two.step({idle: 11 * TOKENS})
    assert one.step({child: 2}) is False, "all memory is held by requests"
    assert one.stats().saved_bytes == 18 * PAGE
    two.free_reqid(idle)
    assert one.pages_needed({child: 2}) == one.pages_available() == 2
    assert one.step({child: 2})
    assert (mapped(two, idle), one.stats().pages_copied, one.stats().saved_bytes) == (10, 2, 16 * PAGE)
    assert one.step({child: TOKENS})
    assert one.step({child: TOKENS + 1}) is False, "the share of the other"
    assert (mapped(two, idle), mapped(one, source)) == (10, 9)
    one.check_integrity()
    one.close()
    two.close()


@pytest.mark.parametrize("call", ["share_prefix", "fork"])
def test_rows_that_are_not_shared_get_pages_of_another_cache(rig: Rig, call: str) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET)
    source, idle = one.alloc_reqid(), two.alloc_reqid()
    assert one.step({source: 8 * TOKENS + 1})
    assert two.step({idle: 11 * TOKENS})
    target = one.alloc_reqid()
    if call == "fork":
        with pytest.raises(OutOfPagesError):
            one.fork(source)
    else:
        assert one.share_prefix(source, target, 8 * TOKENS + 1) is False
    two.free_reqid(idle)
    if call == "fork":
        (target,) = one.fork(source)
    else:
        assert one.share_prefix(source, target, 8 * TOKENS + 1)
    assert (mapped(one, target), mapped(two, idle)) == (9, 0)
    assert one.stats().saved_bytes == 16 * PAGE
    one.close()
    two.close()


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_rows_are_right_while_two_caches_share_swap_and_take(layout: str, mapper: str) -> None:
    driver = HostDriver()
    pool = PagePool(driver, page_bytes=64 * KIB, memory_limit=140 * 64 * KIB, extent_pages=1)
    shape: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32", "device": "cpu"}
    shape |= {"max_batch_size": 4, "max_seq_len": 1500, "mapper": mapper, "pool": pool, "layout": layout}
    with SlicedKVCache(**shape) as one, SlicedKVCache(**shape) as two:
        for round_ in range(1, 5):
            source = one.alloc_reqid()
            assert one.step({source: 600})
            stamp(one, source, 0, 600, seed=round_)
            first, second = one.fork(source, 2)
            handle = one.swap_out(first)
            other = two.alloc_reqid()
            assert two.step({other: 900})
            stamp(two, other, 0, 900, seed=9)
            assert one.step({second: 1})
            assert one.step({second: 600})
            stamp(one, second, 1, 600, seed=20 + round_)
            back = one.swap_in(handle)
            assert back is not None
            assert_stamped(two, other, 900, seed=9)
            two.free_reqid(other)
            assert one.step({source: 1400})
            assert_stamped(one, source, 600, seed=round_)
            assert_stamped(one, back, 600, seed=round_)
            assert_stamped(one, second, 600, seed=20 + round_, start=1)
            for reqid in (source, second, back):
                one.free_reqid(reqid)
            one.check_integrity()
            two.check_integrity()
        assert min(one.stats().pages_reclaimed, two.stats().pages_reclaimed) > 0
    pool.trim()
    driver.close()


class Random:
    """One of several caches, driven at random; what it says it can have is compared with what it gets."""

    def __init__(self, cache: SlicedKVCache, numbers: random.Random, exact: bool) -> None:
        self.cache, self.numbers, self.exact = cache, numbers, exact
        self.requests: dict[int, int] = {}
        self.swapped: list[SwapHandle] = []

    def act(self) -> None:
        weights: dict[Callable[[], None], int] = {self.grow: 6, self.shrink: 2, self.free: 3, self.fork: 3}
        weights |= {self.swap_out: 2, self.swap_in: 3, self.pause: 1}
        self.numbers.choices(list(weights), list(weights.values()))[0]()

    def grow(self) -> None:
        if len(self.requests) < SHAPE["max_batch_size"]:
            self.requests[self.cache.alloc_reqid()] = 0
        reqid = self.numbers.choice(list(self.requests))
        self.step(reqid, min(self.requests[reqid] + self.numbers.randrange(8 * TOKENS), SHAPE["max_seq_len"]))

    def shrink(self) -> None:
        """Step back, then on: what is shared there is copied."""
        if any(self.requests.values()):
            reqid = self.numbers.choice([reqid for reqid, length in self.requests.items() if length])
            self.step(reqid, self.numbers.randrange(self.requests[reqid]) + 1)
            self.step(reqid, self.requests[reqid])

    def step(self, reqid: int, length: int) -> None:
        fits = self.cache.pages_needed({reqid: length}) <= self.cache.pages_available()
        assert self.cache.step({reqid: length}) is fits
        if fits:
            self.requests[reqid] = max(length, self.requests[reqid])

    def free(self) -> None:
        if self.requests:
            reqid = self.numbers.choice(list(self.requests))
            del self.requests[reqid]
            self.cache.free_reqid(reqid)

    def fork(self) -> None:
        if any(self.requests.values()) and len(self.requests) < SHAPE["max_batch_size"]:
            source = self.numbers.choice([reqid for reqid, length in self.requests.items() if length])
            length, layout = self.cache.seq_len(source), self.cache.layout
            needed = (layout.pages_for(length) - layout.whole_pages(length)) * layout.num_planes
            fits = needed <= self.cache.pages_available()
            try:
                self.requests[self.cache.fork(source)[0]] = length
                assert fits
            except OutOfPagesError:
                assert not (fits and self.exact)

    def swap_out(self) -> None:
        if self.requests:
            reqid = self.numbers.choice(list(self.requests))
            self.swapped.append(self.cache.swap_out(reqid))
            assert self.swapped[-1].seq_len == self.requests.pop(reqid)

    def swap_in(self) -> None:
        if self.swapped and len(self.requests) < SHAPE["max_batch_size"]:
            handle, layout = self.swapped[-1], self.cache.layout
            fits = layout.pages_for(handle.seq_len) * layout.num_planes <= self.cache.pages_available()
            reqid = self.cache.swap_in(handle)
            assert (reqid is not None) is fits
            if reqid is not None:
                self.requests[reqid] = self.swapped.pop().seq_len

    def pause(self) -> None:
        offload = self.numbers.random() < 0.7
        self.cache.pause(offload=offload)
        if offload:
            assert self.cache.stats().mapped_bytes == 0
            self.resume()
        else:
            self.cache.resume()

    def resume(self) -> None:
        """Requests end until there is memory for those that are left."""
        layout = self.cache.layout
        unshared = sum(map(layout.pages_for, self.requests.values())) * layout.num_planes
        fits = unshared <= self.cache.pages_available()
        try:
            self.cache.resume()
            assert fits
        except OutOfPagesError:
            assert not fits
            self.free()
            self.resume()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_to_be_available_is(seed: int) -> None:
    numbers = random.Random(seed)
    extent_pages = numbers.choice([1, 1, 4])
    with Rig(limit_pages=60, extent_pages=extent_pages) as rig:
        layouts = [{"layout": "sliced"}, {"layout": "interleaved"}, {"layout": "per_layer", "num_layers": 3}]
        shares = [10 * PAGE, None, 12 * PAGE]
        caches = [rig.open(**QUIET | own, min_share=share) for own, share in zip(layouts, shares, strict=True)]
        players = [Random(cache, numbers, extent_pages == 1) for cache in caches]
        for _ in range(400):
            numbers.choice(players).act()
            for cache, share in zip(caches, shares, strict=True):
                cache.check_integrity()
                assert rig.pool.available_pages * PAGE >= (share or 0) - cache.stats().mapped_bytes
            mapped_bytes = sum(cache.stats().mapped_bytes for cache in caches)
            assert mapped_bytes + rig.pool.free_pages * PAGE == rig.pool.created_pages * PAGE == rig.fake.created_bytes
        assert sum(cache.stats().pages_shared for cache in caches) > 0
        for cache in caches:
            cache.close()
