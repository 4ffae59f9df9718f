"""What counts as available when pages are shared, and that all of it comes back (cases B3, E3, E4)."""

from __future__ import annotations

import threading

import pytest
from inside import sharing_books
from rig import QUIET, TOKENS, Rig, mapped

from slicedkv import OutOfPagesError, StateError

SHARED = 4 * TOKENS + 5


def test_what_idle_sharers_hold_is_available_once_or_not_at_all(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    cache.set_memory_limit(20 * cache.layout.page_bytes)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    reqids = [source, *cache.fork(source, 2)]
    rig.fake.hold_fences = True
    for freed, available in zip(reqids, (12, 12, 20), strict=True):
        cache.free_reqid(freed)
        assert cache.pages_available() == available
        stats = cache.stats()
        assert stats.active_bytes == (8 if available == 12 else 0) * stats.page_bytes
        assert stats.active_bytes + stats.idle_bytes == stats.mapped_bytes == 8 * stats.page_bytes
        assert cache.can_admit(available // 2 * TOKENS)
        assert not cache.can_admit(available // 2 * TOKENS + 1)
    rig.fake.finish_fences()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10 * TOKENS}), "all of it"
    cache.close()


def test_what_requests_would_free_is_known_before(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    cache.set_memory_limit(40 * cache.layout.page_bytes)
    source = cache.alloc_reqid()
    assert cache.step({source: SHARED})
    assert cache.shareable_pages(source, SHARED) == 8
    assert cache.shareable_pages(source, TOKENS - 1) == 0
    first, second = cache.fork(source, 2)
    assert [cache.freeable_pages([reqid]) for reqid in (source, first, second)] == [2, 2, 2]
    assert cache.freeable_pages([source, first]) == 4
    assert cache.freeable_pages([source, first, second, second]) == 14
    available = cache.pages_available()
    cache.free_reqid(first)
    assert not cache.is_active(first)
    assert cache.is_active(second)
    assert cache.pages_available() == available + 2
    assert cache.freeable_pages([first]) == 0, "it is over"
    assert cache.freeable_pages([source, second]) == 12
    cache.prefetch(source, SHARED + 3 * TOKENS)
    assert cache.freeable_pages([source]) == 8, "what was asked for is the request's own"
    cache.close()


def test_memory_is_taken_from_idle_sharers_but_not_from_active_ones(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    cache.set_memory_limit(12 * cache.layout.page_bytes)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS, other: 1})
    first, second = cache.fork(source, 2)
    cache.free_reqid(first)
    assert cache.step({other: 2 * TOKENS})
    assert cache.step({other: 2 * TOKENS + 1}) is False
    with pytest.raises(OutOfPagesError):
        cache.set_memory_limit(11 * cache.layout.page_bytes)
    cache.free_reqid(source)
    assert cache.step({other: 2 * TOKENS + 1}) is False, "the last sharer holds them all"
    cache.free_reqid(second)
    assert cache.step({other: 6 * TOKENS})
    cache.set_memory_limit(30 * cache.layout.page_bytes)
    assert cache.step({other: 15 * TOKENS})
    cache.close()


def test_the_margin_of_the_source_is_taken_back_for_the_copy(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    cache.set_memory_limit(12 * cache.layout.page_bytes)
    former = cache.alloc_reqid()
    assert cache.step({former: 6 * TOKENS})
    cache.free_reqid(former)
    source = cache.alloc_reqid()
    assert cache.step({source: 5})
    assert (source, mapped(cache, source), cache.pages_available()) == (former, 6, 10)
    (target,) = cache.fork(source)
    assert (mapped(cache, source), mapped(cache, target)) == (1, 1)
    cache.close()


def test_the_margin_of_the_source_is_taken_for_what_is_not_shared(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    cache.set_memory_limit(16 * cache.layout.page_bytes)
    first = cache.alloc_reqid()
    assert cache.step({first: 8 * TOKENS})
    cache.free_reqid(first)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: TOKENS + 1})
    assert (mapped(cache, source), cache.pages_available()) == (8, 12)
    assert cache.share_prefix(source, target, TOKENS + 1)
    assert (mapped(cache, source), mapped(cache, target)) == (2, 2)
    cache.close()


def test_staggered_ends_then_trim_leave_what_is_held(rig: Rig) -> None:
    cache = rig.open(max_batch_size=9, **QUIET)
    page = cache.layout.page_bytes * cache.layout.num_planes
    source = cache.alloc_reqid()
    for round_ in range(16):
        assert cache.step({source: SHARED})
        reqids = [source, *cache.fork(source, 8)]
        for left in range(8, 0, -1):
            cache.free_reqid(reqids.pop(round_ % len(reqids)))
            cache.trim()
            assert cache.stats().created_bytes == cache.stats().active_bytes == (4 + left) * page
        cache.free_reqid(reqids[0])
        cache.trim()
        assert rig.driver.counts["create"] == rig.driver.counts["release"]
        source = cache.alloc_reqid()
    cache.close()


def test_eager_pages_are_not_built_on_shared_ones(rig: Rig) -> None:
    cache = rig.open(eager_tokens=TOKENS, max_batch_size=2, mapper="sync", reclaim_watermark=0.0)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    rig.fake.hold_fences = True
    cache.free_reqid(source)
    assert (mapped(cache, source), cache.stats().eager_bytes) == (4, 0)
    rig.fake.finish_fences()
    assert cache.step({target: 4 * TOKENS + 1})
    assert mapped(cache, source) == 1, "parted, then mapped for the next request"
    cache.close()


@pytest.mark.parametrize("broken", ["a shared page that is not known as such", "an alias that is not counted"])
def test_broken_books_are_found(rig: Rig, broken: str) -> None:
    cache = rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: SHARED})
    cache.fork(source)
    shared = sharing_books(cache)
    if broken.startswith("an alias"):
        shared.alias_pages += 1
        with pytest.raises(StateError, match="8 pages are aliases, but 9 are counted"):
            cache.check_integrity()
        shared.alias_pages -= 1
    else:
        bound, shared._bound[source] = shared._bound[source], 1
        with pytest.raises(StateError, match="page 1 is shared, but not on purpose"):
            cache.check_integrity()
        shared._bound[source] = bound
    cache.check_integrity()
    cache.close()


def test_threads_share_and_free_at_once(rig: Rig) -> None:
    cache = rig.open(max_batch_size=16)
    source = cache.alloc_reqid()
    assert cache.step({source: SHARED})
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                children = cache.fork(source, 3)
                assert cache.step(dict.fromkeys(children, SHARED + 40))
                assert cache.step({children[0]: TOKENS})
                assert cache.step({children[0]: TOKENS + 1})
                for reqid in children:
                    cache.free_reqid(reqid)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    cache.check_integrity()
    assert cache.stats().active_slots == 1
    cache.close()
