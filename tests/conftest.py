"""What every test folder shares: the guard of GPU tests, and CUDA drivers over a fake CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_torch_cuda import FakeTorchCuda
from interpreter import patch_once_a_launch

from slicedkv.vmm import native
from slicedkv.vmm.cuda import CudaDriver
from slicedkv.vmm.cuda.streams import TorchStreams

# So that tests find `bench`. Last, for in front `triton_kernels` would hide another package of that name.
sys.path.append(str(Path(__file__).resolve().parents[1]))


def pytest_configure(config: pytest.Config) -> None:
    """Interpret Triton kernels on the CPU unless GPU tests are asked for: decided before Triton is first imported."""
    if "gpu" not in (config.getoption("markexpr") or "").replace("not gpu", ""):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup() -> None:
    """Triton is loaded by the tests that need it, so look before each."""
    patch_once_a_launch()


@pytest.fixture(scope="session")
def cuda_device() -> str:
    """The CUDA device for GPU tests, which fail without one: a run for a GPU must not pass for want of it."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("this test needs an NVIDIA GPU and a torch built for CUDA, and torch.cuda.is_available() is False")
    return "cuda:0"


@pytest.fixture
def fake_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeTorchCuda:
    """Streams and events of a CUDA that is not there."""
    fake = FakeTorchCuda()
    monkeypatch.setattr(TorchStreams, "_cuda", fake)
    return fake


@pytest.fixture
def open_fake_cuda(fake_torch_cuda: FakeTorchCuda) -> Iterator[Callable[..., tuple[CudaDriver, FakeCuda]]]:
    """Open a `CudaDriver` over a `FakeCuda`, with C loops or with Python loops."""
    opened: list[CudaDriver] = []

    def open_driver(*, loops: str = "python", index: int = 0, **options: Any) -> tuple[CudaDriver, FakeCuda]:
        api = FakeCuda(**options)
        if loops == "c":
            opened.append(CudaDriver(index, api))
        else:
            with native.disabled():
                opened.append(CudaDriver(index, api))
        return opened[-1], api

    yield open_driver
    for driver in opened:
        driver.close()
