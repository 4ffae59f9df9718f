"""`HostPool`: spans within a limit, chunks that are pinned once, nothing used again before its copy is done (D5)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest

from slicedkv.errors import CapacityError, DriverError
from slicedkv.memory.gate import Gate
from slicedkv.memory.host_pool import HostPool, HostSpan
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

KIB = 1 << 10
Make = Callable[..., tuple[HostPool, FaultyDriver, FakeDriver]]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[tuple[HostPool, FakeDriver]] = []

    def make(limit: int = 1024 * KIB, chunk: int = 256 * KIB) -> tuple[HostPool, FaultyDriver, FakeDriver]:
        fake = FakeDriver()
        driver = FaultyDriver(fake)
        opened.append((HostPool(driver, Gate(), limit, chunk), fake))
        return opened[-1][0], driver, fake

    yield make
    for pool, fake in opened:
        pool.close()
        pool.close()
        assert (fake.pinned, pool.created_bytes, pool.used_bytes) == ({}, 0, 0)


def take(pool: HostPool, num_bytes: int) -> HostSpan:
    (span,) = pool.take([num_bytes])
    pool.check_integrity()
    return span


def test_spans_do_not_overlap_and_hold_bytes(make: Make) -> None:
    pool, _, _ = make()
    spans = [take(pool, size * KIB) for size in (1, 100, 7, 256, 300)]
    for index, span in enumerate(spans):
        assert span.num_bytes % (4 * KIB) == 0
        ctypes.memset(span.address, index, span.num_bytes)
    for index, span in enumerate(spans):
        assert set(ctypes.string_at(span.address, span.num_bytes)) == {index}
    assert pool.used_bytes == sum(span.num_bytes for span in spans)


def test_chunks_are_pinned_once_and_used_again(make: Make) -> None:
    pool, driver, fake = make()
    for _ in range(20):
        pool.give_back(take(pool, 200 * KIB))
    assert driver.counts["pin"] == 1
    assert sum(fake.pinned.values()) == pool.created_bytes == 256 * KIB
    long = take(pool, 700 * KIB)
    assert sum(fake.pinned.values()) == pool.created_bytes == 956 * KIB
    pool.give_back(long)
    pool.trim()
    assert (fake.pinned, pool.created_bytes) == ({}, 0)


def test_the_limit_is_an_error_with_numbers_and_changes_nothing(make: Make) -> None:
    pool, driver, _ = make(limit=300 * KIB, chunk=64 * KIB)
    kept = take(pool, 60 * KIB)
    with pytest.raises(CapacityError, match="of swap_limit, 307200, are not in use") as caught:
        pool.take([100 * KIB, 100 * KIB, 100 * KIB])
    assert (caught.value.requested, caught.value.available) == (100 * KIB, 40 * KIB)
    pool.take([])
    pool.check_integrity()
    assert pool.used_bytes == kept.num_bytes
    pool.give_back(kept)
    assert take(pool, 300 * KIB).num_bytes == 300 * KIB, "chunks that are empty make room"
    assert driver.counts["pin"] - driver.counts["unpin"] == 1


def test_a_span_is_not_used_again_before_its_copy_is_done(make: Make) -> None:
    pool, _, fake = make(limit=64 * KIB)
    fake.hold_fences = True
    first = take(pool, 64 * KIB)
    first.fence = fake.copy_batch([])
    pool.give_back(first)
    finished: list[bool] = []
    timer = threading.Timer(0.05, lambda: finished.append(True) or fake.finish_fences())
    timer.start()
    second = take(pool, 64 * KIB)
    assert finished, "the only room is under the copy"
    assert second.address == first.address
    timer.join()


def test_a_copy_that_never_ends_is_a_bounded_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicedkv.memory.host_pool.TIMEOUT_S", 0.01)
    pool, _, fake = make(limit=64 * KIB)
    fake.hold_fences = True
    span = take(pool, 64 * KIB)
    span.fence = fake.record_fence()
    pool.give_back(span)
    with pytest.raises(CapacityError):
        pool.take([4 * KIB])
    pool.check_integrity()
    fake.finish_fences()
    take(pool, 4 * KIB)


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(make: Make) -> None:
    pool, driver, fake = make()
    driver.fail("pin", name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.warns(RuntimeWarning, match=r"262144 bytes of host memory could not be pinned .*ulimit -l"):
        span = take(pool, 8 * KIB)
    ctypes.memset(span.address, 1, span.num_bytes)
    assert fake.pinned == {}
    take(pool, 256 * KIB)
    assert sum(fake.pinned.values()) == 256 * KIB


def test_unpinning_that_fails_can_be_tried_again(make: Make) -> None:
    pool, driver, fake = make()
    pool.take([200 * KIB, 200 * KIB])
    driver.fail("unpin", at=2)
    with pytest.raises(DriverError, match="unpin"):
        pool.close()
    assert len(fake.pinned) == 1
    pool.close()


def test_no_bytes_need_no_memory(make: Make) -> None:
    pool, driver, _ = make()
    pool.give_back(take(pool, 0))
    pool.trim()
    assert driver.counts["pin"] == 0
