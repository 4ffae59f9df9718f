"""One suite for every driver: what `slicedkv.vmm.base` promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from driver_cases import Case

from slicedkv.errors import DriverError, StateError
from slicedkv.vmm import Driver, MappedRange, Run
from slicedkv.vmm.faulty import FaultyDriver


def test_sizes_are_what_the_driver_says(case: Case) -> None:
    page = case.driver.granularity
    assert page > 0
    assert page & (page - 1) == 0
    assert case.base % page == 0
    free, total = case.driver.memory_info()
    assert 0 < free <= total


def test_mapped_memory_is_readable_and_writable_at_once(case: Case) -> None:
    handles = case.driver.create_batch(case.page, 3)
    case.driver.map_run(case.at(1), handles, case.page)
    if case.real:
        view = case.bytes_at(1, 3)
        view.copy_(torch.arange(view.numel(), device=view.device) % 251)
        assert torch.equal(view.cpu(), (torch.arange(view.numel()) % 251).to(torch.uint8))
        case.driver.synchronize()
    case.driver.unmap_run(case.at(1), 3 * case.page)
    case.driver.release_batch(handles)


def test_bytes_stay_with_the_handle(case: Case) -> None:
    first, second = case.driver.create_batch(case.page, 2)
    case.driver.map_batch([Run(case.at(0), (first,), case.page), Run(case.at(5), (second,), case.page)])
    if case.real:
        case.bytes_at(0).fill_(1)
        case.bytes_at(5).fill_(2)
        case.driver.synchronize()
    case.driver.unmap_batch([MappedRange(case.at(0), case.page), MappedRange(case.at(5), case.page)])
    case.driver.map_run(case.at(20), (second, first), case.page)
    if case.real:
        assert case.bytes_at(20).unique().tolist() == [2]
        assert case.bytes_at(21).unique().tolist() == [1]
    case.driver.unmap_run(case.at(20), 2 * case.page)
    case.driver.release_batch([first, second])


def test_aliases_see_each_other(case: Case) -> None:
    handle = case.driver.create(case.page)
    case.driver.map_run(case.at(0), (handle, handle), case.page)
    if case.real:
        case.bytes_at(0).fill_(7)
        assert case.bytes_at(1).unique().tolist() == [7]
        case.driver.synchronize()
    case.driver.unmap_run(case.at(0), case.page)
    with pytest.raises(DriverError, match="still mapped"):
        case.driver.release(handle)
    case.driver.unmap_run(case.at(1), case.page)
    case.driver.release(handle)


def test_one_unmap_spans_pages_and_extents(case: Case) -> None:
    pages, extent = case.driver.create_batch(case.page, 2), case.driver.create(4 * case.page)
    case.driver.map_batch([Run(case.at(0), pages, case.page), Run(case.at(2), (extent,), 4 * case.page)])
    case.driver.unmap_run(case.at(1), 5 * case.page)
    case.driver.unmap_run(case.at(0), case.page)
    case.driver.release_batch([*pages, extent])


BREACHES: dict[str, Callable[[Case, int, int], object]] = {
    "map over a mapping": lambda c, e, p: c.driver.map_run(c.at(0), (p,), c.page),
    "map over the middle of an extent": lambda c, e, p: c.driver.map_run(c.at(2), (p,), c.page),
    "map over a later mapping": lambda c, e, p: c.driver.map_run(c.at(7), (p, p, p), c.page),
    "map an unknown handle": lambda c, e, p: c.driver.map_run(c.at(20), (p + 999_999 * c.page,), c.page),
    "map part of a handle": lambda c, e, p: c.driver.map_run(c.at(20), (e,), c.page),
    "map more than a handle": lambda c, e, p: c.driver.map_run(c.at(20), (p,), 2 * c.page),
    "map past the reservation": lambda c, e, p: c.driver.map_run(c.at(Case.PAGES - 1), (p, p), c.page),
    "map before the reservation": lambda c, e, p: c.driver.map_run(c.at(-1), (p,), c.page),
    "map between pages": lambda c, e, p: c.driver.map_run(c.at(20) + 512, (p,), c.page),
    "map twice in a batch": lambda c, e, p: c.driver.map_batch([Run(c.at(20), (p,), c.page)] * 2),
    "unmap nothing": lambda c, e, p: c.driver.unmap_run(c.at(20), c.page),
    "unmap no bytes": lambda c, e, p: c.driver.unmap_run(c.at(0), 0),
    "unmap the head of an extent": lambda c, e, p: c.driver.unmap_run(c.at(0), c.page),
    "unmap the tail of an extent": lambda c, e, p: c.driver.unmap_run(c.at(2), 2 * c.page),
    "unmap more than is mapped": lambda c, e, p: c.driver.unmap_run(c.at(0), 5 * c.page),
    "unmap twice in a batch": lambda c, e, p: c.driver.unmap_batch([MappedRange(c.at(9), c.page)] * 2),
    "release a mapped handle": lambda c, e, p: c.driver.release(e),
    "release an unknown handle": lambda c, e, p: c.driver.release(p + 999_999 * c.page),
    "free with mappings": lambda c, e, p: c.driver.free_reservation(c.base, Case.PAGES * c.page),
    "free part of a reservation": lambda c, e, p: c.driver.free_reservation(c.base, c.page),
    "reserve nothing": lambda c, e, p: c.driver.reserve(0),
    "reserve part of a page": lambda c, e, p: c.driver.reserve(c.page // 2),
    "create nothing": lambda c, e, p: c.driver.create(0),
    "create part of a page": lambda c, e, p: c.driver.create(c.page + 1),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_breaches_are_refused_and_change_nothing(case: Case, breach: str) -> None:
    extent, page = case.driver.create(4 * case.page), case.driver.create(case.page)
    case.driver.map_batch([Run(case.at(0), (extent,), 4 * case.page), Run(case.at(9), (page,), case.page)])
    used = case.used_bytes()
    with pytest.raises(DriverError) as caught:
        BREACHES[breach](case, extent, page)
    assert not caught.value.out_of_memory
    assert case.used_bytes() == used
    if case.driver.name == "fake" and isinstance(case.driver, FaultyDriver) and breach == "unmap twice in a batch":
        assert caught.value.completed == 1  # taken apart into single calls, the first of which was right
        case.driver.map_run(case.at(9), (page,), case.page)
    case.driver.unmap_batch([MappedRange(case.at(0), 4 * case.page), MappedRange(case.at(9), case.page)])
    case.driver.release_batch([extent, page])
    case.driver.free_reservation(case.base, Case.PAGES * case.page)


def test_a_double_release_is_refused_after_the_others_were_released(case: Case) -> None:
    first, second = case.driver.create_batch(case.page, 2)
    before = case.used_bytes()
    with pytest.raises(DriverError, match="unknown"):
        case.driver.release_batch([first, first, second])
    assert before - case.used_bytes() >= case.page


@pytest.mark.parametrize("op", ["create", "map", "set_access"])
def test_every_failure_in_the_middle_is_undone(case: Case, op: str) -> None:
    faulty = FaultyDriver(case.driver)
    count = 5
    for at in range(1, count + 1):
        used = case.used_bytes()
        faulty.fail(op, at=at, name="CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(DriverError) as caught:
            _fill(faulty, case, count)
        assert caught.value.op == op
        assert case.used_bytes() == used
        faulty.heal()
        _empty(faulty, case, _fill(faulty, case, count))
    assert case.used_bytes() == used


def _fill(driver: Driver, case: Case, count: int) -> list[int]:
    """Create pages and map them in two runs, or do nothing."""
    handles = driver.create_batch(case.page, count)
    try:
        driver.map_batch([Run(case.at(0), handles[:2], case.page), Run(case.at(30), handles[2:], case.page)])
    except DriverError:
        driver.release_batch(handles)
        raise
    return handles


def _empty(driver: Driver, case: Case, handles: list[int]) -> None:
    driver.unmap_batch(
        [MappedRange(case.at(0), 2 * case.page), MappedRange(case.at(30), (len(handles) - 2) * case.page)]
    )
    driver.release_batch(handles)


def test_a_failed_unmap_says_how_far_it_came(case: Case) -> None:
    handles = case.driver.create_batch(case.page, 3)
    case.driver.map_run(case.at(0), handles, case.page)
    faulty = FaultyDriver(case.driver)
    faulty.fail("unmap", at=3)
    with pytest.raises(DriverError) as caught:
        faulty.unmap_batch([MappedRange(case.at(page), case.page) for page in range(3)])
    assert caught.value.completed == 2
    case.driver.unmap_run(case.at(2), case.page)
    case.driver.release_batch(handles)


def test_release_gives_memory_back(case: Case) -> None:
    before = case.used_bytes()
    size = max(case.page, 16 << 20)
    handles = case.driver.create_batch(size, 4)
    assert case.used_bytes() - before >= 4 * size
    case.driver.release_batch(handles)
    assert case.used_bytes() == before


def test_running_out_is_an_error_and_the_next_call_succeeds(case: Case) -> None:
    size = 1 << 30
    too_many = case.driver.memory_info().free_bytes // size + 1
    if case.real and case.driver.name == "cuda":
        too_many = case.driver.memory_info().total_bytes // size + 1
    used = case.used_bytes()
    with pytest.raises(DriverError) as caught:
        case.driver.create_batch(size, too_many)
    assert caught.value.out_of_memory
    assert case.used_bytes() == used
    case.driver.release(case.driver.create(case.page))


def test_a_huge_reservation_is_quick_and_usable_at_its_end(case: Case) -> None:
    size = 12 << 40
    start = time.perf_counter()
    base = case.driver.reserve(size)
    whole = case.tensor(base, size)
    assert time.perf_counter() - start < 1
    assert whole.numel() == size
    handle = case.driver.create(case.page)
    case.driver.map_run(base + size - case.page, (handle,), case.page)
    if case.real:
        whole[-case.page :].fill_(9)
        assert int(whole[-1]) == 9
        case.driver.synchronize()
    case.driver.unmap_run(base + size - case.page, case.page)
    case.driver.release(handle)
    case.driver.free_reservation(base, size)


def test_reservations_do_not_overlap(case: Case) -> None:
    size = 8 * case.page
    bases = sorted(case.driver.reserve(size) for _ in range(5))
    assert all(after - before >= size for before, after in pairwise(bases))
    for base in bases:
        case.driver.free_reservation(base, size)
    with pytest.raises(DriverError):
        case.driver.free_reservation(bases[0], size)


def test_empty_batches_do_nothing(case: Case) -> None:
    assert case.driver.create_batch(case.page, 0) == []
    case.driver.map_batch([])
    case.driver.map_run(case.at(0), (), case.page)
    case.driver.unmap_batch([])
    case.driver.release_batch([])


def test_a_fresh_thread_can_do_everything(case: Case) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            case.driver.bind_thread()
            case.driver.bind_thread()
            _empty(case.driver, case, _fill(case.driver, case, 4))
            assert case.driver.wait_fence(case.driver.record_fence(), 5)
            case.driver.memory_info()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failures


def test_threads_may_work_side_by_side(case: Case) -> None:
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for _ in range(10):
                handles = case.driver.create_batch(case.page, 3)
                case.driver.map_run(case.at(first), handles, case.page)
                case.driver.unmap_run(case.at(first), 3 * case.page)
                case.driver.release_batch(handles)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures


def test_fences_are_done_when_the_work_is(case: Case) -> None:
    fence = case.driver.record_fence()
    case.driver.order_after(fence)
    case.driver.synchronize()
    assert case.driver.fence_done(fence)
    assert case.driver.wait_fence(fence, 0)
    assert case.driver.relieve_pressure() in {True, False}


def test_close_twice_and_what_is_legal_afterwards(case: Case) -> None:
    case.driver.create(case.page)
    case.driver.close()
    case.driver.close()
    with pytest.raises(StateError, match="closed"):
        case.driver.create(case.page)
    case.driver.free_reservation(case.base, Case.PAGES * case.page)
