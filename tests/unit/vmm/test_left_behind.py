"""What a failed map could not undo: the driver says so, nobody maps there, and all of it comes back at the end."""

from __future__ import annotations

import ctypes
import errno
import gc
import pickle
import signal
from contextlib import nullcontext
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_torch_cuda import FakeTorchCuda
from rig import PAGE, QUIET, SHAPE, TOKENS

from slicedkv import DriverError, PagePool, SlicedKVCache
from slicedkv.errors import LostSlotsError
from slicedkv.vmm import Run, host, native
from slicedkv.vmm.cuda import CudaDriver
from slicedkv.vmm.cuda.streams import TorchStreams
from slicedkv.vmm.host import HostDriver

HOST_PAGE = 65536


@pytest.fixture(params=["python", "c"])
def fake_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDriver, FakeCuda]:
    monkeypatch.setattr(TorchStreams, "_cuda", FakeTorchCuda())
    api = FakeCuda(total_bytes=1 << 30)
    with native.disabled() if request.param == "python" else nullcontext():
        driver = CudaDriver(0, api)
    driver.torch_device = "meta"
    return driver, api


@pytest.mark.parametrize(("call", "op"), [("cuMemMap", "map"), ("cuMemSetAccess", "set_access")])
def test_what_a_failed_map_leaves_behind_is_nobodys(fake_cuda: tuple[CudaDriver, FakeCuda], call: str, op: str) -> None:
    driver, api = fake_cuda
    base, handles = driver.reserve(16 * PAGE), driver.create_batch(PAGE, 3)
    api.scripted[call] = [0, 0, 2]
    api.scripted["cuMemUnmap"] = [999]
    with pytest.raises(DriverError) as caught:
        driver.map_run(base, handles, PAGE)
    assert (caught.value.op, caught.value.left_behind) == (op, True)
    assert pickle.loads(pickle.dumps(caught.value)).left_behind
    left = 2 + (op == "set_access")
    assert len(api.mappings) == left
    with pytest.raises(DriverError, match="mapped already"):
        driver.map_run(base, driver.create_batch(PAGE, 1), PAGE)
    with pytest.raises(DriverError, match="still mapped"):
        driver.release(handles[0])
    driver.unmap_run(base, left * PAGE)
    assert not api.mappings
    driver.release_batch(handles)


@pytest.mark.parametrize("others", [0, 1])
def test_what_was_left_behind_comes_back_at_the_end(fake_cuda: tuple[CudaDriver, FakeCuda], others: int) -> None:
    driver, api = fake_cuda
    pool = PagePool(driver, page_bytes=PAGE, memory_limit=64 * PAGE, extent_pages=1)
    cache = SlicedKVCache(**SHAPE | QUIET, pool=pool)
    second = [SlicedKVCache(**SHAPE | QUIET, pool=pool) for _ in range(others)]
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({other: 40})
    before = len(api.mappings)
    api.scripted["cuMemMap"] = [0] * 5 + [999]  # K of four pages and one page of V
    api.scripted["cuMemUnmap"] = [999]
    with pytest.raises(LostSlotsError, match=rf"reqids \[{reqid}\]"):
        cache.step({reqid: 4 * TOKENS})
    api.scripted.clear()
    assert len(api.mappings) - before == 5
    assert driver._ledger.mapped_count == len(api.mappings)
    cache.check_integrity()
    cache.close()
    for one in second:
        one.set_memory_limit(4 * PAGE)
        one.trim()
        one.check_integrity()
        one.close()
    pool.trim()
    assert (len(api.mappings), len(api.handles), pool.created_pages) == (0, 0, 0)
    cache = one = second = None
    gc.collect()
    assert not api.reservations
    driver.close()


def test_an_interrupt_while_access_is_tried_again_leaves_nothing(
    fake_cuda: tuple[CudaDriver, FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, api = fake_cuda
    base, handles = driver.reserve(4 * PAGE), driver.create_batch(PAGE, 3)
    real = driver._map

    def interrupted(mappings: Any) -> Any:
        real(mappings)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(driver, "_map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.map_run(base, handles, PAGE)
    monkeypatch.undo()
    assert not api.mappings
    driver.map_run(base, handles, PAGE)
    driver.unmap_run(base, 3 * PAGE)
    driver.release_batch(handles)


def test_the_host_says_what_it_could_not_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    with native.disabled():
        driver = HostDriver(HOST_PAGE)
    base, handles = driver.reserve(8 * HOST_PAGE), driver.create_batch(HOST_PAGE, 4)
    real, calls = host._mmap, []

    def short(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) <= 2:
            return real(*arguments)
        ctypes.set_errno(errno.ENOMEM)  # areas run out, also for covering
        return None

    monkeypatch.setattr(host, "_mmap", short)
    with pytest.raises(DriverError) as caught:
        driver.map_batch([Run(base, handles, HOST_PAGE)])
    monkeypatch.undo()
    assert caught.value.left_behind
    assert driver._ledger.mapped_count == 2
    driver.unmap_run(base, 2 * HOST_PAGE)
    driver.map_run(base, handles, HOST_PAGE)
    driver.unmap_run(base, 4 * HOST_PAGE)
    driver.release_batch(handles)
    driver.free_reservation(base, 8 * HOST_PAGE)
    driver.close()
