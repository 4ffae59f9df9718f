"""`share_prefix` and `fork` on real host memory: one page, many requests, and each goes its own way (cases D2, D3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rig import assert_stamped, mapped, stamp, used_bytes, wait_until

from slicedkv import ConfigError, OutOfPagesError, OutOfSlotsError, SlicedKVCache, StateError
from slicedkv.attention import Batch, open_backend

KIB, MIB = 1 << 10, 1 << 20
MakeCache = Callable[..., SlicedKVCache]
LAYOUTS = ("sliced", "interleaved", "per_layer")
WIDE: dict[int, dict[str, int]] = {
    64 * KIB: {"head_dim": 64},
    2 * MIB: {"num_kv_heads": 8, "head_dim": 256},
}
"""Heads with which 1,500 tokens fill some pages in every layout, and rows straddle pages in some."""


def totals(cache: SlicedKVCache) -> tuple[Any, ...]:
    stats = cache.stats()
    mappings = [mapped(cache, reqid) for reqid in range(cache.layout.max_batch_size)]
    return (
        stats.used_bytes,
        stats.active_bytes,
        stats.saved_bytes,
        stats.active_slots,
        cache.pages_available(),
        mappings,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_bytes", [64 * KIB, 2 * MIB])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_sharers_append_and_end_on_their_own(make_cache: MakeCache, layout: str, page_bytes: int, mapper: str) -> None:
    shape = WIDE[page_bytes] | {"max_seq_len": 1500, "memory_limit": "400MiB", "extent_pages": 1}
    cache = make_cache(layout=layout, page_bytes=page_bytes, mapper=mapper, **shape)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 1310})
    stamp(cache, source, 0, 1310, seed=1)
    assert cache.share_prefix(source, target, 1300)
    assert cache.stats().saved_bytes == cache.layout.whole_pages(1300) * cache.layout.num_planes * page_bytes > 0
    assert_stamped(cache, target, 1300, seed=1)
    assert cache.step({source: 1400, target: 1450})
    stamp(cache, source, 1310, 1400, seed=1)
    stamp(cache, target, 1300, 1450, seed=2)
    assert cache.stats().pages_copied == 0, "what is appended lies behind what is shared"
    assert_stamped(cache, source, 1400, seed=1)
    assert_stamped(cache, target, 1300, seed=1)
    assert_stamped(cache, target, 1450, seed=2, start=1300)
    cache.free_reqid(source)
    cache.trim()
    assert_stamped(cache, target, 1300, seed=1)
    assert (cache.stats().idle_bytes, cache.stats().saved_bytes) == (0, 0)
    cache.free_reqid(target)
    wait_until(lambda: cache.trim() == cache.stats().created_bytes == used_bytes(cache) == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_counted_once_and_real(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, mapper="sync", max_seq_len=1500, extent_pages=1, lookahead_tokens=0)
    source = cache.alloc_reqid()
    assert cache.step({source: 1200})
    for count in range(1, 6):
        (reqid,) = cache.fork(source)
        stats, layout_ = cache.stats(), cache.layout
        own = layout_.pages_for(1200) - layout_.whole_pages(1200)
        pages = (layout_.pages_for(1200) + count * own) * layout_.num_planes
        assert used_bytes(cache) == stats.mapped_bytes == stats.active_bytes == pages * stats.page_bytes
        assert stats.saved_bytes == count * layout_.whole_pages(1200) * layout_.num_planes * stats.page_bytes
        assert stats.shared_bytes == layout_.whole_pages(1200) * layout_.num_planes * stats.page_bytes
        assert stats.used_bytes + stats.saved_bytes == (count + 1) * 1200 * layout_.token_bytes
        assert stats.waste_bytes == stats.active_bytes - stats.used_bytes == (count + 1) * layout_.waste_bytes(1200)
        assert stats.pages_shared == stats.saved_bytes // stats.page_bytes
        assert cache.trim() == 0, "nothing shared by active requests may go"
        assert mapped(cache, reqid) == layout_.pages_for(1200)
    for reqid in range(5):
        cache.free_reqid(reqid)
    cache.trim()
    assert used_bytes(cache) == cache.stats().active_bytes == cache.layout.bytes_for(1200)
    assert (cache.stats().saved_bytes, cache.stats().shared_bytes) == (0, 0)


def test_only_whole_extents_are_shared(make_cache: MakeCache) -> None:
    cache = make_cache(extent_pages=4, mapper="sync", max_seq_len=4000, lookahead_tokens=0)
    tokens = cache.layout.tokens_backed(10)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: tokens})
    stamp(cache, source, 0, tokens, seed=1)
    inside = cache.layout.tokens_backed(7)
    assert cache.share_prefix(source, target, inside)
    assert cache.stats().pages_shared == 4 * cache.layout.num_planes, "the second extent ends behind the prefix"
    assert_stamped(cache, target, inside, seed=1)
    assert cache.fork(source)
    assert cache.stats().pages_shared == (4 + 9) * cache.layout.num_planes, "two extents and a page; half a page is not"
    cache.free_reqid(source)
    assert cache.step({target: inside + 5})
    assert_stamped(cache, target, inside, seed=1)


def test_pages_of_the_last_request_give_way(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", max_seq_len=1500, max_batch_size=2, extent_pages=1, lookahead_tokens=0)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 1000, other: 1500})
    stamp(cache, source, 0, 1000, seed=1)
    stamp(cache, other, 0, 1500, seed=7)
    cache.free_reqid(other)
    assert cache.alloc_reqid(1200) == other, "with 1,200 tokens asked for"
    assert cache.share_prefix(source, other, 900)
    assert_stamped(cache, other, 900, seed=1)
    assert mapped(cache, other) == cache.layout.pages_for(1200), "what was asked for ahead comes again"
    assert cache.stats().saved_bytes > 0
    assert cache.step({other: 1500})
    assert_stamped(cache, other, 900, seed=1)


def test_a_prefix_within_the_first_page_is_copied(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 9})
    stamp(cache, source, 0, 9, seed=1)
    assert cache.share_prefix(source, target, 9)
    assert_stamped(cache, target, 9, seed=1)
    stamp(cache, source, 0, 9, seed=3)
    assert_stamped(cache, target, 9, seed=1)
    assert cache.stats().saved_bytes == 0


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_generations_of_forks_end_in_any_order(make_cache: MakeCache, mapper: str) -> None:
    cache = make_cache(mapper=mapper, max_seq_len=1500, max_batch_size=12, extent_pages=2)
    draw = random.Random(5)
    root = cache.alloc_reqid()
    assert cache.step({root: 700})
    stamp(cache, root, 0, 700, seed=0)
    writes = {root: torch.zeros(700, 1, 1, dtype=torch.int64)}  # which write each row holds
    for seed in range(1, 120):
        parent = draw.choice(list(writes))
        if len(writes) + 2 <= 12 and draw.random() < 0.6:
            for child in cache.fork(parent, 2):
                writes[child] = writes[parent]
        elif len(writes) > 1:
            cache.free_reqid(parent)
            del writes[parent]
        for reqid in draw.sample(list(writes), (len(writes) + 1) // 2):
            end = len(writes[reqid])
            if end < 1490:
                assert cache.step({reqid: end + 7})
                stamp(cache, reqid, end, end + 7, seed)
                writes[reqid] = torch.cat((writes[reqid], torch.full((7, 1, 1), seed)))
        cache.check_integrity()
        for reqid, written in writes.items():
            assert_stamped(cache, reqid, len(written), written)
    for reqid in writes:
        cache.free_reqid(reqid)
    cache.trim()
    assert used_bytes(cache) == 0


def test_what_cannot_be_shared_is_refused_and_nothing_changes(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    source, busy, fresh = (cache.alloc_reqid() for _ in range(3))
    assert cache.step({source: 300, busy: 1})
    assert cache.step({source: 250}), "shorter now"
    before = totals(cache)
    refused: list[tuple[type[Exception], str, str, tuple[Any, ...]]] = [
        (ConfigError, "src and dst are both reqid 0", "share_prefix", (source, source, 5)),
        (ConfigError, r"num_tokens is 0; it must be in \[1, 400\]", "share_prefix", (source, fresh, 0)),
        (ConfigError, "num_tokens is 401", "share_prefix", (source, fresh, 401)),
        (ConfigError, "num_tokens is 2.5", "share_prefix", (source, fresh, 2.5)),
        (ConfigError, "reqid is 6", "share_prefix", (source, 6, 5)),
        (StateError, "reqid 1 has 1 tokens already", "share_prefix", (source, busy, 5)),
        (StateError, "num_tokens is 251, but reqid 0 has 250 tokens", "share_prefix", (source, fresh, 251)),
        (StateError, "reqid 4 is not active", "share_prefix", (4, fresh, 5)),
        (StateError, "reqid 4 is not active", "share_prefix", (source, 4, 5)),
        (StateError, "reqid 5 is not active", "fork", (5,)),
        (ConfigError, "n is 0", "fork", (source, 0)),
        (OutOfSlotsError, "4 slots needed, 3 of 6 are idle", "fork", (source, 4)),
    ]
    for kind, message, name, arguments in refused:
        with pytest.raises(kind, match=message):
            getattr(cache, name)(*arguments)
        assert totals(cache) == before
        cache.check_integrity()


def test_short_memory_is_false_or_raised_and_nothing_changes(make_cache: MakeCache) -> None:
    limit = 10 * 64 * KIB
    cache = make_cache(mapper="sync", max_seq_len=1500, extent_pages=1, lookahead_tokens=0, memory_limit=limit)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 800}), "all ten pages"
    stamp(cache, source, 0, 800, seed=1)
    before = totals(cache)
    assert cache.share_prefix(source, target, 800) is False
    with pytest.raises(OutOfPagesError, match="4 pages of 65536 bytes needed, 0 can be had"):
        cache.fork(source, 2)
    assert totals(cache) == before
    cache.set_memory_limit(12 * 64 * KIB)
    with pytest.raises(OutOfPagesError):
        cache.fork(source, 2)
    assert cache.stats().active_slots == 2
    assert cache.share_prefix(source, target, 800)
    assert_stamped(cache, target, 800, seed=1)


def test_fork_of_a_request_without_tokens(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    assert cache.fork(cache.alloc_reqid(), 3) == [1, 2, 3]
    assert cache.step(dict.fromkeys(range(4), 5))


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_zeroing_spares_what_is_shared(make_cache: MakeCache, mapper: str) -> None:
    cache = make_cache(mapper=mapper, zero_on_reuse=True, max_seq_len=1536, extent_pages=1, max_batch_size=3)
    dirty = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step(dict.fromkeys(dirty, 1536))
    for reqid in dirty:
        stamp(cache, reqid, 0, 1536, seed=9)
        cache.free_reqid(reqid)
    source = cache.alloc_reqid()
    assert cache.step({source: 1000})
    stamp(cache, source, 0, 1000, seed=1)
    target = cache.alloc_reqid()
    assert cache.share_prefix(source, target, 1000)
    backed = cache.layout.tokens_backed(cache.layout.pages_for(1000))
    assert not cache.k(1)[target, 1000:backed].any(), "pages that came with the copy hold nothing of others"
    assert cache.step({target: 1200})
    assert_stamped(cache, target, 1000, seed=1)
    assert not cache.v(2)[target, 1000:1200].any()
    cache.free_reqid(source)
    for _ in range(2):
        other = cache.alloc_reqid()
        assert cache.step({other: 1536})
        assert not cache.k(0)[other, :1536].any()
        stamp(cache, other, 0, 1536, seed=4)
        cache.step({target: 1200})
        assert_stamped(cache, target, 1000, seed=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_a_shared_prefix_equals_unshared(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, mapper="sync", head_dim=64, max_seq_len=1500, extent_pages=1)
    source, alone, shared = (cache.alloc_reqid() for _ in range(3))
    assert cache.step({source: 1300, alone: 1300})
    for layer in range(3):
        for view in (cache.k(layer), cache.v(layer)):
            view[alone, :1300] = view[source, :1300].normal_()
    assert cache.share_prefix(source, shared, 1300)
    assert cache.stats().saved_bytes > 0
    assert cache.step({shared: 1340, alone: 1340})
    backend = open_backend("sdpa", cache, num_qo_heads=4)
    backend.plan(Batch([shared, alone], [40, 40], [1340, 1340]))
    for layer in range(3):
        k, v, q = (torch.randn(40, heads, 64).repeat(2, 1, 1) for heads in (2, 2, 4))
        backend.append(layer, k, v)
        out = backend.run(layer, q)
        assert torch.equal(out[:40], out[40:])
