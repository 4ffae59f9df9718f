"""Every driver there is, opened for the contract suite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slicedkv.views import tensor_at
from slicedkv.vmm import Driver, native
from slicedkv.vmm.cuda import CudaDriver
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver
from slicedkv.vmm.host import HostDriver

ALONE_ON_A_GPU = (pytest.mark.gpu, pytest.mark.gpu_alone)
KINDS = [
    "fake",
    "faulty",
    "host-c",
    "host-python",
    "host-64KiB",
    "host-2MiB",
    "fake-cuda-c",
    "fake-cuda-python",
    pytest.param("cuda-c", marks=ALONE_ON_A_GPU),
    pytest.param("cuda-python", marks=ALONE_ON_A_GPU),
]


HOST_PAGES = {"64KiB": 64 << 10, "2MiB": 2 << 20}


@dataclass
class Case:
    """A driver with some addresses, and how to look at what it does."""

    driver: Driver
    real: bool
    used_bytes: Callable[[], int]
    page: int
    base: int = 0

    PAGES = 64

    def at(self, page: int) -> int:
        return self.base + page * self.page

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return tensor_at(address, num_bytes, self.driver.torch_device if self.real else "meta", self.driver)

    def bytes_at(self, page: int, pages: int = 1) -> torch.Tensor:
        return self.tensor(self.at(page), pages * self.page)


def open_case(kind: str, request: pytest.FixtureRequest) -> tuple[Driver, bool, Callable[[], int]]:
    name, _, variant = kind.rpartition("-")
    if kind in {"fake", "faulty"}:
        fake = FakeDriver()
        return fake if kind == "fake" else FaultyDriver(fake), False, lambda: fake.created_bytes
    if name == "fake-cuda":
        driver, api = request.getfixturevalue("open_fake_cuda")(loops=variant)
        return driver, False, lambda: sum(api.handles.values())
    with native.disabled() if variant == "python" else nullcontext():
        opened: Any = HostDriver(HOST_PAGES.get(variant)) if name == "host" else CudaDriver(0)
    if name == "host":
        return opened, True, opened.used_bytes
    return opened, True, lambda: opened.memory_info().total_bytes - opened.memory_info().free_bytes
