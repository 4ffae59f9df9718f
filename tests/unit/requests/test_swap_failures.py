"""Swapping over a fake driver: the order of copies and of everything else (D5), and a failure at every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from inside import addresses, fence_of
from rig import TOKENS, Rig, mapped

from slicedkv import CapacityError, DriverError, SlicedKVCache, StateError, SwapHandle


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=40) as rig:
        yield rig


def begin(cache: SlicedKVCache, seq_len: int) -> int:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: seq_len})
    return reqid


def totals(cache: SlicedKVCache) -> tuple[object, ...]:
    stats = cache.stats()
    cache.check_integrity()
    books = (stats.mapped_bytes, stats.created_bytes, stats.free_bytes, stats.used_bytes, stats.swapped_bytes)
    return *books, stats.active_slots, stats.swaps_in, stats.swaps_out


def test_out_is_ordered_after_the_callers_work_and_before_what_comes_to_the_slot(rig: Rig) -> None:
    cache, fake = rig.open(mapper="sync", max_batch_size=1), rig.fake
    fake.hold_fences = True
    fake.current_stream = "compute"
    reqid = begin(cache, 3 * TOKENS + 1)
    handle = cache.swap_out(reqid)
    (copied,) = fake.fences
    assert (copied.stream, copied.num_bytes) == ("compute", handle.seq_len * cache.layout.token_bytes)
    assert [copy.num_bytes for copy in fake.copies] == [handle.seq_len * cache.layout.row_bytes] * 2
    first, second = addresses(cache, reqid, 0)
    assert [copy.source for copy in fake.copies] == [first, second]
    assert fake.copies[1].target == fake.copies[0].target + fake.copies[0].num_bytes
    fake.current_stream = "another"
    assert cache.alloc_reqid() == reqid
    assert fake.ordered == [("another", copied)]
    fake.finish_fences()
    cache.close()


def test_in_is_ordered_before_what_the_caller_queues_next(rig: Rig) -> None:
    cache, fake = rig.open(mapper="sync"), rig.fake
    handle = cache.swap_out(begin(cache, 50))
    out = fake.copies[:]
    fake.current_stream, fake.hold_fences = "compute", True
    reqid = cache.swap_in(handle)
    assert reqid is not None
    assert [(copy.source, copy.num_bytes) for copy in fake.copies[2:]] == [(c.target, c.num_bytes) for c in out]
    copied = fake.fences[-1]
    assert fake.ordered[-1] == ("compute", copied)
    assert fence_of(cache, reqid) is copied, "no page of it is unmapped under the copy"
    assert cache.stats().copy_bytes_per_s == fake.copy_bytes_per_s, "of the one that is done"
    fake.finish_fences()
    cache.close()


def test_pages_are_unmapped_after_the_copy_and_not_before(rig: Rig) -> None:
    cache, fake = rig.open(mapper="sync"), rig.fake
    reqid, other = begin(cache, 15 * TOKENS), cache.alloc_reqid()
    fake.hold_fences = True
    handle = cache.swap_out(reqid)
    assert cache.pages_available() == 40
    finished: list[float] = []
    unmapped: list[float] = []
    rig.driver.on_call = lambda op, args: unmapped.append(time.monotonic()) if op == "unmap" else None
    timer = threading.Timer(0.05, lambda: finished.append(time.monotonic()) or fake.finish_fences())
    timer.start()
    assert cache.step({other: 15 * TOKENS})
    timer.join()
    assert min(unmapped) >= finished[0]
    assert (mapped(cache, reqid), mapped(cache, other)) == (0, 15)
    handle.release()
    cache.close()


def test_a_staging_span_is_not_used_again_under_a_copy_in(rig: Rig) -> None:
    cache, fake = rig.open(mapper="sync", swap_limit=4 << 20), rig.fake
    handle = cache.swap_out(begin(cache, 32))
    fake.hold_fences = True
    reqid = cache.swap_in(handle)
    timer = threading.Timer(0.05, fake.finish_fences)
    timer.start()
    begun = time.monotonic()
    cache.swap_out(reqid)
    assert time.monotonic() - begun > 0.04
    timer.join()
    fake.finish_fences()
    cache.close()


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_out_that_fails_at_any_call_changes_nothing(rig: Rig, layout: str) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=4, max_seq_len=2000)
    reqid = begin(cache, 100)
    planes = cache.layout.num_planes
    for k in range(1, planes + 1):
        before = totals(cache)
        rig.driver.fail("copy", at=k)
        with pytest.raises(DriverError, match="'copy'"):
            cache.swap_out(reqid)
        assert totals(cache) == before
    rig.driver.fail("copy", at=planes + 1)
    assert cache.swap_out(reqid).seq_len == 100
    rig.driver.heal()
    cache.close()


@pytest.mark.parametrize("zero_on_reuse", [False, True])
@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("op", ["create", "map", "set_access", "copy"])
def test_in_that_fails_at_any_call_changes_nothing(rig: Rig, layout: str, op: str, zero_on_reuse: bool) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=4, max_seq_len=2000, zero_on_reuse=zero_on_reuse)
    handle = cache.swap_out(begin(cache, 1400))
    cache.trim()
    failures, reqid = 0, None
    while reqid is None:
        before = totals(cache)
        rig.driver.heal()
        rig.driver.fail(op, at=failures + 1)
        with suppress(DriverError):
            reqid = cache.swap_in(handle)
        if reqid is None:
            assert totals(cache) == before
            failures += 1
    assert failures >= cache.layout.num_planes
    assert totals(cache)[5] == 1
    cache.close()


def test_out_of_memory_on_the_device_is_none(rig: Rig) -> None:
    cache = rig.open(mapper="sync")
    handle = cache.swap_out(begin(cache, 100))
    cache.trim()
    before = totals(cache)
    for op in ("create", "map"):
        rig.driver.fail(op, name="CUDA_ERROR_OUT_OF_MEMORY", times=100)
        assert cache.swap_in(handle) is None
        assert totals(cache) == before
        rig.driver.heal()
    assert cache.swap_in(handle) is not None
    cache.close()


def test_a_slot_with_pages_of_its_own_keeps_them_when_in_fails(rig: Rig) -> None:
    cache = rig.open(mapper="sync", max_batch_size=1)
    handle = cache.swap_out(begin(cache, 10 * TOKENS))
    short = begin(cache, 3 * TOKENS)
    cache.trim()
    cache.free_reqid(short)
    assert mapped(cache, short) == 3
    before = totals(cache)
    rig.driver.fail("copy", at=2)
    with pytest.raises(DriverError):
        cache.swap_in(handle)
    assert (mapped(cache, short), totals(cache)) == (3, before)
    assert cache.swap_in(handle) == short
    cache.close()


def test_capture_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rig.open(mapper="sync")
    reqid = begin(cache, 10)

    def refuse(copies: Any) -> None:
        raise StateError("the current stream captures")

    before = totals(cache)
    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "copy_batch", refuse)
        with pytest.raises(StateError, match="captures"):
            cache.swap_out(reqid)
    assert totals(cache) == before
    cache.close()


def test_a_request_on_its_way_out_cannot_be_grown_by_whoever_interrupts(rig: Rig) -> None:
    """A signal's handler or a finalizer on the thread that swaps it out; to free it is put off, and comes too late."""
    cache = rig.open(mapper="sync")
    reqid = begin(cache, 3 * TOKENS)
    refused: list[str] = []

    def interfere(op: str, args: object) -> None:
        with pytest.raises(StateError, match="this thread is in the middle of swap_out"):
            cache.step({reqid: 500})
        refused.append(op)
        if len(refused) == 3:
            cache.free_reqid(reqid)
            with pytest.raises(StateError, match="is not active"):
                cache.free_reqid(reqid)

    rig.driver.on_call = lambda op, args: interfere(op, args) if op in {"pin", "copy"} else None
    handle = cache.swap_out(reqid)
    rig.driver.on_call = None
    assert refused == ["pin", "copy", "copy"]
    cache.check_integrity()
    again = cache.swap_in(handle)
    assert cache.step({again: 500})
    cache.close()


