"""Sharing and work of the device: nothing is unmapped, handed on or replaced under it (cases B1, B2, D1)."""

from __future__ import annotations

import threading

import pytest
from inside import fence_of, shares_pages
from rig import QUIET, TOKENS, Rig, mapped, settle, wait_until

from slicedkv import StateError

SHARED = 4 * TOKENS + 5


def test_old_pages_give_way_only_when_the_last_requests_work_is_done(rig: Rig) -> None:
    cache = rig.open(max_batch_size=2, **QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED, target: SHARED})
    rig.fake.hold_fences = True
    cache.free_reqid(target)
    (fence,) = rig.fake.fences[-1:]
    assert cache.alloc_reqid() == target
    done: list[bool] = []
    rig.driver.on_call = lambda op, args: done.append(fence.done) if op == "unmap" else None
    timer = threading.Timer(0.05, rig.fake.finish_fences)
    timer.start()
    assert cache.share_prefix(source, target, SHARED)
    timer.join()
    assert done == [True] * cache.layout.num_planes
    rig.fake.finish_fences()
    cache.close()


def test_a_fork_without_tokens_does_not_get_shared_pages(rig: Rig) -> None:
    cache = rig.open(max_batch_size=3, **QUIET)
    source, empty = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    (child,) = cache.fork(source)
    rig.fake.hold_fences = True
    cache.free_reqid(child)
    assert shares_pages(cache, child), "its work is not over"
    timer = threading.Timer(0.05, rig.fake.finish_fences)
    timer.start()
    assert cache.fork(empty) == [child]
    timer.join()
    assert mapped(cache, child) == 0
    cache.check_integrity()
    assert cache.step({source: 1, child: 1})
    assert cache.step({source: 2})
    assert cache.stats().pages_copied == 0
    rig.fake.finish_fences()
    cache.close()


def test_a_page_goes_back_when_the_last_mapping_is_gone_and_each_work_done(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    reqids = [source, *cache.fork(source, 2)]
    rig.fake.hold_fences = True
    for reqid in reqids:
        cache.free_reqid(reqid)
    fences = [fence_of(cache, reqid) for reqid in reqids]
    assert [mapped(cache, reqid) for reqid in reqids] == [4, 4, 4]
    for count, fence in enumerate(fences[:2], 1):
        fence.done = True  # type: ignore[union-attr]
        cache.free_reqid(cache.alloc_reqid())  # any call lets the mapper look
        assert [mapped(cache, reqid) for reqid in reqids] == [0] * count + [4] * (3 - count)
        assert (cache.stats().free_bytes, cache.stats().idle_bytes) == (0, 8 * cache.layout.page_bytes)
        cache.check_integrity()
    assert mapped(cache, reqids[2]) == 4, "nobody shares them now: they are there for the next request"
    rig.fake.finish_fences()
    assert cache.trim() == 8 * cache.layout.page_bytes
    cache.close()


def test_the_thread_parts_idle_sharers_when_their_work_is_done(rig: Rig) -> None:
    cache = rig.open(lookahead_tokens=0, reclaim_watermark=0.0)
    source = cache.alloc_reqid()
    assert cache.step({source: SHARED})
    (target,) = cache.fork(source)
    rig.fake.hold_fences = True
    cache.free_reqid(source)
    settle(cache)
    assert mapped(cache, source) == 5
    rig.fake.finish_fences()
    wait_until(lambda: mapped(cache, source) == 0)
    assert mapped(cache, target) == 5
    cache.close()


def test_a_new_request_never_gets_pages_that_are_shared(rig: Rig) -> None:
    cache = rig.open(max_batch_size=3, **QUIET)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    (target,) = cache.fork(source)
    rig.fake.hold_fences = True
    cache.free_reqid(source)
    cache.free_reqid(other)
    assert cache.alloc_reqid(SHARED) == other, "the empty slot is better than one full of pages that others use"
    timer = threading.Timer(0.05, rig.fake.finish_fences)
    timer.start()
    before = cache.stats().pages_reused
    assert cache.alloc_reqid() == source, "the last slot: its pages go first, when its work is done"
    timer.join()
    assert (mapped(cache, source), cache.stats().pages_reused) == (0, before)
    assert cache.step({source: 2 * TOKENS, target: SHARED + 1})
    assert cache.stats().saved_bytes == 0
    rig.fake.finish_fences()
    cache.close()


def test_freeing_on_another_stream_waits_for_a_copy(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    rig.fake.hold_fences = True
    rig.fake.current_stream = "copies"
    assert cache.share_prefix(source, target, SHARED)
    copied = fence_of(cache, source)
    assert copied is not None
    rig.fake.current_stream = "frees"
    rig.fake.ordered.clear()
    cache.free_reqid(source)
    assert rig.fake.ordered == [("frees", copied)]
    rig.fake.finish_fences()
    cache.close()


def test_a_stream_that_is_captured_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    before = cache.stats()

    def refuse() -> None:
        raise StateError("a fence cannot be recorded while the current stream captures")

    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "record_fence", refuse)
        for call in (lambda: cache.share_prefix(source, target, SHARED), lambda: cache.fork(source)):
            with pytest.raises(StateError, match="captures"):
                call()
            assert cache.stats() == before
    cache.close()
