"""`CudaDriver` over a fake CUDA: start-up, threads, fences, retries and undo."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_torch_cuda import FakeTorchCuda

from slicedkv.errors import BackendUnavailableError, DriverError, StateError
from slicedkv.vmm import MappedRange, Run
from slicedkv.vmm.cuda import CudaDriver, calls

PAGE = 2 << 20
Open = Callable[..., tuple[CudaDriver, FakeCuda]]

PROBES = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuDevicePrimaryCtxRetain",
]


@pytest.fixture(params=["c", "python"])
def loops(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestStartUp:
    @pytest.mark.parametrize("code", [1, 100, 999, 12345])
    @pytest.mark.parametrize("probe", PROBES)
    def test_a_bad_answer_is_one_clear_error(self, probe: str, code: int) -> None:
        api = FakeCuda()
        api.scripted[probe] = [code] * 2
        with pytest.raises(BackendUnavailableError, match=rf"cuda:0 cannot be used, {probe} answered .*\({code}\)"):
            CudaDriver(0, api)

    @pytest.mark.parametrize("error", [RuntimeError("no libcuda"), OSError("no file"), AttributeError("gone")])
    def test_a_missing_library_says_what_to_install(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: FakeCuda, flags: int) -> None:
            raise error

        monkeypatch.setattr(FakeCuda, "cuInit", fail)
        with pytest.raises(BackendUnavailableError, match=r"Install the NVIDIA driver, and cuda-bindings >= 12\.9\.1"):
            CudaDriver(0, FakeCuda())

    def test_missing_bindings_say_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise ImportError(name)

        monkeypatch.setattr("slicedkv.vmm.cuda.driver.import_module", missing)
        with pytest.raises(BackendUnavailableError, match="pip install"):
            CudaDriver(0)

    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(BackendUnavailableError, match="there are 2 CUDA devices"):
            CudaDriver(2, FakeCuda())

    def test_a_device_without_virtual_memory(self) -> None:
        api = FakeCuda()
        api.values["cuDeviceGetAttribute"] = 0
        with pytest.raises(BackendUnavailableError, match="virtual memory management"):
            CudaDriver(0, api)

    def test_the_minimum_granularity_stands_in_for_the_recommended(self, open_fake_cuda: Open) -> None:
        api = FakeCuda()
        api.scripted["cuMemGetAllocationGranularity"] = [1]
        assert CudaDriver(0, api).granularity == PAGE
        assert api.calls["cuMemGetAllocationGranularity"] == 2

    @pytest.mark.parametrize("answer", [0, 3 << 20, -1])
    def test_a_senseless_granularity(self, answer: int) -> None:
        api = FakeCuda()
        api.values["cuMemGetAllocationGranularity"] = answer
        with pytest.raises(BackendUnavailableError, match="granularity"):
            CudaDriver(0, api)

    @pytest.mark.parametrize("script", [{"scripted": [1]}, {"values": 0}])
    def test_without_entry_points_python_does_the_work(self, script: dict[str, Any]) -> None:
        api = FakeCuda()
        for where, answer in script.items():
            getattr(api, where)["cuGetProcAddress"] = answer
        driver = CudaDriver(0, api)
        assert isinstance(driver._calls, calls.PythonCalls)
        driver.release(driver.create(PAGE))

    def test_the_bindings_are_not_imported_by_the_module(self) -> None:
        assert "cuda.bindings" not in vars(importlib.import_module("slicedkv.vmm.cuda.driver"))

    def test_the_context_is_given_back_once(self, open_fake_cuda: Open) -> None:
        driver, api = open_fake_cuda()
        assert api.contexts == 1
        driver.close()
        driver.close()
        assert api.contexts == 0


class TestThreads:
    def test_a_thread_without_a_context_gets_one(self, open_fake_cuda: Open) -> None:
        driver, api = open_fake_cuda(index=1)
        seen: list[Any] = []

        def work() -> None:
            driver.release(driver.create(PAGE))
            driver.release(driver.create(PAGE))
            seen.append(api.thread.context)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [1001]
        assert api.calls["cuCtxSetCurrent"] == 1
        assert api.calls["cuCtxGetCurrent"] == 1

    def test_a_context_that_is_there_stays(self, open_fake_cuda: Open) -> None:
        driver, api = open_fake_cuda(index=1)
        api.thread.context = 1000
        driver.reserve(PAGE)
        assert driver.memory_info() == (1 << 30, 1 << 30)
        assert api.thread.context == 1000

    def test_a_bound_thread_is_in_relaxed_mode(self, open_fake_cuda: Open) -> None:
        driver, api = open_fake_cuda(index=1)
        driver.bind_thread()
        driver.bind_thread()
        assert (api.thread.mode, api.thread.context) == (2, 1001)
        driver.fence_done(driver.record_fence())
        assert api.calls["cuThreadExchangeStreamCaptureMode"] == 1

    def test_asking_for_a_fence_leaves_the_capture_mode_as_it_was(
        self, open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda
    ) -> None:
        driver, api = open_fake_cuda()
        modes: list[int] = []
        fence: Any = driver.record_fence()
        fence.query = lambda: modes.append(api.thread.mode) or True
        assert driver.fence_done(fence)
        assert (modes, api.thread.mode) == ([2], 0)


class TestFences:
    def test_a_fence_is_on_the_drivers_device_whatever_is_current(
        self, open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda
    ) -> None:
        driver, api = open_fake_cuda(index=1)
        for current in (0, 1):
            fake_torch_cuda.current = current
            api.thread.context = 1000 + current
            fence: Any = driver.record_fence()
            assert fence.stream.device == 1
            driver.order_after(fence)
            driver.synchronize()
            assert fake_torch_cuda.current == current
            assert api.thread.context == 1000 + current
        assert len(fake_torch_cuda.streams[1].waits) == 2
        assert not fake_torch_cuda.current_stream(0).waits
        assert api.synchronized == [1001, 1001]

    def test_no_fence_in_a_capture(self, open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda) -> None:
        driver, _ = open_fake_cuda(index=1)
        fake_torch_cuda.current_stream(0).capturing = True
        driver.record_fence()
        fake_torch_cuda.current_stream(1).capturing = True
        with pytest.raises(StateError, match="cuda:1 captures"):
            driver.record_fence()

    def test_waiting_has_a_bound(self, open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda) -> None:
        driver, _ = open_fake_cuda()
        fake_torch_cuda.hold_events = True
        fence: Any = driver.record_fence()
        start = time.perf_counter()
        assert not driver.wait_fence(fence, 0.03)
        assert 0.03 <= time.perf_counter() - start < 0.5
        threading.Timer(0.02, lambda: setattr(fence, "done", True)).start()
        assert driver.wait_fence(fence, 5)

    def test_pressure_is_relieved_when_torch_has_something(
        self, open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda
    ) -> None:
        driver, _ = open_fake_cuda()
        assert not driver.relieve_pressure()
        fake_torch_cuda.reserved = [10, 4]
        fake_torch_cuda.current_stream(0).capturing = True
        assert not driver.relieve_pressure()
        fake_torch_cuda.current_stream(0).capturing = False
        assert driver.relieve_pressure()
        fake_torch_cuda.initialized, fake_torch_cuda.reserved = False, [10, 4]
        assert not driver.relieve_pressure()


class TestMemoryCalls:
    def test_not_ready_passes(self, open_fake_cuda: Open, loops: str) -> None:
        driver, api = open_fake_cuda(loops=loops)
        base, handle = driver.reserve(PAGE), driver.create(PAGE)
        api.scripted["cuMemSetAccess"] = [600] * 3
        driver.map_run(base, (handle,), PAGE)
        assert api.calls["cuMemSetAccess"] == 4
        assert set(api.accessible) == {base}
        driver.unmap_run(base, PAGE)

    def test_not_ready_for_ever_is_an_error_in_bounded_time(
        self, open_fake_cuda: Open, loops: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(calls, "ACCESS_TRIES", 20)
        driver, api = open_fake_cuda(loops=loops)
        base, handles = driver.reserve(2 * PAGE), driver.create_batch(PAGE, 2)
        api.scripted["cuMemSetAccess"] = [0] + [600] * 1000
        with pytest.raises(DriverError, match="NOT_READY") as caught:
            driver.map_run(base, handles, PAGE)
        assert (caught.value.op, caught.value.code) == ("set_access", 600)
        assert api.calls["cuMemSetAccess"] == 21
        assert not api.mappings
        api.scripted.clear()
        driver.map_run(base, handles, PAGE)
        driver.unmap_run(base, 2 * PAGE)

    @pytest.mark.parametrize("at", range(5))
    @pytest.mark.parametrize(("call", "op"), [("cuMemMap", "map"), ("cuMemSetAccess", "set_access")])
    def test_every_failure_of_a_map_batch_is_undone(
        self, open_fake_cuda: Open, loops: str, call: str, op: str, at: int
    ) -> None:
        driver, api = open_fake_cuda(loops=loops)
        base, handles = driver.reserve(16 * PAGE), driver.create_batch(PAGE, 5)
        runs = [Run(base, handles[:2], PAGE), Run(base + 8 * PAGE, handles[2:], PAGE)]
        api.scripted[call] = [0] * at + [2]
        with pytest.raises(DriverError) as caught:
            driver.map_batch(runs)
        assert (caught.value.op, caught.value.name) == (op, "CUDA_ERROR_OUT_OF_MEMORY")
        assert not api.mappings
        driver.map_batch(runs)
        assert len(api.accessible) == 5
        driver.unmap_batch([MappedRange(base, 2 * PAGE), MappedRange(base + 8 * PAGE, 3 * PAGE)])
        driver.release_batch(handles)
        assert not api.handles

    @pytest.mark.parametrize("at", range(4))
    def test_every_failure_of_create_is_undone(self, open_fake_cuda: Open, loops: str, at: int) -> None:
        driver, api = open_fake_cuda(loops=loops)
        api.scripted["cuMemCreate"] = [0] * at + [2]
        with pytest.raises(DriverError) as caught:
            driver.create_batch(PAGE, 4)
        assert caught.value.out_of_memory
        assert not api.handles
        assert len(driver.create_batch(PAGE, 4)) == len(api.handles) == 4

    def test_a_failed_unmap_keeps_the_rest_on_the_books(self, open_fake_cuda: Open, loops: str) -> None:
        driver, api = open_fake_cuda(loops=loops)
        base, handles = driver.reserve(4 * PAGE), driver.create_batch(PAGE, 4)
        driver.map_run(base, handles, PAGE)
        ranges = [MappedRange(base + page * PAGE, PAGE) for page in range(4)]
        api.scripted["cuMemUnmap"] = [0, 0, 999]
        with pytest.raises(DriverError) as caught:
            driver.unmap_batch(ranges)
        assert (caught.value.completed, caught.value.name) == (2, "CUDA_ERROR_UNKNOWN")
        driver.map_run(base, handles[:2], PAGE)
        driver.unmap_run(base, 4 * PAGE)

    def test_a_failed_release_is_told_after_the_others(self, open_fake_cuda: Open, loops: str) -> None:
        driver, api = open_fake_cuda(loops=loops)
        handles = driver.create_batch(PAGE, 3)
        api.scripted["cuMemRelease"] = [4321]
        with pytest.raises(DriverError, match=r"an unknown CUresult \(4321\)"):
            driver.release_batch(handles)
        assert list(api.handles) == handles[:1]

    def test_reserve_failures(self, open_fake_cuda: Open) -> None:
        driver, api = open_fake_cuda()
        api.scripted["cuMemAddressReserve"] = [2]
        with pytest.raises(DriverError) as caught:
            driver.reserve(PAGE)
        assert (caught.value.op, caught.value.out_of_memory) == ("reserve", True)
        driver.free_reservation(driver.reserve(PAGE), PAGE)
        assert not api.reservations
