"""Tensors over addresses: who keeps what alive, what is never read, and large offsets."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from slicedkv import views
from slicedkv.errors import ConfigError, StateError
from slicedkv.views import LayerView, tensor_at
from slicedkv.vmm.host import HostDriver

TIB = 2**40
PAGE = 64 << 10
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


class Owner:
    """Something that can be watched."""


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE)
    yield driver
    driver.close()


@pytest.fixture
def place(driver: HostDriver) -> Iterator[int]:
    """An offset beyond 2**39 in a reservation of a TiB, with one page mapped; gives the page's address."""
    base = driver.reserve(TIB)
    address = base + TIB - 3 * PAGE
    driver.map_run(address, (driver.create(PAGE),), PAGE)
    yield address
    driver.unmap_run(address, PAGE)
    driver.free_reservation(base, TIB)


def whole(place: int, owner: object = None) -> torch.Tensor:
    return tensor_at(place - (TIB - 3 * PAGE), TIB, "cpu", owner)


def through_dlpack(place: int, owner: object = None) -> torch.Tensor:
    return views._from_dlpack(place - (TIB - 3 * PAGE), TIB, (views._DL_CPU, 0), owner)


@pytest.mark.parametrize("make", [whole, through_dlpack])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_at_large_offsets(place: int, dtype: torch.dtype, make: type) -> None:
    elements = make(place).view(dtype)
    rows = PAGE // dtype.itemsize // 64
    view = elements.as_strided((rows, 4, 16), (64, 16, 1), (TIB - 3 * PAGE) // dtype.itemsize)
    assert view.data_ptr() == place
    values = (torch.arange(rows * 64) % 7 - 3).reshape(rows, 4, 16).to(dtype)
    view.copy_(values)
    assert torch.equal(view[3:5].float(), values[3:5].float())
    assert torch.equal(view[:, 2].float(), values[:, 2].float())


@pytest.mark.parametrize("make", [whole, through_dlpack])
def test_the_owner_lives_until_the_last_view_is_gone(place: int, make: type) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    tensor = make(place, owner)
    view = tensor.view(torch.float16)[-100:].as_subclass(LayerView)
    del owner, tensor
    gc.collect()
    assert watch() is not None
    del view
    gc.collect()
    assert watch() is None


def test_a_tensor_that_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(capsule: object) -> None:
        raise RuntimeError("no")

    owner = Owner()
    watch = weakref.ref(owner)
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", refuse)
    with pytest.raises(RuntimeError, match="no"):
        views._from_dlpack(4096, 10, (views._DL_CUDA, 0), owner)
    del owner
    gc.collect()
    assert watch() is None
    assert not views._lent


def test_the_deleter_may_be_called_twice() -> None:
    views._drop(12345)
    views._drop(12345)


def test_dlpack_structs_have_the_sizes_of_the_c_header() -> None:
    assert ctypes.sizeof(views._DLTensor) == 48
    assert ctypes.sizeof(views._DLManagedTensor) == 64
    assert views._DLTensor.shape.offset == 24


def test_interpreter_exit_with_living_tensors_is_silent() -> None:
    program = """
import sys
import torch
from slicedkv import views
from slicedkv.vmm.host import HostDriver
driver = HostDriver()
base = driver.reserve(1 << 30)
class Owner:
    pass
torch.first = views.tensor_at(base, 1 << 30, "cpu", Owner())
torch.second = views._from_dlpack(base, 1 << 30, (1, 0), Owner())
sys.modules["kept"] = [torch.second.view(torch.int16), torch.first.view(torch.int16)]
third = torch.second[3:]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_meta_tensors_know_shapes_and_strides() -> None:
    tensor = tensor_at(1 << 40, 1 << 45, "meta", None)
    view = tensor.view(torch.bfloat16).as_strided((4, 1 << 20, 32), (1 << 30, 1024, 1), 64)
    assert (view.stride(), view.storage_offset(), view.device.type) == ((1 << 30, 1024, 1), 64, "meta")
    with pytest.raises(ConfigError, match="xpu"):
        tensor_at(1 << 40, 16, "xpu", None)


class TestLayerView:
    """Most of these would end the process if they read the tensor."""

    @pytest.fixture
    def view(self, place: int) -> torch.Tensor:
        elements = whole(place).view(torch.float32)
        return elements.as_strided((16, 1 << 20, 4, 64), (1 << 28, 256, 64, 1)).as_subclass(LayerView)

    def test_printing_shows_no_values(self, view: torch.Tensor) -> None:
        for text in (repr(view), str(view), f"{view}", f"{view:>10}", "%s" % view):  # noqa: UP031
            assert "LayerView(shape=(16, 1048576, 4, 64)" in text
            assert "float32" in text

    def test_copying_and_pickling_say_what_to_do_instead(self, view: torch.Tensor) -> None:
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps, lambda v: torch.save(v, io.BytesIO())):
            with pytest.raises(StateError, match="copy the rows in use"):
                attempt(view)

    def test_operations_give_plain_tensors(self, view: torch.Tensor) -> None:
        assert type(view) is LayerView
        for result in (view[0], view[:, :3], view.transpose(1, 2), view.view(torch.int32), view.detach()):
            assert type(result) is torch.Tensor
            assert result.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()

    def test_reads_and_writes_where_memory_is(self, place: int) -> None:
        view = whole(place)[-3 * PAGE :].view(torch.float32).view(-1, 8).as_subclass(LayerView)
        view[5] = 2.5
        view[7:9].copy_(torch.ones(2, 8))
        assert torch.equal(view[5:9].sum(1), torch.tensor([20.0, 0.0, 8.0, 8.0]))
        assert torch.nn.functional.linear(torch.ones(1, 8), view[5:6]).item() == 20.0
