"""`truncate`: a request goes on from an earlier token, and the pages behind come back when the device is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from inside import fence_of, shared_end, truncate_inside
from rig import QUIET, TOKENS, Rig, assert_stamped, mapped, settle, stamp, wait_until

from slicedkv import ConfigError, SlicedKVCache, StateError

MakeCache = Callable[..., SlicedKVCache]


@pytest.mark.parametrize("seq_len", [0, 1, TOKENS, TOKENS + 1, 4000])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_what_lies_behind_comes_back(rig: Rig, seq_len: int, mapper: str) -> None:
    cache = rig.open(mapper=mapper, lookahead_tokens=0, reclaim_watermark=0.0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 4000})
    available = cache.pages_available()
    cache.truncate(reqid, seq_len)
    pages = cache.layout.pages_for(seq_len)
    freed = (cache.layout.pages_for(4000) - pages) * cache.layout.num_planes
    assert cache.pages_available() == available + freed
    settle(cache)
    stats = cache.stats()
    assert (mapped(cache, reqid), stats.mapped_bytes) == (pages, cache.layout.bytes_for(seq_len))
    assert (cache.seq_len(reqid), stats.used_bytes) == (seq_len, seq_len * cache.layout.token_bytes)
    cache.check_integrity()
    assert cache.step({reqid: 4000})
    cache.close()


def test_rows_that_are_kept_stay_and_the_rest_is_written_anew(make_cache: MakeCache) -> None:
    cache = make_cache(max_seq_len=4000)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 3000})
    stamp(cache, reqid, 0, 3000, seed=1)
    cache.truncate(reqid, 500)
    settle(cache)
    assert cache.step({reqid: 3000})
    stamp(cache, reqid, 500, 3000, seed=2)
    assert_stamped(cache, reqid, 500, seed=1)
    assert_stamped(cache, reqid, 3000, seed=2, start=500)


def test_nothing_is_unmapped_under_work_that_was_queued_before(rig: Rig) -> None:
    cache = rig.open(lookahead_tokens=0, reclaim_watermark=0.0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10 * TOKENS})
    rig.fake.hold_fences = True
    cache.truncate(reqid, TOKENS)
    settle(cache)
    assert mapped(cache, reqid) == 10
    assert cache.step({reqid: 2 * TOKENS}), "it goes on meanwhile"
    rig.fake.finish_fences()
    wait_until(lambda: mapped(cache, reqid) == 2)
    cache.close()


def test_it_waits_in_need_for_that_work_only(rig: Rig) -> None:
    """Another request takes the pages: behind the fence, and before anything that is needed."""
    cache = rig.open(**QUIET)
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 10 * TOKENS})
    cache.set_memory_limit(cache.stats().mapped_bytes)
    rig.fake.hold_fences = True
    cache.truncate(reqid, TOKENS)
    unmapped: list[bool] = []
    fence = fence_of(cache, reqid)
    rig.driver.on_call = lambda op, args: unmapped.append(fence.done) if op == "unmap" else None
    rig.fake.hold_fences = False
    rig.fake.finish_fences()
    assert cache.step({other: 9 * TOKENS})
    assert unmapped
    assert all(unmapped)
    assert not cache.step({other: 10 * TOKENS})
    cache.close()


@pytest.mark.parametrize("writer", ["cut", "other"])
@pytest.mark.parametrize(("extent_pages", "left"), [(1, 5), (16, 16)])
def test_shared_pages_stay_with_the_others(make_cache: MakeCache, writer: str, extent_pages: int, left: int) -> None:
    """Of an extent that is needed in part all stays: it cannot be split."""
    cache = make_cache(max_seq_len=4000, mapper="sync", lookahead_tokens=0, extent_pages=extent_pages)
    source = cache.alloc_reqid()
    assert cache.step({source: 3000})
    stamp(cache, source, 0, 3000, seed=1)
    (child,) = cache.fork(source)
    cache.truncate(child, 700)
    cache.check_integrity()
    assert_stamped(cache, source, 3000, seed=1)
    assert cache.stats().used_bytes == cache.layout.token_bytes * 3000
    cache.step({cache.alloc_reqid(): 1})
    assert mapped(cache, child) == left
    writing, reading = (child, source) if writer == "cut" else (source, child)
    assert cache.step({writing: 600})
    assert cache.step({writing: 800})
    stamp(cache, writing, 600, 800, seed=2)
    assert_stamped(cache, reading, 700, seed=1)
    cache.check_integrity()


def test_a_step_before_the_pages_are_gone_never_writes_what_others_share(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (child,) = cache.fork(source)
    rig.fake.hold_fences = True
    cache.truncate(child, 5)
    assert mapped(cache, child) == 4
    cache.check_integrity()
    rig.fake.finish_fences()
    rig.fake.hold_fences = False
    assert cache.step({child: 3 * TOKENS})
    assert cache.stats().pages_copied + cache.stats().pages_growth >= 3 * cache.layout.num_planes
    assert shared_end(cache, child) == 0
    cache.check_integrity()
    cache.close()


def test_what_others_copy_from_stays_until_it_is_copied(make_cache: MakeCache) -> None:
    """A step takes margin back where memory is short, but not the pages that it copies."""
    options = {"max_seq_len": 4000, "extent_pages": 1, "lookahead_tokens": 0, "reclaim_watermark": 0.0}
    cache = make_cache(mapper="sync", **options)
    source, old = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 3000, old: 3000})
    stamp(cache, source, 0, 3000, seed=1)
    (child,) = cache.fork(source)
    cache.free_reqid(old)
    assert cache.step({child: 1})
    cache.set_memory_limit(cache.stats().mapped_bytes)
    with cache.pool.gate.work("keeping the pages mapped"):
        truncate_inside(cache, source, 5)
    assert mapped(cache, source) == cache.layout.pages_for(3000)
    assert cache.step({child: 3000})
    assert_stamped(cache, source, 5, seed=1)
    assert_stamped(cache, child, 3000, seed=1)
    assert cache.stats().pages_copied > 0


def test_what_was_asked_for_ahead_is_forgotten(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    reqid = cache.alloc_reqid(2000)
    assert cache.step({reqid: 10})
    assert mapped(cache, reqid) == cache.layout.pages_for(2000)
    cache.truncate(reqid, 10)
    assert mapped(cache, reqid) == 1
    cache.close()


def test_lookahead_keeps_its_page(rig: Rig) -> None:
    cache = rig.open(mapper="sync", lookahead_tokens=TOKENS, reclaim_watermark=0.0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10 * TOKENS})
    cache.truncate(reqid, 2 * TOKENS)
    assert mapped(cache, reqid) == 3
    cache.close()


def test_a_swap_moves_what_is_left(make_cache: MakeCache) -> None:
    cache = make_cache(max_seq_len=4000)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 3000})
    stamp(cache, reqid, 0, 3000, seed=1)
    cache.truncate(reqid, 100)
    handle = cache.swap_out(reqid)
    assert handle.seq_len == 100
    back = cache.swap_in(handle)
    assert back is not None
    assert_stamped(cache, back, 100, seed=1)


def test_refusals_change_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rig.open(**QUIET)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    assert cache.step({reqid: 60})
    before = cache.stats()
    for arguments, error, match in (
        ((reqid, 61), StateError, "has 60 tokens, seq_len is 61"),
        ((reqid, -1), ConfigError, "seq_len is -1"),
        ((reqid, 1.5), ConfigError, "seq_len is 1.5"),
        ((99, 1), ConfigError, "reqid is 99"),
        ((1 - reqid, 0), StateError, "is not active"),
    ):
        with pytest.raises(error, match=match):
            cache.truncate(*arguments)  # type: ignore[arg-type]

    def refuse() -> None:
        raise StateError("the current stream captures")

    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "record_fence", refuse)
        with pytest.raises(StateError, match="captures"):
            cache.truncate(reqid, 5)
    assert cache.stats() == before
    assert cache.seq_len(reqid) == 60
    with pytest.raises(StateError, match="is not active"):
        cache.seq_len(1 - reqid)
    cache.close()
