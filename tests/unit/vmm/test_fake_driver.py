"""The test drivers themselves: books, memory limit, fences under control, injected failures."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from slicedkv.errors import DriverError
from slicedkv.vmm import MappedRange, Run
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

MIB = 2**20
PAGE = 2 * MIB


def test_books() -> None:
    fake = FakeDriver()
    base = fake.reserve(1 << 50)
    handles = fake.create_batch(PAGE, 3)
    fake.map_run(base, (*handles, handles[0]), PAGE)
    assert (fake.reserved, fake.created_bytes, fake.mapped) == (1 << 50, 3 * PAGE, 4)
    fake.unmap_run(base, 4 * PAGE)
    fake.release_batch(handles)
    fake.free_reservation(base, 1 << 50)
    assert (fake.reserved, fake.created_bytes, fake.mapped) == (0, 0, 0)


def test_out_of_memory_is_like_a_gpus() -> None:
    fake = FakeDriver(total_bytes=5 * PAGE)
    fake.create_batch(PAGE, 3)
    with pytest.raises(DriverError) as caught:
        fake.create_batch(PAGE, 3)
    assert (caught.value.op, caught.value.code, caught.value.name) == ("create", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert caught.value.out_of_memory
    assert fake.memory_info() == (2 * PAGE, 5 * PAGE)
    fake.create_batch(PAGE, 2)


def test_a_breach_is_like_a_gpus() -> None:
    with pytest.raises(DriverError) as caught:
        FakeDriver().release(77)
    assert (caught.value.code, caught.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.hint) == (str(caught.value), caught.value.hint)


def test_fences_are_under_the_tests_control() -> None:
    fake = FakeDriver()
    assert fake.fence_done(fake.record_fence())
    fake.hold_fences, fake.current_device, fake.current_stream = True, 1, "side"
    fence = fake.record_fence()
    assert (fence.thread, fence.device, fence.stream) == (threading.get_ident(), 1, "side")
    assert not fake.fence_done(fence)
    assert not fake.wait_fence(fence, 0.01)
    fake.order_after(fence)
    assert fake.ordered == [("side", fence)]
    threading.Timer(0.02, fake.finish_fences).start()
    assert fake.wait_fence(fence, 5)
    late = fake.record_fence()
    fake.synchronize()
    assert fake.fence_done(late)


def test_the_chosen_calls_fail_and_only_they() -> None:
    fake = FakeDriver()
    faulty = FaultyDriver(fake)
    faulty.create(PAGE)
    faulty.fail("create", at=3, name="CUDA_ERROR_OUT_OF_MEMORY", times=2)
    with pytest.raises(DriverError) as caught:
        faulty.create_batch(PAGE, 5)
    assert caught.value.out_of_memory
    assert fake.created_bytes == PAGE
    with pytest.raises(DriverError):
        faulty.create(PAGE)
    faulty.create(PAGE)
    assert faulty.counts["create"] == 6
    assert [op for op, _ in faulty.calls] == ["create"] * 4 + ["release"] * 2 + ["create"] * 2


@pytest.mark.parametrize("op", ["map", "set_access"])
@pytest.mark.parametrize("at", range(1, 6))
def test_every_handle_of_a_run_can_fail(op: str, at: int) -> None:
    fake = FakeDriver()
    faulty = FaultyDriver(fake)
    base = faulty.reserve(16 * PAGE)
    handles = faulty.create_batch(PAGE, 5)
    runs = [Run(base, handles[:2], PAGE), Run(base + 8 * PAGE, handles[2:], PAGE)]
    faulty.fail(op, at=at)
    with pytest.raises(DriverError) as caught:
        faulty.map_batch(runs)
    assert caught.value.op == op
    assert fake.mapped == 0
    faulty.map_batch(runs)
    assert fake.mapped == 5
    faulty.unmap_batch([MappedRange(base, 2 * PAGE), MappedRange(base + 8 * PAGE, 3 * PAGE)])


def test_host_error_names_have_their_codes() -> None:
    faulty = FaultyDriver(FakeDriver())
    faulty.fail("reserve", name="ENOMEM")
    with pytest.raises(DriverError, match=r"ENOMEM \(12\)"):
        faulty.reserve(PAGE)
    faulty.fail("reserve", name="SOMETHING")
    faulty.heal()
    faulty.reserve(PAGE)


def test_delays_and_hooks_run_in_the_calling_thread() -> None:
    faulty = FaultyDriver(FakeDriver(), record=False)
    seen: list[tuple[str, int]] = []

    def hook(op: str, args: tuple[object, ...]) -> None:
        seen.append((op, threading.get_ident()))
        if op == "set_access" and len(seen) > 4:
            raise KeyError("from a hook")

    base, handles = faulty.reserve(4 * PAGE), faulty.create_batch(PAGE, 2)
    faulty.on_call = hook
    faulty.delay("map", 0.02)
    start = time.perf_counter()
    faulty.map_run(base, handles, PAGE)
    assert time.perf_counter() - start >= 0.04
    assert seen == [(op, threading.get_ident()) for op in ("map", "set_access") * 2]
    with pytest.raises(KeyError):
        faulty.map_run(base + 2 * PAGE, handles, PAGE)
    faulty.on_call = None
    faulty.map_run(base + 2 * PAGE, handles, PAGE)
    assert not faulty.calls
