"""Copies to and from host memory, for every driver: the bytes, their order, what a failure leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from driver_cases import Case

from slicedkv.errors import DriverError
from slicedkv.vmm import Copy, Driver
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver


@contextmanager
def pinned(driver: Driver, buffer: ctypes.Array[ctypes.c_char]) -> Iterator[int]:
    address = ctypes.addressof(buffer)
    driver.pin(address, len(buffer))
    yield address
    driver.unpin(address, len(buffer))


def test_bytes_go_out_and_come_back_elsewhere(case: Case) -> None:
    driver, num_bytes, shift = case.driver, case.page + 1000, 24
    handles = driver.create_batch(case.page, 4)
    driver.map_run(case.at(0), handles, case.page)
    with pinned(driver, ctypes.create_string_buffer(2 * case.page)) as host:
        if case.real:
            view = case.bytes_at(0, 4)
            view.fill_(0)
            view[shift : shift + num_bytes] = (torch.arange(num_bytes, device=view.device) % 251).to(torch.uint8)
        first, rest = case.at(0) + shift, num_bytes - 100
        out = driver.copy_batch([Copy(host, first, rest), Copy(host + rest, first + rest, 100)])
        driver.order_after(out)
        back = driver.copy_batch([Copy(case.at(2) + 7, host, num_bytes)])
        assert driver.wait_fence(back, 5.0)
        assert driver.fence_done(out)
        for fence in (out, back):
            seconds = driver.copy_seconds(fence)
            assert seconds is not None
            assert 0 <= seconds < 5
        if case.real:
            assert torch.equal(view[2 * case.page + 7 :][:num_bytes], view[shift:][:num_bytes])
            assert int(view[2 * case.page + 6]) == int(view[2 * case.page + 7 + num_bytes]) == 0
            driver.synchronize()
    driver.unmap_run(case.at(0), 4 * case.page)
    driver.release_batch(handles)


def test_no_copy_is_a_fence_too(case: Case) -> None:
    assert case.driver.wait_fence(case.driver.copy_batch([]), 5.0)


@pytest.mark.parametrize("op", ["copy", "pin", "unpin"])
def test_each_can_be_made_to_fail(op: str) -> None:
    driver = FaultyDriver(FakeDriver())
    driver.fail(op)
    calls = {"copy": lambda: driver.copy_batch([Copy(1, 2, 3)]), "pin": lambda: driver.pin(1, 2)}
    calls["unpin"] = lambda: driver.unpin(1, 2)
    with pytest.raises(DriverError, match=op):
        calls[op]()
    assert (driver.inner.copies, driver.inner.pinned) == ([], {})  # type: ignore[attr-defined]