def test_a_request_that_could_not_leave_is_as_before(rig: Rig) -> None:
    cache = rig.open(mapper="sync", swap_limit=4096)
    reqid = begin(cache, 3 * TOKENS)
    with pytest.raises(CapacityError):
        cache.swap_out(reqid)
    assert cache.step({reqid: 500})
    cache.free_reqid(reqid)
    cache.close()


def test_pages_are_not_unmapped_under_a_copy_in_that_nobody_could_be_ordered_after(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, fake = rig.open(mapper="sync"), rig.fake
    handle = cache.swap_out(begin(cache, 100))
    cache.trim()
    before = totals(cache)
    finished: list[float] = []
    unmapped: list[float] = []

    def fail(fence: object) -> None:
        raise DriverError("order_after", 999, "CUDA_ERROR_UNKNOWN")

    fake.hold_fences = True
    rig.driver.on_call = lambda op, args: unmapped.append(time.monotonic()) if op == "unmap" else None
    timer = threading.Timer(0.05, lambda: finished.append(time.monotonic()) or fake.finish_fences())
    timer.start()
    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "order_after", fail)
        with pytest.raises(DriverError, match="order_after"):
            cache.swap_in(handle)
    timer.join()
    assert min(unmapped) >= finished[0]
    assert totals(cache) == before
    fake.hold_fences = False
    assert cache.swap_in(handle) is not None
    cache.close()


def test_handles_and_pages_are_all_back(rig: Rig) -> None:
    cache = rig.open()
    for cycle in range(30):
        reqids = [begin(cache, TOKENS * (1 + cycle % 4)) for _ in range(3)]
        handles: list[SwapHandle] = [cache.swap_out(reqid) for reqid in reqids]
        for reqid in [cache.swap_in(handle) for handle in handles[1:]]:
            assert reqid is not None
            cache.free_reqid(reqid)
        handles[0].release()
        cache.trim()
        assert rig.driver.counts["create"] == rig.driver.counts["release"]
        assert (rig.fake.created_bytes, rig.fake.mapped, rig.fake.pinned) == (0, 0, {})
    cache.close()
