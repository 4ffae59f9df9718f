"""What the CUDA driver alone must do on a GPU: fences behind kernels, and peace with graph captures."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from slicedkv.errors import StateError
from slicedkv.vmm import open_driver

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]


def test_a_fence_waits_for_the_kernels_before_it(cuda_device: str) -> None:
    driver = open_driver(cuda_device)
    driver.wait_fence(driver.record_fence(), 5)
    torch.cuda._sleep(200_000_000)
    fence = driver.record_fence()
    assert not driver.fence_done(fence)
    start = time.perf_counter()
    assert not driver.wait_fence(fence, 0.01)
    assert time.perf_counter() - start < 0.05
    assert driver.wait_fence(fence, 5)
    driver.close()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_bound_thread_does_not_disturb_a_graph_capture(cuda_device: str, mode: str) -> None:
    driver = open_driver(cuda_device)
    fence = driver.record_fence()
    base = driver.reserve(64 * driver.granularity)
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            driver.bind_thread()
            while not stop.is_set():
                handles = driver.create_batch(driver.granularity, 4)
                driver.map_run(base, handles, driver.granularity)
                driver.fence_done(fence)
                driver.unmap_run(base, 4 * driver.granularity)
                driver.release_batch(handles)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    value = torch.zeros(1024, device=cuda_device)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(50):
            value += 1
            time.sleep(0.001)
        with pytest.raises(StateError, match="captures"):
            driver.record_fence()
        assert driver.fence_done(fence)
    stop.set()
    thread.join(20)
    graph.replay()
    torch.cuda.synchronize()
    assert not failures
    assert value.unique().tolist() == [50]
    driver.free_reservation(base, 64 * driver.granularity)
    driver.close()
