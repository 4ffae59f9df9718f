"""`SlicedKVCache` on real host memory: what each call promises, with all layouts, page sizes and both mappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import lengths_of
from memory_probe import is_readable
from rig import assert_stamped, settle, stamp, used_bytes

from slicedkv import ConfigError, OutOfPagesError, PagePool, SlicedKVCache, StateError
from slicedkv.vmm import MemoryInfo

KIB, MIB = 1 << 10, 1 << 20
MakeCache = Callable[..., SlicedKVCache]
LAYOUTS = ("sliced", "interleaved", "per_layer")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_bytes", [64 * KIB, 2 * MIB])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_rows_hold_what_was_written(make_cache: MakeCache, layout: str, page_bytes: int, mapper: str) -> None:
    cache = make_cache(layout=layout, page_bytes=page_bytes, mapper=mapper, max_seq_len=1500, memory_limit="200MiB")
    lens = dict.fromkeys((cache.alloc_reqid() for _ in range(3)), 0)
    for grow in (1, 700, 1, 790):
        for reqid, length in lens.items():
            lens[reqid] = min(length + grow + reqid, 1500)
        assert cache.step(lens)
        for reqid, length in lens.items():
            stamp(cache, reqid, 0, length, seed=reqid + 1)
    for reqid, length in lens.items():
        assert_stamped(cache, reqid, length, seed=reqid + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_freeing_one_request_leaves_the_others(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(
        num_layers=28, num_kv_heads=8, head_dim=4, dtype=torch.float32, max_seq_len=1000, page_bytes=4096, layout=layout
    )
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 1000, second: 1000})
    stamp(cache, first, 0, 1000, 1)
    stamp(cache, second, 0, 1000, 2)
    cache.free_reqid(first)
    cache.trim()
    assert_stamped(cache, second, 1000, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_real_and_follows_stats(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, mapper="sync")
    assert used_bytes(cache) == 0
    reqids = [cache.alloc_reqid() for _ in range(3)]
    for length in (1, 170, 171, 400):
        assert cache.step(dict.fromkeys(reqids, length))
        stats = cache.stats()
        assert used_bytes(cache) == stats.created_bytes == stats.mapped_bytes + stats.free_bytes
        assert stats.active_bytes >= 3 * cache.layout.bytes_for(length)
        assert stats.used_bytes == 3 * length * cache.layout.token_bytes
        assert stats.waste_bytes == stats.active_bytes - stats.used_bytes
    driver = cache.pool.driver
    for reqid in reqids:
        cache.free_reqid(reqid)
    assert cache.stats().idle_bytes == cache.stats().mapped_bytes > 0
    cache.trim()
    assert driver.used_bytes() == 0  # type: ignore[attr-defined]
    assert cache.stats().created_bytes == 0


def test_trim_leaves_what_lengths_need(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", lookahead_tokens=40)
    lens = {cache.alloc_reqid(): length for length in (400, 10, 200, 1)}
    assert cache.step(lens)
    for reqid in list(lens)[::-1]:
        cache.trim()
        expected = sum(map(cache.layout.bytes_for, lens.values()))
        assert cache.stats().mapped_bytes == cache.stats().created_bytes == used_bytes(cache) == expected
        cache.free_reqid(reqid)
        del lens[reqid]
    assert cache.trim() > 0
    assert cache.stats().created_bytes == 0


def test_step_is_false_without_side_effects_when_memory_is_short(make_cache: MakeCache) -> None:
    cache = make_cache(memory_limit=12 * 64 * KIB, max_seq_len=2000)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 400, second: 1})
    stamp(cache, first, 0, 400, 1)
    settle(cache)  # or handles created ahead would be counted as a side effect
    before, needed = cache.stats(), cache.pages_needed({first: 400, second: 1900})
    assert needed > cache.pages_available()
    assert cache.step({first: 400, second: 1900}) is False
    after = cache.stats()
    assert (after.mapped_bytes, after.created_bytes, after.used_bytes) == (
        before.mapped_bytes,
        before.created_bytes,
        before.used_bytes,
    )
    assert not after.last_step.ok
    assert_stamped(cache, first, 400, 1)
    cache.free_reqid(second)
    assert cache.step({first: 700}), "the freed request's pages are there for others"


def test_idle_slots_are_taken_back_when_needed(make_cache: MakeCache) -> None:
    cache = make_cache(memory_limit=10 * 64 * KIB, max_seq_len=2000, mapper="sync")
    first = cache.alloc_reqid()
    assert cache.step({first: 700})
    second = cache.alloc_reqid()
    cache.free_reqid(first)
    assert cache.pages_available() == 10
    assert cache.can_admit(800)
    assert cache.step({second: 800})
    assert cache.stats().pages_reclaimed > 0
    assert not cache.can_admit(1)
    assert cache.pages_available() == 0


def test_a_new_request_reuses_the_pages_of_its_slot(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    reqid = cache.alloc_reqid()
    cache.step({reqid: 300})
    mapped = cache.stats().pages_mapped
    cache.free_reqid(reqid)
    assert cache.alloc_reqid(300) == reqid
    assert cache.step({reqid: 300})
    assert cache.stats().pages_mapped == mapped
    assert cache.stats().pages_reused == mapped


def test_best_fit_over_real_slots(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", max_seq_len=4000, max_batch_size=3)
    small, large, empty = (cache.alloc_reqid() for _ in range(3))
    page = cache.layout.tokens_backed(1)
    cache.step({small: 3 * page, large: 10 * page})
    for reqid in (small, large, empty):
        cache.free_reqid(reqid)
    assert cache.alloc_reqid(2 * page) == small
    assert cache.alloc_reqid(20 * page) == large
    assert cache.alloc_reqid() == empty


def test_set_memory_limit_down_and_up(make_cache: MakeCache) -> None:
    cache = make_cache(memory_limit=24 * 64 * KIB, max_seq_len=4000, mapper="sync")
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 600, other: 600})
    cache.free_reqid(other)
    with pytest.raises(OutOfPagesError):
        cache.set_memory_limit(2 * 64 * KIB)
    assert cache.stats().memory_limit_bytes == 24 * 64 * KIB
    cache.set_memory_limit(8 * 64 * KIB)
    assert cache.stats().created_bytes <= 8 * 64 * KIB
    assert cache.step({reqid: 2000}) is False
    cache.set_memory_limit(24 * 64 * KIB)
    assert cache.step({reqid: 2000})


@pytest.mark.parametrize(("limit", "mib"), [(3 * MIB, 3), ("3MiB", 3), (0.25, 25), (1.0, 100), (None, 50)], ids=str)
@pytest.mark.parametrize("held", [False, True])
def test_set_memory_limit_takes_what_the_constructor_takes(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, limit: object, mib: int, held: bool
) -> None:
    """100 MiB are free for the cache; what it holds of them itself counts as free."""
    cache = make_cache(memory_limit=8 * MIB, mapper="sync")
    if held:
        assert cache.step({cache.alloc_reqid(): 400})
    free = MemoryInfo(100 * MIB - cache.stats().created_bytes, 200 * MIB)
    monkeypatch.setattr(cache.pool.driver, "memory_info", lambda: free)
    cache.set_memory_limit(limit)
    assert cache.stats().memory_limit_bytes == mib * MIB


def test_guard_rows_are_writable(make_cache: MakeCache) -> None:
    cache = make_cache(guard_tokens=50, max_seq_len=400, page_bytes=4096)
    reqid = cache.alloc_reqid()
    for length in (1, 9, 400):
        assert cache.step({reqid: length})
        k = cache.k(2)
        k.as_strided(
            (50, 2, 16), k.stride()[1:], k.storage_offset() + reqid * k.stride(0) + length * k.stride(1)
        ).fill_(1)


def test_two_caches_keep_their_own_options(make_cache: MakeCache) -> None:
    one = make_cache(page_bytes=64 * KIB, layout="sliced", memory_limit=4 * MIB)
    two = make_cache(page_bytes=2 * MIB, layout="per_layer", memory_limit=40 * MIB, dtype=torch.float16)
    for cache in (one, two):
        assert cache.step({cache.alloc_reqid(): 3})
        stamp(cache, 0, 0, 3, 1)
    one.close()
    assert_stamped(two, 0, 3, 1)
    assert (two.stats().page_bytes, two.stats().memory_limit_bytes) == (2 * MIB, 40 * MIB)


def test_caches_share_a_pool_and_its_limit(make_cache: MakeCache) -> None:
    one = make_cache(memory_limit=8 * 64 * KIB, mapper="sync")
    two = make_cache(pool=one.pool, memory_limit=None, page_bytes=None, mapper="sync")
    assert one.step({one.alloc_reqid(): 400})
    assert one.stats().mapped_bytes == 6 * 64 * KIB
    assert two.step({two.alloc_reqid(): 400}) is False
    assert two.step({0: 100})
    two.check_integrity()
    two.close()
    assert one.step({0: 400})
    with pytest.raises(ConfigError, match="page_bytes is 4096"):
        SlicedKVCache(
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            dtype="float32",
            max_batch_size=1,
            max_seq_len=9,
            page_bytes=4096,
            pool=one.pool,
        )


def test_reading_past_what_is_mapped_faults(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", lookahead_tokens=0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    beyond, keys = cache.layout.tokens_backed(1) + 1, cache.k(0)
    for token, mapped in ((9, True), (beyond, False)):
        row = keys[reqid, token]
        assert is_readable(row.data_ptr(), row.numel() * row.element_size()) is mapped


def test_twelve_tebibytes_cost_nothing() -> None:
    shape = {"num_layers": 60, "num_kv_heads": 4, "head_dim": 128, "dtype": torch.float16}
    with SlicedKVCache(**shape, max_batch_size=500, max_seq_len=200_000, device="cpu", page_bytes=2 * MIB) as cache:
        assert cache.layout.plane_bytes * 2 > 11 << 40
        assert used_bytes(cache) == 0
        reqids = [cache.alloc_reqid() for _ in range(500)]
        assert cache.step({reqids[-1]: 3})
        stamp(cache, reqids[-1], 0, 3, 0)
        assert_stamped(cache, reqids[-1], 3, 0)
        cache.check_integrity()


def test_views_have_the_promised_shapes_and_safe_reprs(make_cache: MakeCache) -> None:
    shapes = {"sliced": (6, 400, 3, 2, 16), "interleaved": (6, 400, 3, 2, 2, 16), "per_layer": (6, 400, 2, 16)}
    for layout, shape in shapes.items():
        cache = make_cache(layout=layout)
        assert [plane.shape for plane in cache.kv_tensors] == [shape] * cache.layout.num_planes
        assert cache.k(1).shape == cache.v(1).shape == (6, 400, 2, 16)
        assert cache.k(1).stride() == cache.v(1).stride()
        for shown in (cache, cache.k(0), cache.kv_tensors, cache.stats(), cache.pool):
            assert repr(shown)
            assert str(shown)


def test_pool_that_is_not_a_multiple_of_the_granularity_is_refused(make_cache: MakeCache) -> None:
    driver = make_cache().pool.driver
    with pytest.raises(ConfigError, match="multiple of 4096"):
        PagePool(driver, page_bytes=5000, memory_limit=MIB)


@pytest.mark.parametrize("column", ["longest", "backed", "trigger", "shared", "_last"])
def test_lengths_of_an_idle_slot_are_found(open_cache: Callable[..., Any], column: str) -> None:
    """A request that came to this slot would begin with tokens it never had."""
    cache, _, _ = open_cache(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    cache.free_reqid(reqid)
    cache.check_integrity()
    lengths = lengths_of(cache)
    getattr(lengths, column)[reqid] = 7
    with pytest.raises(StateError, match=f"slot {reqid} is idle but has lengths"):
        cache.check_integrity()
    getattr(lengths, column)[reqid] = 0
    cache.check_integrity()
