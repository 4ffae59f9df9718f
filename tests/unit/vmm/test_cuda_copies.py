"""Copies and pinned host memory of `CudaDriver`, over a fake CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_cuda import FakeCuda
from fake_torch_cuda import FakeTorchCuda

from slicedkv.errors import DriverError, StateError
from slicedkv.vmm import Copy
from slicedkv.vmm.cuda import CudaDriver

Open = Callable[..., tuple[CudaDriver, FakeCuda]]


def test_a_stream_of_their_own_behind_the_callers(open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda) -> None:
    driver, api = open_fake_cuda(index=1)
    fake_torch_cuda.hold_events = True
    fence = driver.copy_batch([Copy(11, 22, 33), Copy(44, 55, 66)])
    (side,) = fake_torch_cuda.side_streams
    assert side.device == 1
    assert api.copies == [(11, 22, 33, side.cuda_stream), (44, 55, 66, side.cuda_stream)]
    (ready,) = side.waits
    assert ready.stream is fake_torch_cuda.current_stream(1)
    assert fence.stream is side
    assert driver.copy_seconds(fence) is None
    fence.done = True
    assert driver.copy_seconds(fence) == 0.0025
    driver.copy_batch([])
    assert fake_torch_cuda.side_streams == [side]
    assert api.cuCtxGetCurrent()[1] == 1001, "left as it was"


def test_one_that_fails_is_an_error_after_those_before_it(open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda) -> None:
    driver, api = open_fake_cuda()
    api.scripted["cuMemcpyAsync"] = [0, 999]
    with pytest.raises(DriverError, match="'copy' failed with CUDA_ERROR_UNKNOWN"):
        driver.copy_batch([Copy(1, 2, 3)] * 3)
    assert len(api.copies) == 1
    assert fake_torch_cuda.side_streams[0].synchronized == 1


def test_none_in_a_capture(open_fake_cuda: Open, fake_torch_cuda: FakeTorchCuda) -> None:
    driver, api = open_fake_cuda()
    fake_torch_cuda.current_stream(0).capturing = True
    with pytest.raises(StateError, match="captures"):
        driver.copy_batch([Copy(1, 2, 3)])
    assert api.copies == []


def test_pinning(open_fake_cuda: Open) -> None:
    driver, api = open_fake_cuda()
    driver.pin(4096, 8192)
    assert api.registered == {4096: 8192}
    with pytest.raises(DriverError, match="'pin' failed"):
        driver.pin(4096, 8192)
    driver.unpin(4096, 8192)
    assert api.registered == {}
    with pytest.raises(DriverError, match="'unpin' failed"):
        driver.unpin(4096, 8192)
