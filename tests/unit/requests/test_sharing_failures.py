"""Sharing over a driver that fails at every call: nothing is lost, and all of it works afterwards (cases B4, B5)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rig import QUIET, TOKENS, Rig, grow, mapped, wait_until

from slicedkv import DriverError, OutOfPagesError, SlicedKVCache, StateError
from slicedkv.requests import sharing
from slicedkv.requests.copier import Copier

SHARED = 4 * TOKENS + 5


def totals(cache: SlicedKVCache) -> tuple[Any, ...]:
    cache.check_integrity()
    stats = cache.stats()
    names = ("mapped_bytes", "created_bytes", "free_bytes", "used_bytes", "saved_bytes", "shared_bytes", "active_slots")
    mappings = [mapped(cache, reqid) for reqid in range(cache.layout.max_batch_size)]
    return *(getattr(stats, name) for name in names), mappings, cache.pages_available()


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("op", ["create", "map", "set_access"])
def test_sharing_that_fails_at_any_call_changes_nothing(rig: Rig, layout: str, op: str) -> None:
    cache = rig.open(layout=layout, num_layers=2 if layout == "per_layer" else 32, max_batch_size=5, **QUIET)
    pages, planes = 3, cache.layout.num_planes
    tokens = cache.layout.tokens_backed(pages) - 3
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: tokens})
    expected = planes if op == "create" else pages * planes
    assert rig.sweep(cache, op, lambda: cache.share_prefix(source, target, tokens), lambda: totals(cache)) == expected
    assert cache.stats().saved_bytes == (pages - 1) * planes * cache.layout.page_bytes
    assert rig.sweep(cache, op, lambda: cache.fork(target, 2), lambda: totals(cache)) == 2 * expected
    assert cache.stats().active_slots == 4
    cache.close()


@pytest.mark.parametrize("op", ["create", "map", "set_access", "unmap"])
def test_a_copy_that_fails_at_any_call_changes_nothing(rig: Rig, op: str) -> None:
    cache = rig.open(**QUIET)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED, other: 1})
    (target,) = cache.fork(source)
    assert cache.step({source: 1, target: 1})
    lens = {source: 2 * TOKENS + 1, target: TOKENS + 1, other: 3 * TOKENS}
    # Of the three pages that the first writes the second writes two as well: it keeps those.
    calls = {"create": (3 + 2) * 2, "map": (3 + 2) * 2, "set_access": (3 + 2) * 2, "unmap": 2}
    assert rig.sweep(cache, op, lambda: cache.step(lens), lambda: totals(cache)) == calls[op]
    assert cache.stats().pages_copied == 3 * 2
    cache.close()


@pytest.mark.parametrize("op", ["map", "set_access", "create"])
def test_out_of_memory_in_any_call_is_no_error(rig: Rig, op: str) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    before = totals(cache)
    rig.driver.fail(op, name="CUDA_ERROR_OUT_OF_MEMORY", times=1000)
    assert cache.share_prefix(source, target, SHARED) is False
    with pytest.raises(OutOfPagesError):
        cache.fork(source)
    rig.driver.heal()
    assert totals(cache) == before
    assert cache.share_prefix(source, target, SHARED)
    assert cache.step({target: 10})
    before = totals(cache)
    tries = {"create": (1, 2)}.get(op, (1, 2 + cache.layout.num_planes))  # in between the old pages are mapped back
    for at in tries:
        rig.driver.fail(op, at=at, name="CUDA_ERROR_OUT_OF_MEMORY")
    assert cache.step({target: 11}) is False
    assert totals(cache) == before
    assert cache.step({target: 11})
    cache.close()


def test_slots_that_can_be_neither_copied_nor_restored_are_lost(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: SHARED})
    (target,) = cache.fork(source)
    assert cache.step({target: 10})
    rig.driver.fail("map", times=100)
    with pytest.raises(StateError, match=rf"reqid {target}: pages \[0, 1\) could neither be unmapped nor mapped back"):
        cache.step({target: 11})
    rig.driver.heal()
    assert cache.stats().active_slots == 1
    with pytest.raises(StateError, match=f"reqid {target} is not active"):
        cache.step({target: 11})
    assert cache.step({source: SHARED + 1})
    cache.close()


def test_a_sharer_that_can_be_neither_mapped_nor_left_as_it_was_is_lost(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    pages = cache.shareable_pages(source, SHARED) // cache.layout.num_planes
    rig.driver.fail("map", at=pages + 1)  # K is shared, V is not
    rig.driver.fail("unmap")
    with pytest.raises(StateError, match=rf"reqids \[{target}\] could neither be mapped nor left"):
        cache.share_prefix(source, target, SHARED)
    rig.driver.heal()
    assert cache.stats().active_slots == 1
    cache.check_integrity()
    (fork,) = cache.fork(source)
    assert cache.step({source: SHARED + 1, fork: SHARED + 1})
    cache.close()


def test_a_fork_into_a_slot_that_is_lost_gives_the_others_back(rig: Rig) -> None:
    cache = rig.open(max_batch_size=3, **QUIET)
    source, *targets = (cache.alloc_reqid() for _ in range(3))
    assert cache.step({source: SHARED} | dict.fromkeys(targets, TOKENS))
    for target in targets:
        cache.free_reqid(target)
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map")
    with pytest.raises(StateError, match=rf"reqid {targets[0]}: .* out of use"):
        cache.fork(source, 2)
    assert (cache.stats().active_slots, cache.stats().idle_slots) == (1, 1)
    assert cache.fork(source) == [targets[1]]
    cache.close()


def test_pages_that_give_way_before_a_failure_are_free(rig: Rig) -> None:
    cache = rig.open(max_batch_size=2, **QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED, target: 7 * TOKENS})
    cache.free_reqid(target)
    assert cache.alloc_reqid() == target
    rig.driver.fail("unmap", at=2)
    with pytest.raises(DriverError):
        cache.share_prefix(source, target, SHARED)
    assert mapped(cache, target) == 7
    rig.driver.fail("map")
    with pytest.raises(DriverError):
        cache.share_prefix(source, target, SHARED)
    cache.check_integrity()
    assert (mapped(cache, target), cache.stats().free_bytes) == (0, 14 * cache.layout.page_bytes)
    assert cache.share_prefix(source, target, SHARED)
    cache.close()


def test_a_copy_of_rows_that_fails_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    before = totals(cache)
    with monkeypatch.context() as patched:
        patched.setattr(Copier, "copy", lambda *arguments: 1 // 0)
        for call in (lambda: cache.share_prefix(source, target, SHARED), lambda: cache.fork(source, 2)):
            with pytest.raises(ZeroDivisionError):
                call()
            after = totals(cache)
            assert (*after[:1], *after[3:]) == (*before[:1], *before[3:]), "but for handles that are free now"
            cache.check_integrity()
    assert cache.share_prefix(source, target, SHARED)
    cache.close()


def test_a_source_that_ends_meanwhile_is_not_taken_back(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: SHARED})
    rig.fake.total_bytes = rig.fake.created_bytes
    cache.pool.gate.timeout_s = 0.05  # the mapper's work on this thread, which the call in the call asks for, can wait

    def end_source(op: str, args: tuple[Any, ...]) -> None:
        rig.driver.on_call = None
        cache.free_reqid(source)

    rig.driver.on_call = end_source
    assert cache.share_prefix(source, target, SHARED) is False, "no memory but that which is to be shared"
    assert (mapped(cache, source), mapped(cache, target)) == (5, 0)
    cache.check_integrity()
    cache.close()


def open_with_target(rig: Rig) -> tuple[SlicedKVCache, int, int]:
    """A request of three pages, and one without tokens in a slot that still has two."""
    cache = rig.open(**QUIET)
    source, last = grow(cache, 3), grow(cache, 2)
    cache.free_reqid(last)
    target = cache.alloc_reqid()
    assert mapped(cache, target) == 2
    return cache, source, target


def test_pages_asked_for_while_a_prefix_is_shared_are_no_obstacle(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's `prefetch` for the target, between the check and the mapping."""
    cache, source, target = open_with_target(rig)
    require_room = sharing.require_room
    thread = threading.Thread(target=lambda: cache.prefetch(target, 2 * TOKENS))

    def prefetched(*arguments: Any) -> Any:
        thread.start()
        thread.join(0.1)  # with `mapper="sync"` it waits for the sharing to end
        return require_room(*arguments)

    monkeypatch.setattr(sharing, "require_room", prefetched)
    assert cache.share_prefix(source, target, 2 * TOKENS)
    assert cache.stats().saved_bytes == 2 * 2 * cache.layout.page_bytes
    thread.join(5)
    cache.check_integrity()
    cache.close()


def test_a_step_of_the_target_comes_after_the_share(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source, target = open_with_target(rig)
    require_room, answers = sharing.require_room, []
    thread = threading.Thread(target=lambda: answers.append(cache.step({target: 5})))

    def stepped(*arguments: Any) -> Any:
        thread.start()
        wait_until(lambda: rig.pool.gate._foreground_waiting)
        return require_room(*arguments)

    monkeypatch.setattr(sharing, "require_room", stepped)
    assert cache.share_prefix(source, target, 2 * TOKENS)
    thread.join(5)
    assert answers == [True]
    assert cache.seq_len(target) == 5
    cache.check_integrity()
    assert cache.step({target: 6})
    cache.close()
