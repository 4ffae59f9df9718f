"""Pause and resume over a fake driver: a failure at every call leaves all as it was, and nobody comes in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rig import Rig
from stamped_rows import LAYOUTS

from slicedkv import DriverError, OutOfPagesError, SlicedKVCache, StateError


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def totals(cache: SlicedKVCache) -> tuple[object, ...]:
    stats = cache.stats()
    cache.check_integrity()
    return stats.mapped_bytes, stats.created_bytes, stats.used_bytes, stats.active_slots, stats.swapped_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["copy", "unmap", "release"])
def test_a_pause_that_fails_at_any_call_did_not_happen(rig: Rig, layout: str, op: str) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=3, max_seq_len=2000)
    lens = {cache.alloc_reqid(): 40, cache.alloc_reqid(): 1500}
    assert cache.step(lens)
    failures, paused = 0, False
    while not paused:
        before = totals(cache)
        rig.driver.heal()
        rig.driver.fail(op, at=failures + 1)
        with suppress(DriverError):
            cache.pause(offload=True)
            paused = True
        if not paused:
            failures += 1
            for handle in rig.fake._ledger.idle_handles():
                assert op == "release", "what the driver will not release is gone for us: let it go here too"
                rig.fake.release(handle)
            assert totals(cache) == before
            assert cache.step(lens)
    rig.driver.heal()
    assert failures >= 2 * cache.layout.num_planes
    assert (rig.fake.mapped, rig.fake.created_bytes) == (0, 0)
    cache.resume()
    assert totals(cache) == before
    cache.close()


@pytest.mark.parametrize("zero_on_reuse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["create", "map", "set_access", "copy"])
def test_a_resume_that_fails_at_any_call_did_not_happen(rig: Rig, layout: str, op: str, zero_on_reuse: bool) -> None:
    cache = rig.open(mapper="sync", layout=layout, num_layers=3, max_seq_len=2000, zero_on_reuse=zero_on_reuse)
    lens = {cache.alloc_reqid(): 40, cache.alloc_reqid(): 1500}
    assert cache.step(lens)
    cache.pause(offload=True)
    failures, resumed = 0, False
    while not resumed:
        before = totals(cache)
        rig.driver.heal()
        rig.driver.fail(op, at=failures + 1)
        with suppress(DriverError):
            cache.resume()
            resumed = True
        if not resumed:
            failures += 1
            assert totals(cache) == before
            with pytest.raises(StateError, match="paused"):
                cache.step(lens)
    assert failures >= 2 * cache.layout.num_planes
    assert cache.step(lens)
    cache.close()


def test_nobody_comes_or_goes_once_it_began(rig: Rig) -> None:
    """What is copied out and unmapped is what was active when the pause began."""
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    refused: list[str] = []
    rig.pool.gate.timeout_s = 0.01

    def interfere(op: str, args: object) -> None:
        for call in (cache.alloc_reqid, lambda: cache.step({reqid: 101})):
            with pytest.raises(StateError, match="paused"):
                call()
        thread = threading.Thread(target=free)
        thread.start()
        thread.join(5)
        refused.append(op)

    def free() -> None:
        with pytest.raises(StateError, match=r"free_reqid: waited .* for pause"):  # it waits for the end of the pause
            cache.free_reqid(reqid)
        late.append(reqid)

    late: list[int] = []

    rig.driver.on_call = lambda op, args: interfere(op, args) if op in {"pin", "copy", "unmap", "release"} else None
    cache.pause(offload=True)
    rig.driver.on_call = None
    assert set(refused) == {"pin", "copy", "unmap", "release"}
    assert len(late) == len(refused)
    cache.resume()
    assert cache.step({reqid: 101})
    cache.close()


@pytest.mark.parametrize("offload", [False, True])
def test_a_capture_is_refused_before_the_device_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    """Waiting for the device would break the graph."""
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    before, waited = totals(cache), []

    def refuse() -> None:
        raise StateError("the current stream captures")

    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "record_fence", refuse)
        patched.setattr(rig.driver, "synchronize", lambda: waited.append(1))
        with pytest.raises(StateError, match="captures"):
            cache.pause(offload=offload)
    assert (totals(cache), waited) == (before, [])
    assert cache.step({reqid: 100})
    cache.close()


def test_a_device_without_memory_for_it_keeps_it_paused(rig: Rig) -> None:
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 1000})
    cache.pause(offload=True)
    before = totals(cache)
    rig.driver.fail("create", name="CUDA_ERROR_OUT_OF_MEMORY", times=100)
    with pytest.raises(OutOfPagesError):
        cache.resume()
    assert totals(cache) == before
    rig.driver.heal()
    cache.resume()
    assert cache.step({reqid: 1000})
    cache.close()


def test_a_pause_that_cannot_be_undone_stays_and_loses_nothing(rig: Rig) -> None:
    cache = rig.open(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    rig.driver.fail("release", at=8)
    rig.driver.fail("create")
    with pytest.raises(StateError, match=r"stays paused; call resume\(\)"):
        cache.pause(offload=True)
    with pytest.raises(StateError, match="paused"):
        cache.step({reqid: 1})
    for handle in rig.fake._ledger.idle_handles():
        rig.fake.release(handle)
    cache.resume()
    assert cache.step({reqid: 100})
    assert len(rig.fake.copies) == 4
    cache.close()


def test_a_slot_whose_mapping_is_unknown_is_lost_and_the_cache_is_not_paused(rig: Rig) -> None:
    cache = rig.open(mapper="sync", max_batch_size=2)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map")
    with pytest.raises(StateError, match=f"reqid {reqid}: pages .* out of use"):
        cache.pause(offload=True)
    with pytest.raises(StateError, match=f"reqid {reqid} is not active"):
        cache.step({reqid: 1})
    assert cache.step({cache.alloc_reqid(): 10})
    cache.check_integrity()
    cache.close()


def test_a_slot_that_is_lost_while_paused_takes_its_rows_with_it(rig: Rig) -> None:
    """The copy in fails, then unmapping what was mapped for it, then mapping that back."""
    cache = rig.open(mapper="sync", max_batch_size=2)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    handles = rig.fake.mapped
    cache.pause(offload=True)
    rig.driver.fail("copy")
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map", at=handles + 1)
    with pytest.raises(StateError, match=f"reqid {reqid}: pages .* out of use"):
        cache.resume()
    cache.check_integrity()
    assert (cache.stats().swapped_bytes, cache.stats().active_slots) == (0, 0)
    cache.resume()
    with pytest.raises(StateError, match=f"reqid {reqid} is not active"):
        cache.free_reqid(reqid)
    assert cache.step({cache.alloc_reqid(): 10})
    cache.close()
