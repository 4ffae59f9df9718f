"""Requests that share a prefix and move to host memory: their rows go and come back whole, and sharers keep theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from inside import shares_pages, working
from rig import assert_stamped, mapped, settle, stamp, used_bytes, wait_until

from slicedkv import SlicedKVCache, StateError

KIB = 1 << 10
LAYOUTS = ("sliced", "interleaved", "per_layer")
WIDE = {"head_dim": 64, "max_seq_len": 1500, "extent_pages": 1}
"""With these 1,310 tokens fill some pages in every layout."""
PREFIX = 1310

MakeCache = Callable[..., SlicedKVCache]


def begin(cache: SlicedKVCache, seq_len: int, seed: int) -> int:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: seq_len})
    stamp(cache, reqid, 0, seq_len, seed)
    return reqid


def begin_sharers(cache: SlicedKVCache) -> tuple[int, int]:
    """A request, and one that has its prefix and some tokens of its own."""
    source = begin(cache, PREFIX, seed=1)
    (child,) = cache.fork(source)
    assert cache.step({child: 1400})
    stamp(cache, child, PREFIX, 1400, seed=2)
    assert cache.stats().saved_bytes > 0
    return source, child


def assert_source(cache: SlicedKVCache, reqid: int) -> None:
    assert_stamped(cache, reqid, PREFIX, seed=1)


def assert_child(cache: SlicedKVCache, reqid: int) -> None:
    assert_stamped(cache, reqid, PREFIX, seed=1)
    assert_stamped(cache, reqid, 1400, seed=2, start=PREFIX)


def assert_alone(cache: SlicedKVCache, reqid: int) -> None:
    """A request may write its first row without a copy of anything."""
    copied = cache.stats().pages_copied
    assert not shares_pages(cache, reqid)
    assert cache.step({reqid: 1})
    assert cache.step({reqid: 2})
    assert cache.stats().pages_copied == copied


@pytest.mark.parametrize("who", ["source", "child"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_on_reuse", [False, True])
def test_a_sharer_goes_and_comes_back_alone(
    make_cache: MakeCache, who: str, mapper: str, layout: str, zero_on_reuse: bool
) -> None:
    cache = make_cache(layout=layout, mapper=mapper, zero_on_reuse=zero_on_reuse, **WIDE)
    source, child = begin_sharers(cache)
    goes, stays = (source, child) if who == "source" else (child, source)
    check_goes, check_stays = (assert_source, assert_child) if who == "source" else (assert_child, assert_source)
    handle = cache.swap_out(goes)
    assert handle.seq_len == (PREFIX if who == "source" else 1400)
    stats = cache.stats()
    assert stats.saved_bytes == 0
    assert stats.used_bytes == (1400 if who == "source" else PREFIX) * cache.layout.token_bytes
    check_stays(cache, stays)
    cache.trim()
    assert mapped(cache, goes) == 0
    assert cache.stats().shared_bytes == 0
    check_stays(cache, stays)
    back = cache.swap_in(handle)
    assert back is not None
    check_goes(cache, back)
    cache.check_integrity()
    assert_alone(cache, back)
    stamp(cache, back, 0, 2, seed=5)
    check_stays(cache, stays)
    if zero_on_reuse:
        assert cache.step({back: 1500})
        assert not cache.k(0)[back, handle.seq_len :].any()
        assert not cache.v(2)[back, handle.seq_len :].any()


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_a_sharer_may_end_while_another_is_on_its_way_out(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, mapper: str
) -> None:
    cache = make_cache(mapper=mapper, **WIDE)
    source, child = begin_sharers(cache)
    driver = cache.pool.driver
    copy_batch = driver.copy_batch

    def end_first(copies: Any) -> Any:
        cache.free_reqid(source)
        late.start()
        return copy_batch(copies)

    refused: list[str] = []

    def free_late() -> None:
        with pytest.raises(StateError, match=f"reqid {child} is not active"):
            cache.free_reqid(child)
        refused.append("it left")

    late = threading.Thread(target=free_late)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "copy_batch", end_first)
        handle = cache.swap_out(child)
    late.join(5)
    assert refused == ["it left"]
    cache.trim()
    assert cache.stats().mapped_bytes == 0
    back = cache.swap_in(handle)
    assert back is not None
    assert_child(cache, back)
    assert_alone(cache, back)
    cache.check_integrity()


def test_what_came_back_can_be_shared_again(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", **WIDE)
    source, child = begin_sharers(cache)
    back = cache.swap_in(cache.swap_out(child))
    assert back is not None
    grandchildren = cache.fork(back, 2)
    cache.free_reqid(source)
    for reqid in (back, *grandchildren):
        assert_child(cache, reqid)
    handles = [cache.swap_out(reqid) for reqid in (grandchildren[0], back)]
    assert_child(cache, grandchildren[1])
    for handle in handles:
        reqid = cache.swap_in(handle)
        assert reqid is not None
        assert_child(cache, reqid)


def test_the_length_of_the_last_step_comes_back_too(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", **WIDE)
    other = begin(cache, 700, seed=3)
    reqid = begin(cache, PREFIX, seed=1)
    assert cache.step({reqid: 600, other: 700})
    handle = cache.swap_out(reqid)
    assert cache.step({other: 750})
    back, target = cache.swap_in(handle), cache.alloc_reqid()
    assert back is not None
    with pytest.raises(StateError, match=f"reqid {back} has 600 tokens; share at most those"):
        cache.share_prefix(back, target, 601)
    assert cache.share_prefix(back, target, 600)
    assert cache.share_prefix(other, cache.alloc_reqid(), 750), "that of the others is as it was"
    assert_stamped(cache, target, 600, seed=1)
    assert_stamped(cache, back, PREFIX, seed=1)


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_on_reuse", [False, True])
@pytest.mark.parametrize("extent_pages", [1, 4])
def test_all_sharers_leave_and_come_back_alone(
    make_cache: MakeCache, mapper: str, layout: str, zero_on_reuse: bool, extent_pages: int
) -> None:
    shape = WIDE | {"extent_pages": extent_pages}
    cache = make_cache(layout=layout, mapper=mapper, zero_on_reuse=zero_on_reuse, **shape)
    source = begin(cache, PREFIX, seed=1)
    children = cache.fork(source, 2)
    alone, freed = begin(cache, 300, seed=4), cache.fork(source)[0]
    cache.free_reqid(freed)
    tokens = 3 * PREFIX + 300
    cache.pause(offload=True)
    stats = cache.stats()
    gone = (stats.created_bytes, stats.mapped_bytes, stats.used_bytes, stats.waste_bytes, stats.saved_bytes)
    assert gone == (0, 0, 0, 0, 0)
    assert stats.swapped_bytes >= tokens * cache.layout.token_bytes, "each has all its rows there"
    assert used_bytes(cache) == 0
    cache.check_integrity()
    cache.resume()
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.saved_bytes, stats.shared_bytes, stats.swapped_bytes) == (0, 0, 0)
    assert stats.used_bytes == tokens * cache.layout.token_bytes
    for reqid in (source, *children):
        assert_source(cache, reqid)
    assert_stamped(cache, alone, 300, seed=4)
    for reqid in (source, *children):
        assert_alone(cache, reqid)
        stamp(cache, reqid, 0, 2, seed=6 + reqid)
    for reqid in (source, *children):
        assert_stamped(cache, reqid, 2, seed=6 + reqid)
        assert_stamped(cache, reqid, PREFIX, seed=1, start=2)


def test_without_offload_active_requests_go_on_sharing(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", lookahead_tokens=300, **WIDE)
    source, child = begin_sharers(cache)
    idle = cache.fork(source)[0]
    cache.free_reqid(idle)
    saved = cache.stats().saved_bytes
    cache.pause()
    stats = cache.stats()
    assert (stats.created_bytes, stats.mapped_bytes, stats.idle_bytes) == (stats.active_bytes, stats.active_bytes, 0)
    assert (stats.saved_bytes, stats.lookahead_bytes) == (saved, 0)
    assert_source(cache, source)
    assert_child(cache, child)
    cache.resume()
    assert cache.stats().saved_bytes == saved
    assert cache.step({child: 1})
    assert cache.step({child: 3})
    assert cache.stats().pages_copied > 0
    stamp(cache, child, 1, 3, seed=7)
    assert_source(cache, source)
    assert_stamped(cache, child, PREFIX, seed=1, start=3)


def test_everything_at_once_from_many_threads(make_cache: MakeCache) -> None:
    """Threads fork, write, swap and free while another pauses and resumes; every row is what its request wrote."""
    cache = make_cache(max_batch_size=16, **WIDE)
    source = begin(cache, PREFIX, seed=1)
    failures: list[BaseException] = []
    rounds = [0] * 4

    def again(call: Callable[..., Any], *arguments: Any) -> Any:
        """Call until the cache is not paused."""
        while True:
            try:
                return call(*arguments)
            except StateError as error:
                if "paused" not in str(error):
                    raise
                time.sleep(0.0005)

    def overwrite(reqid: int, seed: int) -> None:
        # With the work token, so that no pause takes the pages away meanwhile.
        with working(cache):
            stamp(cache, reqid, 1, 3, seed)

    def compare(reqid: int, seed: int) -> None:
        with working(cache):
            assert_stamped(cache, reqid, 1, seed=1)
            assert_stamped(cache, reqid, 3, seed, start=1)
            assert_stamped(cache, reqid, PREFIX, seed=1, start=3)

    def work(seed: int) -> None:
        try:
            while time.monotonic() < end:
                (reqid,) = again(cache.fork, source)
                for length in (1, 3):
                    assert again(cache.step, {reqid: length})
                again(overwrite, reqid, seed)
                back = again(cache.swap_in, again(cache.swap_out, reqid))
                again(compare, back, seed)
                again(cache.free_reqid, back)
                rounds[seed - 10] += 1
        except BaseException as error:
            failures.append(error)

    end = time.monotonic() + 3
    threads = [threading.Thread(target=work, args=(10 + index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    offload = False
    while time.monotonic() < end:
        cache.pause(offload=offload)
        stats = cache.stats()
        assert min(stats.active_bytes, stats.idle_bytes, stats.used_bytes, stats.waste_bytes, stats.saved_bytes) >= 0
        cache.resume()
        offload = not offload
        time.sleep(0.01)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures
    assert min(rounds) > 0
    assert_source(cache, source)
    settle(cache)
    cache.check_integrity()
    cache.free_reqid(source)
    wait_until(lambda: cache.trim() == cache.stats().created_bytes == 0)
