"""Driver failures at every call: nothing is lost, books and totals are as before, and everything works again after.

Cases B4 and B5 on the calling thread and through the mapper, B3's counts, and the device that holds less than promised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inside import background_failure
from rig import PAGE, SHAPE, wait_until

from slicedkv import DriverError, OutOfPagesError, PagePool, SlicedKVCache, StateError
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

Open = Callable[..., tuple[SlicedKVCache, FaultyDriver]]


@pytest.fixture
def open_faulty() -> Iterator[Open]:
    """Open caches over a fake driver that can be made to fail; at the end nothing may be left anywhere."""
    opened: list[tuple[SlicedKVCache, FaultyDriver, FakeDriver]] = []

    def make(
        *, total_pages: int = 10_000, limit_pages: int = 1000, extent_pages: int = 4, **options: Any
    ) -> tuple[SlicedKVCache, FaultyDriver]:
        fake = FakeDriver(PAGE, total_bytes=total_pages * PAGE)
        driver = FaultyDriver(fake)
        pool = PagePool(driver, page_bytes=PAGE, memory_limit=limit_pages * PAGE, extent_pages=extent_pages)
        cache = SlicedKVCache(**(SHAPE | {"max_batch_size": 8, "mapper": "sync"} | options), pool=pool)
        opened.append((cache, driver, fake))
        return cache, driver

    yield make
    for cache, driver, fake in opened:
        driver.heal()
        driver.on_call = None
        pool = cache.pool
        if not cache.closed:
            cache.check_integrity()
            cache.close()
        pool.trim()
        assert (fake.created_bytes, fake.mapped) == (0, 0)


def totals(cache: SlicedKVCache) -> tuple[int, ...]:
    stats = cache.stats()
    return stats.mapped_bytes, stats.created_bytes, stats.free_bytes, stats.used_bytes, stats.active_slots


def fails_in(op: str, call: Callable[[], bool]) -> bool:
    """True when the call raised a DriverError in `op`, False when it returned True."""
    try:
        return not call()
    except DriverError as error:
        return error.op == op


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("op", ["create", "map", "set_access"])
def test_growth_that_fails_at_any_call_changes_nothing(open_faulty: Open, layout: str, op: str) -> None:
    cache, driver = open_faulty(layout=layout)
    lens = {cache.alloc_reqid(): 20, cache.alloc_reqid(): 50}
    assert cache.step(lens)
    grown = {reqid: length + (1100 if layout == "per_layer" else 200) for reqid, length in lens.items()}
    calls_before = driver.counts[op]
    failures = 0
    while True:
        before = totals(cache)
        driver.heal()
        driver.fail(op, at=failures + 1)
        if not fails_in(op, lambda: cache.step(grown)):
            break
        assert totals(cache) == before
        cache.check_integrity()
        failures += 1
    assert failures > 5
    assert failures == driver.counts[op] - calls_before - sum(range(1, failures + 1)), (
        "every call was made to fail once"
    )
    assert cache.step(grown)


def test_unmapping_that_fails_at_any_plane_is_mapped_back(open_faulty: Open) -> None:
    cache, driver = open_faulty(layout="per_layer", num_layers=3)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 600})
    cache.free_reqid(reqid)
    for plane in range(1, 7):
        before = totals(cache)
        driver.fail("unmap", at=plane)
        with pytest.raises(DriverError):
            cache.trim()
        assert totals(cache) == before
        cache.check_integrity()
    cache.trim()
    assert cache.stats().created_bytes == 0


def test_a_slot_whose_mapping_is_unknown_is_never_handed_out(open_faulty: Open) -> None:
    cache, driver = open_faulty(max_batch_size=2, mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    cache.free_reqid(reqid)
    driver.fail("unmap", at=2)
    driver.fail("map")
    with pytest.raises(StateError, match=f"reqid {reqid}: pages .* out of use"):
        cache.trim()
    assert cache.alloc_reqid() != reqid
    assert cache.stats().idle_slots == 0
    cache.close()


@pytest.mark.parametrize("name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("grown_before", [False, True])
def test_slots_that_can_be_neither_mapped_nor_left_as_they_were_are_lost(
    open_faulty: Open, name: str, grown_before: bool
) -> None:
    cache, driver = open_faulty(extent_pages=1, lookahead_tokens=0)
    other, reqid = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({other: 50, reqid: 20 if grown_before else 0})
    pages = cache.pages_needed({reqid: 200}) // cache.layout.num_planes
    driver.fail("map", at=pages + 1, name=name)  # K is mapped, V is not
    driver.fail("unmap")
    with pytest.raises(
        StateError, match=rf"reqids \[{reqid}\] could neither be mapped nor left as they were .* out of use"
    ):
        cache.step({reqid: 200})
    driver.heal()
    assert cache.stats().active_slots == 1
    with pytest.raises(StateError, match=f"reqid {reqid} is not active"):
        cache.step({reqid: 10})
    cache.check_integrity()
    assert cache.step({other: 300})
    assert reqid not in [cache.alloc_reqid() for _ in range(6)]
    cache.free_reqid(other)
    cache.trim()
    cache.check_integrity()


def test_the_mapper_loses_no_more_than_the_slot(open_faulty: Open) -> None:
    cache, driver = open_faulty(extent_pages=1, mapper="background")
    other, reqid = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({other: 50})
    pages = cache.pages_needed({reqid: 200}) // cache.layout.num_planes
    driver.fail("map", at=pages + 1)
    driver.fail("unmap")
    cache.prefetch(reqid, 200)
    wait_until(lambda: cache.stats().active_slots == 1)
    driver.heal()
    with pytest.raises(StateError, match="could neither be mapped nor left"):
        cache.step({other: 60})
    assert cache.step({other: 300})


def test_one_out_of_memory_is_survived(open_faulty: Open) -> None:
    cache, driver = open_faulty(mapper="sync")
    reqid = cache.alloc_reqid()
    driver.fail("create", name="CUDA_ERROR_OUT_OF_MEMORY")
    assert cache.step({reqid: 1}), "the device says that it has memory: it is asked once more"
    before = totals(cache)
    driver.fail("create", name="CUDA_ERROR_OUT_OF_MEMORY", times=2)
    assert cache.step({reqid: 100}) is False
    assert totals(cache) == before
    assert cache.step({reqid: 100})


def test_other_users_are_asked_for_memory_once(open_faulty: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, driver = open_faulty()
    asked = []
    monkeypatch.setattr(driver, "relieve_pressure", lambda: asked.append(1) or True)
    driver.fail("create", name="CUDA_ERROR_OUT_OF_MEMORY")
    assert cache.step({cache.alloc_reqid(): 100})
    assert asked == [1]


def test_a_device_with_less_than_the_limit_uses_idle_pages(open_faulty: Open) -> None:
    cache, _ = open_faulty(total_pages=20, limit_pages=100, extent_pages=1)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 9 * 32})
    cache.free_reqid(first)
    assert cache.step({second: 10 * 32}), "2 pages are left on the device, 18 are idle"
    assert cache.step({second: 11 * 32}) is False
    assert cache.step({second: 10 * 32})


def test_pages_short_of_extents_break_them_up(open_faulty: Open) -> None:
    cache, _ = open_faulty(limit_pages=16, extent_pages=4, reclaim_watermark=0.0)
    big = cache.alloc_reqid()
    assert cache.step({big: 8 * 32})
    assert cache.stats().extents_mapped == 4
    small = [cache.alloc_reqid() for _ in range(7)]
    cache.free_reqid(big)
    assert cache.step(dict.fromkeys(small, 32)), "14 pages one by one, from memory that was 4 extents"
    assert cache.pages_available() == 2


@pytest.mark.parametrize("name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_a_failure_in_the_thread_is_raised_by_the_next_call_once(open_faulty: Open, name: str) -> None:
    cache, driver = open_faulty(mapper="background")
    reqid = cache.alloc_reqid()
    driver.fail("create", name=name, times=10**6)
    cache.prefetch(reqid, 1000)
    wait_until(lambda: driver.counts["create"] > 0)
    driver.heal()
    if name == "CUDA_ERROR_UNKNOWN":
        wait_until(lambda: background_failure(cache) is not None)
        with pytest.raises(DriverError) as caught:
            cache.step({reqid: 10})
        assert "in the background" in caught.value.__notes__[0]
    assert cache.step({reqid: 1000}), "out of memory ahead of need is no failure; the pages are mapped at need"
    cache.free_reqid(reqid)


def test_any_exception_in_the_thread_is_raised_and_nothing_is_lost(open_faulty: Open) -> None:
    cache, driver = open_faulty(mapper="background")
    reqid = cache.alloc_reqid()

    def fail(op: str, args: tuple[Any, ...]) -> None:
        if op == "map":
            raise KeyError("from a hook")

    driver.on_call = fail
    cache.prefetch(reqid, 1000)
    wait_until(lambda: background_failure(cache) is not None)
    driver.on_call = None
    with pytest.raises(KeyError, match="from a hook"):
        cache.free_reqid(reqid)
    cache.check_integrity()
    assert cache.step({reqid: 1000})


def test_handles_created_are_released(open_faulty: Open) -> None:
    cache, driver = open_faulty(limit_pages=3000)
    for cycle in range(64):
        reqids = [cache.alloc_reqid() for _ in range(8)]
        assert cache.step(dict.fromkeys(reqids, 30 + 60 * cycle))
        for reqid in reqids:
            cache.free_reqid(reqid)
        cache.trim()
        assert driver.counts["create"] == driver.counts["release"]
        assert driver.inner.memory_info().free_bytes == driver.inner.memory_info().total_bytes


def test_errors_are_picklable() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(DriverError("map", 2, "CUDA_ERROR_OUT_OF_MEMORY", "hint")))
    assert (error.op, error.code, error.name, str(error).endswith("hint")) == (
        "map",
        2,
        "CUDA_ERROR_OUT_OF_MEMORY",
        True,
    )
    short = pickle.loads(pickle.dumps(OutOfPagesError("short", requested=3, available=1)))
    assert (str(short), short.requested, short.available) == ("short", 3, 1)


@pytest.mark.parametrize(
    "error", [DriverError("map", 2, "CUDA_ERROR_UNKNOWN"), OutOfPagesError("short", requested=3, available=1)]
)
def test_notes_go_to_other_processes_too(error: Exception) -> None:
    import pickle

    error.add_note("raised in the background")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["raised in the background"]


@pytest.mark.parametrize("op", ["create", "map", "set_access"])
def test_out_of_memory_in_any_call_makes_step_false(open_faulty: Open, op: str) -> None:
    cache, driver = open_faulty()
    reqid = cache.alloc_reqid()
    before = totals(cache)
    driver.fail(op, name="CUDA_ERROR_OUT_OF_MEMORY", times=100)
    assert cache.step({reqid: 100}) is False
    assert totals(cache) == before
    driver.heal()
    assert cache.step({reqid: 100})


def test_a_thread_that_cannot_be_started_is_an_error_once(open_faulty: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = open_faulty(mapper="background")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        reqid = cache.alloc_reqid(100)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cache.step({reqid: 10})
    cache.prefetch(reqid, 1000)
    wait_until(lambda: cache.stats().pages_prefetch > 0)
    cache.free_reqid(reqid)
