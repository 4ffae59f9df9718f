"""Mappings that are read-only, for every driver: each on its own, reading as before, writing not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver_cases import Case
from fake_cuda import FakeCuda
from read_only import is_writable

from slicedkv.errors import DriverError
from slicedkv.vmm import Run
from slicedkv.vmm.base import Driver
from slicedkv.vmm.cuda import CudaDriver
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

Open = Callable[..., tuple[CudaDriver, FakeCuda]]


def writable_pages(case: Case, pages: int) -> list[bool]:
    """Which of the first pages can be written, where that can be seen."""
    inner = case.driver.inner if isinstance(case.driver, FaultyDriver) else case.driver
    if isinstance(inner, FakeDriver):
        return [case.at(page) not in inner.protected for page in range(pages)]
    if case.driver.name == "host":
        return [is_writable(case.at(page)) for page in range(pages)]
    api = case.driver._api  # type: ignore[attr-defined]
    return [api.accessible[case.at(page)] == 3 for page in range(pages)]


def is_hardware(case: Case) -> bool:
    """A GPU, which may refuse, and which a write that faults would end."""
    return case.driver.name == "cuda" and case.real


def test_each_mapping_is_read_only_on_its_own(case: Case) -> None:
    if is_hardware(case) and not case.driver.can_protect:
        with pytest.raises(DriverError, match="cannot make mappings read-only"):
            case.driver.protect(case.at(0), case.page, writable=False)
        return
    driver, handles = case.driver, case.driver.create_batch(case.page, 3)
    assert driver.can_protect
    driver.map_batch([Run(case.at(0), handles, case.page), Run(case.at(3), handles[:1], case.page)])
    if case.real:
        case.bytes_at(0, 3).fill_(7)
        driver.synchronize()
    driver.protect(case.at(0), 2 * case.page, writable=False)
    if case.real:
        assert case.bytes_at(0, 4).unique().tolist() == [7]
    if not is_hardware(case):
        assert writable_pages(case, 4) == [False, False, True, True], "the alias of the first is another mapping"
    driver.protect(case.at(0), 2 * case.page, writable=False)
    driver.protect(case.at(1), 2 * case.page, writable=True)
    if not is_hardware(case):
        assert writable_pages(case, 4) == [False, True, True, True]
    driver.unmap_run(case.at(0), 4 * case.page)
    driver.map_run(case.at(0), handles, case.page)
    if case.real:
        case.bytes_at(0, 3).fill_(8)
        driver.synchronize()
    else:
        assert writable_pages(case, 3) == [True] * 3, "what is mapped anew is writable"
    driver.unmap_run(case.at(0), 3 * case.page)
    driver.release_batch(handles)


BREACHES: dict[str, Callable[[Case], None]] = {
    "nothing": lambda c: c.driver.protect(c.at(20), c.page, writable=False),
    "no bytes": lambda c: c.driver.protect(c.at(0), 0, writable=False),
    "the head of an extent": lambda c: c.driver.protect(c.at(0), c.page, writable=True),
    "the tail of an extent": lambda c: c.driver.protect(c.at(2), 2 * c.page, writable=False),
    "more than is mapped": lambda c: c.driver.protect(c.at(0), 5 * c.page, writable=False),
    "between pages": lambda c: c.driver.protect(c.at(0) + 512, c.page, writable=False),
    "past the reservation": lambda c: c.driver.protect(c.at(Case.PAGES), c.page, writable=True),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_breaches_are_refused_and_change_nothing(case: Case, breach: str) -> None:
    extent = case.driver.create(4 * case.page)
    case.driver.map_run(case.at(0), (extent,), 4 * case.page)
    with pytest.raises(DriverError, match="protect"):
        BREACHES[breach](case)
    if not is_hardware(case):
        assert writable_pages(case, 1) == [True]
    case.driver.unmap_run(case.at(0), 4 * case.page)
    case.driver.release(extent)


def test_it_can_be_made_to_fail() -> None:
    fake = FakeDriver()
    driver, page = FaultyDriver(fake), fake.granularity
    base, handle = driver.reserve(page), driver.create(page)
    driver.map_run(base, (handle,), page)
    driver.fail("protect")
    with pytest.raises(DriverError, match="protect"):
        driver.protect(base, page, writable=False)
    assert fake.protected == set()
    driver.protect(base, page, writable=False)
    assert fake.protected == {base}


@pytest.mark.parametrize("loops", ["c", "python"])
@pytest.mark.parametrize("code", [0, 1, 801])
def test_a_cuda_driver_finds_out_once_and_leaves_nothing_behind(open_fake_cuda: Open, loops: str, code: int) -> None:
    driver, api = open_fake_cuda(loops=loops)
    api.takes_read_only = code != 801
    api.scripted["cuMemSetAccess"] = [0, code] if code == 1 else []
    assert driver.can_protect is (code == 0)
    calls = api.calls["cuMemSetAccess"]
    assert driver.can_protect is (code == 0)
    assert api.calls["cuMemSetAccess"] == calls == 3
    assert (api.handles, api.mappings, api.reservations) == ({}, {}, {})


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemAddressReserve"])
def test_what_cannot_be_found_out_is_an_error_and_asked_again(open_fake_cuda: Open, call: str) -> None:
    driver, api = open_fake_cuda()
    api.scripted[call] = [2]
    with pytest.raises(DriverError):
        _ = driver.can_protect
    assert (api.handles, api.mappings, api.reservations) == ({}, {}, {})
    assert driver.can_protect


def test_an_interrupt_while_finding_out_leaves_nothing_behind(
    open_fake_cuda: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, api = open_fake_cuda()

    def interrupted(*range_: int, writable: bool) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(driver, "_protect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = driver.can_protect
    assert (api.handles, api.mappings, api.reservations) == ({}, {}, {})
    assert driver.can_protect


def test_a_driver_that_cannot_says_so(open_fake_cuda: Open) -> None:
    driver, api = open_fake_cuda()
    api.takes_read_only = False
    base, handle = driver.reserve(driver.granularity), driver.create(driver.granularity)
    driver.map_run(base, (handle,), driver.granularity)
    for protect in (driver.protect, lambda *range_, writable: Driver.protect(driver, *range_, writable=writable)):
        with pytest.raises(DriverError, match="cannot make mappings read-only"):
            protect(base, driver.granularity, writable=False)


def test_not_ready_passes(open_fake_cuda: Open) -> None:
    driver, api = open_fake_cuda()
    assert driver.can_protect
    base, handle = driver.reserve(driver.granularity), driver.create(driver.granularity)
    driver.map_run(base, (handle,), driver.granularity)
    api.scripted["cuMemSetAccess"] = [600, 600]
    driver.protect(base, driver.granularity, writable=False)
    assert api.accessible == {base: 1}
