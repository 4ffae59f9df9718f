"""`debug=True`: pages that requests share are read-only, exactly those, as long as nobody may write there."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from inside import addresses, segments_of_all
from read_only import is_writable
from rig import QUIET, TOKENS, Rig, assert_stamped, mapped, settle, stamp
from warm_python import run_script

from slicedkv import CapacityError, ConfigError, DriverError, LostSlotsError, SlicedKVCache, StateError

MakeCache = Callable[..., SlicedKVCache]
LAYOUTS = ["sliced", "interleaved", "per_layer"]


def writable_pages(cache: SlicedKVCache, reqid: int) -> list[bool]:
    """Which pages of a request on the host can be written; the same in every plane."""
    found = [list(map(is_writable, addresses(cache, reqid, page))) for page in range(mapped(cache, reqid))]
    assert all(len(set(planes)) == 1 for planes in found)
    return [planes[0] for planes in found]


SCRIPT = """
import faulthandler, sys, torch
from slicedkv import SlicedKVCache
cache = SlicedKVCache(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32, max_batch_size=6,
                      max_seq_len=400, device="cpu", memory_limit=1 << 26, page_bytes=4096, extent_pages=1,
                      layout={layout!r}, debug=True)
a = cache.alloc_reqid()
cache.step({{a: 300}})
cache.k(0)[a, :300] = 1
(b,) = cache.fork(a)
assert cache.protects_shared_pages and cache.k(0)[b, :300].sum() == 300 * 32
cache.step({{a: 310, b: 310}})
cache.k(0)[a, 300:310] = cache.v(2)[b, 300:310] = 2
cache.step({{b: 100}})
cache.step({{b: 310}})
cache.k(0)[b, 100:310] = 3
print("all that may be written was written", flush=True)
faulthandler.disable()
cache.{which}[{reqid}, 10:11] = 4
print("damage")
"""


@pytest.mark.parametrize(
    ("layout", "which", "reqid"), [("sliced", "k(0)", "a"), ("interleaved", "v(2)", "b"), ("per_layer", "k(1)", "a")]
)
def test_a_write_into_a_shared_page_faults_at_once(layout: str, which: str, reqid: str) -> None:
    status, out, errors = run_script(SCRIPT.format(layout=layout, which=which, reqid=reqid))
    assert (status, out) == (-signal.SIGSEGV, "all that may be written was written\n"), errors


def test_without_debug_nothing_is_read_only(make_cache: MakeCache) -> None:
    cache = make_cache(extent_pages=1)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 400})
    (fork,) = cache.fork(reqid)
    assert not cache.debug
    assert not cache.protects_shared_pages
    assert all(writable_pages(cache, reqid) + writable_pages(cache, fork))


def test_debug_is_true_or_false(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="debug is 1"):
        make_cache(debug=1)


PAGES: dict[str, Any] = {"page_bytes": 4096, "extent_pages": 1, "mapper": "sync", "lookahead_tokens": 0, "debug": True}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extent_pages", [1, 4])
def test_who_shares_reads_and_who_does_not_writes(make_cache: MakeCache, layout: str, extent_pages: int) -> None:
    cache = make_cache(**PAGES | {"layout": layout, "extent_pages": extent_pages})
    row = cache.layout.row_bytes
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 400})
    stamp(cache, source, 0, 400, seed=1)
    assert cache.share_prefix(source, target, 300)
    shared = cache.shareable_pages(source, 300) // cache.layout.num_planes
    assert shared >= 300 * row // 4096 // extent_pages * extent_pages > 0
    assert writable_pages(cache, source) == [page >= shared for page in range(cache.layout.pages_for(400))]
    assert writable_pages(cache, target) == [page >= shared for page in range(cache.layout.pages_for(300))]
    assert_stamped(cache, target, 300, seed=1)
    assert cache.step({target: 1})
    assert not all(writable_pages(cache, target)), "a rewind alone writes nothing"
    assert cache.step({target: 300})
    assert all(writable_pages(cache, target)) == all(writable_pages(cache, source)) == (row * 1 < 4096)
    stamp(cache, target, 1, 300, seed=2)
    stamp(cache, source, 0, 400, seed=3)
    assert_stamped(cache, target, 300, seed=2, start=1)
    assert_stamped(cache, source, 400, seed=3)


def begin_pair(cache: SlicedKVCache) -> tuple[int, int]:
    """A request of 400 tokens and its fork."""
    source = cache.alloc_reqid()
    assert cache.step({source: 400})
    stamp(cache, source, 0, 400, seed=1)
    (target,) = cache.fork(source)
    assert not any(writable_pages(cache, source)[:-1])
    return source, target


def free(cache: SlicedKVCache, source: int, target: int) -> None:
    cache.free_reqid(source)


def truncate(cache: SlicedKVCache, source: int, target: int) -> None:
    cache.truncate(source, 0)
    settle(cache)
    cache.trim()


def swap(cache: SlicedKVCache, source: int, target: int) -> None:
    handle = cache.swap_out(source)
    cache.trim()
    back = cache.swap_in(handle)
    assert back is not None
    assert all(writable_pages(cache, back))


def pause(cache: SlicedKVCache, source: int, target: int) -> None:
    cache.pause(offload=True)
    cache.resume()
    assert all(writable_pages(cache, source))


def overwrite(cache: SlicedKVCache, source: int, target: int) -> None:
    assert cache.step({source: 1})
    assert cache.step({source: 400})


WAYS = [free, truncate, swap, pause, overwrite]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_the_last_sharer_writes_again(make_cache: MakeCache, way: Callable[..., None], mapper: str) -> None:
    cache = make_cache(**PAGES | {"mapper": mapper})
    source, target = begin_pair(cache)
    way(cache, source, target)
    assert cache.step({target: 1})
    assert cache.step({target: 400})
    assert all(writable_pages(cache, target))
    assert_stamped(cache, target, 1, seed=1)
    stamp(cache, target, 1, 400, seed=2)


def test_a_shared_page_that_is_cut_in_two_stays_read_only(make_cache: MakeCache) -> None:
    cache = make_cache(**PAGES)
    source, target = begin_pair(cache)
    cache.truncate(target, 100)
    cache.trim()
    kept = cache.layout.pages_for(100)
    assert writable_pages(cache, target) == [False] * kept
    assert writable_pages(cache, source) == [page >= kept for page in range(cache.layout.pages_for(400))]
    assert cache.step({target: 101})
    assert writable_pages(cache, target)[:-1] == [False] * (kept - 1), "only what it writes is its own"
    assert writable_pages(cache, target)[-1]


def test_the_pages_of_a_freed_sharer_can_be_written_by_the_next_request(make_cache: MakeCache) -> None:
    cache = make_cache(**PAGES | {"max_batch_size": 2})
    source, target = begin_pair(cache)
    cache.free_reqid(target)
    cache.free_reqid(source)
    for seed in (3, 4):
        reqid = cache.alloc_reqid(400)
        assert cache.step({reqid: 400})
        assert all(writable_pages(cache, reqid))
        stamp(cache, reqid, 0, 400, seed=seed)


# --- on a device that keeps books ------------------------------------------------------------------------------------


def shared_addresses(cache: SlicedKVCache) -> set[int]:
    """Pages of all slots in all planes whose handle is mapped more than once, counted anew."""
    all_segments = segments_of_all(cache)
    uses = Counter(handle for segments in all_segments for handle in segments.handles)
    found: set[int] = set()
    for slot, segments in enumerate(all_segments):
        page = 0
        for index, size in enumerate(segments.sizes):
            if uses[segments.handles[index * segments.planes]] > 1:
                found.update(*(addresses(cache, slot, page + nth) for nth in range(size)))
            page += size
    return found


class Driven:
    """Random calls of a cache; what fails for want of memory or slots is no matter."""

    def __init__(self, cache: SlicedKVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.lens: dict[int, int] = {}
        self.handles: list[Any] = []

    def call(self) -> None:
        names = ["begin", "step", "step", "share", "fork", "fork", "free", "truncate", "swap", "pause", "trim", "ahead"]
        with suppress(CapacityError):
            getattr(self, self.random.choice(names))()

    def length(self) -> int:
        return self.random.randint(1, self.cache.layout.max_seq_len)

    def reqid(self) -> int | None:
        return self.random.choice(sorted(self.lens)) if self.lens else None

    def begin(self) -> None:
        reqid = self.cache.alloc_reqid(self.length())
        self.lens[reqid] = 0
        self.step()

    def step(self) -> None:
        chosen = self.random.sample(sorted(self.lens), self.random.randint(0, len(self.lens)))
        lens = {reqid: self.length() for reqid in chosen}
        if self.cache.step(lens):
            self.lens |= lens

    def share(self) -> None:
        source = self.reqid()
        if source is not None and self.lens[source]:
            target = self.cache.alloc_reqid()
            self.lens[target] = 0
            num_tokens = self.random.randint(1, self.lens[source])
            if self.cache.share_prefix(source, target, num_tokens):
                self.lens[target] = num_tokens

    def fork(self) -> None:
        source = self.reqid()
        if source is not None:
            for reqid in self.cache.fork(source, self.random.randint(1, 2)):
                self.lens[reqid] = self.lens[source]

    def free(self) -> None:
        reqid = self.reqid()
        if reqid is not None:
            self.cache.free_reqid(reqid)
            del self.lens[reqid]

    def truncate(self) -> None:
        reqid = self.reqid()
        if reqid is not None:
            self.lens[reqid] = self.random.randint(0, self.lens[reqid])
            self.cache.truncate(reqid, self.lens[reqid])

    def swap(self) -> None:
        reqid = self.reqid()
        if self.handles:
            back = self.cache.swap_in(self.handles[-1])
            if back is not None:
                self.lens[back] = self.cache.seq_len(back)
                self.handles.pop()
        elif reqid is not None:
            self.handles.append(self.cache.swap_out(reqid))
            del self.lens[reqid]

    def pause(self) -> None:
        self.cache.pause(offload=self.random.random() < 0.5)
        try:
            self.cache.resume()
        except CapacityError:
            self.cache.set_memory_limit(1 << 40)
            self.cache.resume()

    def trim(self) -> None:
        self.cache.trim()

    def ahead(self) -> None:
        reqid = self.reqid()
        if reqid is not None:
            self.cache.prefetch(reqid, self.length())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("extent_pages", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_what_is_shared_is_read_only_between_calls(layout: str, extent_pages: int, seed: int) -> None:
    shape: dict[str, Any] = {"max_batch_size": 5, "max_seq_len": 20 * TOKENS, "num_layers": 32, "swap_limit": "8GiB"}
    if layout == "per_layer":
        shape |= {"num_layers": 2, "max_seq_len": 600 * TOKENS}
    with Rig(400, extent_pages) as rig:
        cache = rig.open(layout=layout, mapper="sync", debug=True, zero_on_reuse=seed % 2 == 1, **shape)
        driven, most = Driven(cache, seed), 0
        for _ in range(120):
            driven.call()
            assert rig.fake.protected == shared_addresses(cache)
            cache.check_integrity()
            most = max(most, len(rig.fake.protected))
        assert most > 0
        for handle in driven.handles:
            handle.release()
        cache.close()
        assert rig.fake.protected == set()


@pytest.mark.parametrize("extent_pages", [1, 16])
def test_beside_a_mapper_what_is_shared_is_read_only_as_soon_as_it_is_done(extent_pages: int) -> None:
    with Rig(1000, extent_pages) as rig:
        cache = rig.open(debug=True)
        source = cache.alloc_reqid()
        assert cache.step({source: 40 * TOKENS})
        forks = cache.fork(source, 2)
        assert rig.fake.protected == shared_addresses(cache) != set()
        for reqid in forks:
            cache.free_reqid(reqid)
        settle(cache)
        assert rig.fake.protected == shared_addresses(cache) == set()
        cache.close()


def test_another_cache_of_the_pool_that_takes_pages_settles_too(rig: Rig) -> None:
    cache, other = rig.open(debug=True, **QUIET), rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 40 * TOKENS})
    (fork,) = cache.fork(source)
    assert cache.step({fork: 60 * TOKENS})
    rig.fake.hold_fences = True
    cache.free_reqid(fork)
    rig.fake.finish_fences()
    assert rig.fake.protected == shared_addresses(cache) != set()
    other.set_memory_limit((40 + 20) * 2 * rig.pool.page_bytes)
    assert other.step({other.alloc_reqid(): 10 * TOKENS})
    assert rig.fake.protected == shared_addresses(cache) == set()
    cache.close()
    other.close()


def test_sharing_waits_for_what_may_still_write_the_prefix(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicedkv.paging.reclaim.TIMEOUT_S", 0.01)
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    rig.fake.hold_fences = True
    with pytest.raises(StateError, match="become read-only"):
        cache.fork(source)
    assert (rig.fake.protected, cache.stats().active_slots) == (set(), 1)
    rig.fake.finish_fences()
    rig.fake.hold_fences = False
    cache.fork(source)
    cache.close()


# --- a driver that refuses -------------------------------------------------------------------------------------------

REFUSED = 1000


def test_a_request_whose_prefix_cannot_be_made_read_only_gets_nothing(rig: Rig) -> None:
    cache = rig.open(debug=True, **QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS + 5})
    for at in range(1, 5):  # K and V of the two
        rig.driver.fail("protect", at=at, times=REFUSED)
        with pytest.raises(DriverError, match="protect"):
            cache.share_prefix(source, target, 4 * TOKENS + 5)
        assert cache.seq_len(target) == 0
        with pytest.raises(DriverError, match="protect"):
            cache.fork(source, 2)
        assert (cache.stats().active_slots, cache.seq_len(source)) == (2, 4 * TOKENS + 5)
        cache.check_integrity()
        rig.driver.heal()
        assert cache.step({source: 1})
        assert cache.step({source: 4 * TOKENS + 5})
        assert (rig.fake.protected, cache.stats().saved_bytes) == (set(), 0)
    assert cache.share_prefix(source, target, 4 * TOKENS + 5)
    assert rig.fake.protected == shared_addresses(cache) != set()
    cache.close()


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_a_request_that_may_write_is_told_when_its_pages_stay_read_only(rig: Rig, mapper: str) -> None:
    cache = rig.open(**QUIET | {"debug": True, "mapper": mapper})
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    assert cache.step({fork: 1})
    rig.driver.fail("protect", times=REFUSED)
    cache.free_reqid(source)
    settle(cache)
    cache.trim()
    assert cache.stats().saved_bytes == 0
    for _ in range(3):
        cache.pages_needed({fork: 4 * TOKENS})
        with pytest.raises(DriverError, match="protect"):
            cache.step({fork: 4 * TOKENS})
    assert cache.seq_len(fork) == 1
    rig.driver.heal()
    assert cache.step({fork: 4 * TOKENS})
    assert rig.fake.protected == set()
    cache.close()


@pytest.mark.parametrize("at", range(1, 7))
def test_a_copy_on_write_that_is_refused_can_be_made_again(rig: Rig, at: int) -> None:
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    assert cache.step({source: 1, fork: 1})
    rig.driver.fail("protect", at=at, times=REFUSED)
    with suppress(DriverError):
        assert cache.step({source: 4 * TOKENS, fork: 4 * TOKENS})
    assert all(cache.is_active(reqid) for reqid in (source, fork))
    cache.check_integrity()
    rig.driver.heal()
    assert cache.step({source: 4 * TOKENS + 1, fork: 4 * TOKENS + 1})
    assert rig.fake.protected == shared_addresses(cache) == set()
    cache.close()


@pytest.mark.parametrize("op", ["unmap", "map", "set_access"])
def test_what_is_mapped_back_is_read_only_again(rig: Rig, op: str) -> None:
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 8 * TOKENS})
    (fork,) = cache.fork(source)
    assert cache.step({fork: 1})
    protected = set(rig.fake.protected)
    for at in range(1, 3 if op == "unmap" else 5):
        rig.driver.fail(op, at=at)
        with pytest.raises(DriverError, match=op):
            cache.step({fork: 8 * TOKENS})
        assert rig.fake.protected == shared_addresses(cache) == protected
        cache.check_integrity()
    assert cache.step({fork: 8 * TOKENS})
    cache.close()


def test_a_lost_sharer_does_not_count(rig: Rig) -> None:
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map", times=REFUSED)
    cache.free_reqid(fork)
    rig.driver.heal()
    with pytest.raises(LostSlotsError, match="out of use") as caught:
        cache.step({source: 1})
    assert (caught.value.slots, cache.stats().lost_slots) == ((fork,), 1)
    assert not any(rig.fake.protected.intersection(addresses(cache, source, page)) for page in range(4))
    assert cache.step({source: 1})
    assert cache.step({source: 4 * TOKENS})
    cache.close()


def test_a_device_that_cannot_still_opens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicedkv.vmm.fake.FakeDriver.can_protect", False)
    cache = rig.open(debug=True, **QUIET)
    assert (cache.debug, cache.protects_shared_pages) == (True, False)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    with pytest.raises(StateError, match=r"lie in pages"):
        cache.check_writable([fork], [0], [1])
    assert rig.driver.counts["protect"] == 0
    cache.close()


def test_a_pause_that_fails_leaves_shared_pages_read_only(rig: Rig) -> None:
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    cache.fork(source)
    protected = set(rig.fake.protected)
    for at in range(1, 5):
        rig.driver.fail("unmap", at=at)
        with pytest.raises(DriverError, match="unmap"):
            cache.pause(offload=True)
        assert rig.fake.protected == shared_addresses(cache) == protected
    cache.pause(offload=True)
    assert rig.fake.protected == set()
    cache.resume()
    assert rig.fake.protected == set()
    cache.close()


def test_no_rows_come_back_into_pages_that_stay_read_only(rig: Rig) -> None:
    cache = rig.open(debug=True, **QUIET | {"max_batch_size": 2})
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    handle = cache.swap_out(source)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    rig.driver.fail("protect", times=REFUSED)
    rig.fake.hold_fences = True
    cache.free_reqid(source)
    cache.free_reqid(fork)
    rig.fake.finish_fences()
    cache.prefetch(cache.alloc_reqid(), 0)  # the mapper's turn, who unmaps what the idle slot shares
    assert rig.fake.protected != set()
    with pytest.raises(DriverError, match="protect"):
        cache.swap_in(handle)
    assert not handle.released
    rig.driver.heal()
    back = cache.swap_in(handle)
    assert back is not None
    assert rig.fake.protected == shared_addresses(cache) == set()
    cache.close()


def test_the_sharers_of_a_request_whose_copy_failed_write_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rig.open(debug=True, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (fork,) = cache.fork(source)
    assert cache.step({fork: 2 * TOKENS})

    def fail(*args: object) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr("slicedkv.requests.copier.Copier.copy", fail)
        with pytest.raises(LostSlotsError, match="out of use") as caught:
            cache.step({fork: 4 * TOKENS})
    assert (caught.value.slots, cache.stats().lost_slots) == ((fork,), 1)
    assert not any(rig.fake.protected.intersection(addresses(cache, source, page)) for page in range(4))
    cache.check_integrity()
    cache.close()
