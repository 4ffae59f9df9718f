"""Tensors over addresses, mapped or not, and the views a cache shows: its raw planes and its layer slices.

Most of this memory has nothing behind it. torch copies, pickles and shares a tensor by its storage, which is the whole
plane even for a view of one row. So the storage itself refuses, whichever view asks it to.

The only module above the drivers that cares which kind of memory an address is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.serialization
import torch.utils.dlpack

from .errors import ConfigError, StateError
from .layout import K, KVLayout, V
from .memory.backing import Backing

__all__ = ["KVViews", "LayerView", "layer_view", "tensor_at"]


def tensor_at(address: int, num_bytes: int, torch_device: str, owner: object) -> torch.Tensor:
    """Return a tensor of uint8 over ``[address, address + num_bytes)``, mapped or not.

    Touches no byte and does not synchronise. Thread-safe.

    Parameters
    ----------
    address, num_bytes : int
    torch_device : str
        The driver's `torch_device`: "cpu", "cuda:<index>" or "meta".
    owner : object
        The tensor and its views keep it alive.

    Raises
    ------
    ConfigError
        A tensor cannot lie over addresses of that device.
    """
    with torch.inference_mode(False):  # made in that mode, it could later be written in it only
        tensor = _over(address, num_bytes, torch.device(torch_device), owner)
    # While any view lives, whoever asks it for its storage gets this very object from torch.
    tensor.untyped_storage().__class__ = _Storage
    return tensor


def _over(address: int, num_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    if device.type == "cpu":
        buffer: Any = (ctypes.c_char * num_bytes).from_address(address)
        buffer.owner = owner
        return torch.frombuffer(buffer, dtype=torch.uint8)
    if device.type == "cuda":
        return _from_dlpack(address, num_bytes, (_DL_CUDA, device.index or 0), owner)
    if device.type == "meta":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    raise ConfigError(f"no tensor can lie over addresses of '{device}'")


class _Storage(torch.UntypedStorage):
    """A storage that may have memory behind few of its bytes. Views read rows of it; nobody reads it as a whole."""

    def __repr__(self) -> str:
        return f"<{self.nbytes()} bytes of a cache on {self.device}, not shown: most have no memory behind them>"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise StateError(
            f"torch would take all of a cache's memory here, {self.nbytes()} bytes, not just the rows it was given, "
            "and most has nothing behind it; give it a copy of the rows in use: rows.clone()"
        )

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = _refuse
    __iter__ = clone = tolist = cpu = cuda = to = pin_memory = byteswap = _to = _refuse
    share_memory_ = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = _refuse
    _write_file = _refuse


def _refuse_to_save(storage: object) -> None:
    """Refuse in `torch.save`, which calls no method of a storage: it asks this function where the storage lies."""
    if isinstance(storage, _Storage):
        storage._refuse()


torch.serialization.register_package(0, _refuse_to_save, lambda storage, location: None)


# --- DLPack: the one public way to a CUDA tensor over memory that is not there yet ----------------------------------
# Structs and device numbers as in dlpack.h, version 0.8 of the specification.

_DL_CPU, _DL_CUDA, _DL_UINT = 1, 2, 1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_lent: dict[int, tuple[_DLManagedTensor, object]] = {}
"""Structs whose addresses torch has, with the owners of the memory lent. The deleter takes them out."""

_drop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda address, _pop=_lent.pop: _pop(address, None) and None)
# A tensor may die after this module did: the deleter uses no globals and is never freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_drop))

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _from_dlpack(address: int, num_bytes: int, device: tuple[int, int], owner: object) -> torch.Tensor:
    """Lend memory to torch through a DLPack capsule. The capsule never leaves this function."""
    shape = (ctypes.c_int64 * 1)(num_bytes)
    strides = (ctypes.c_int64 * 1)(1)
    tensor = _DLTensor(address, *device, 1, _DL_UINT, 8, 1, shape, strides, 0)
    managed = _DLManagedTensor(tensor, None, ctypes.cast(_drop, ctypes.c_void_p))
    place = ctypes.addressof(managed)
    _lent[place] = (managed, owner)
    try:
        return torch.utils.dlpack.from_dlpack(_new_capsule(place, b"dltensor", None))
    except BaseException:
        _lent.pop(place, None)  # torch did not take the capsule, so it never calls the deleter
        raise


# --- what a cache shows ---------------------------------------------------------------------------------------------


class LayerView(torch.Tensor):
    """A view of cache memory, most of which may have nothing behind it.

    It behaves as any tensor, and operations on it give plain tensors. The exceptions would read the view as a whole
    without being asked to, and reading a row that is not backed ends the process: so printing shows no values, and
    copying and pickling raise `StateError`. The cache gives each object away once, so no other view changes when its
    holder changes its shape, or writes to it with a gradient.
    """

    # As torch.nn.Parameter does.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"LayerView(shape={tuple(self.shape)}, strides={self.stride()}, dtype={self.dtype}, device={self.device}, "
            "values not shown: rows may have no memory behind them)"
        )

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("copied or pickled")

    def _refuse(self, done: str) -> NoReturn:
        raise StateError(
            f"a layer slice of shape {tuple(self.shape)} cannot be {done} as a whole, rows past a request's length "
            "have no memory behind them; copy the rows in use: view[reqid, :seq_len].clone()"
        )


def layer_view(rows: torch.Tensor) -> torch.Tensor:
    """Return a new `LayerView` of the same memory, part of no graph. The fastest way; torch makes Parameters so."""
    return torch.Tensor._make_subclass(LayerView, rows)


class KVViews:
    """Raw planes and layer slices of one cache, as strided views over its reservations.

    The cache makes them once, when it opens; they cost addresses only. Every call returns a new view, so that nobody
    can change another's. Each view holds its reservation: one that outlives the cache keeps its addresses, and reading
    them faults, as nothing is mapped there.

    Attributes
    ----------
    raw_bytes : tuple of torch.Tensor
        ``[plane_bytes]`` uint8 each, over all pages of a plane.
    """

    def __init__(self, backing: Backing, dtype: torch.dtype) -> None:
        layout, torch_device = backing.layout, backing.pool.driver.torch_device
        self.raw_bytes: tuple[torch.Tensor, ...] = tuple(
            tensor_at(r.address, r.num_bytes, torch_device, r) for r in backing.reservations
        )
        with torch.inference_mode(False):  # a cache opened in that mode serves outside it, too
            flat = [raw.view(dtype) for raw in self.raw_bytes]
            self._planes: tuple[torch.Tensor, ...] = tuple(_plane(layout, elements) for elements in flat)
            self._keys: tuple[torch.Tensor, ...] = _slices(layout, flat, K)
            self._values: tuple[torch.Tensor, ...] = _slices(layout, flat, V)

    def planes(self) -> tuple[torch.Tensor, ...]:
        """``[B, L, N, H, D]`` each (sliced), ``[B, L, N, 2, H, D]`` (interleaved) or ``[B, L, H, D]`` (per_layer)."""
        return tuple(layer_view(plane) for plane in self._planes)

    def k(self, layer: int) -> torch.Tensor:
        """K of a layer, ``[B, L, H, D]``."""
        return layer_view(self._keys[layer])

    def v(self, layer: int) -> torch.Tensor:
        """V of a layer, ``[B, L, H, D]``."""
        return layer_view(self._values[layer])

    def clear(self) -> None:
        """Let go of all views. Addresses are freed when the last view that somebody else holds is gone."""
        self.raw_bytes = self._planes = self._keys = self._values = ()

    def bytes_of(self, layout: KVLayout, slot: int, first_byte: int, end_byte: int) -> list[torch.Tensor]:
        """Bytes ``[first_byte, end_byte)`` of a slot: one tensor for each plane."""
        start = slot * layout.slot_stride_bytes
        return [raw[start + first_byte : start + end_byte] for raw in self.raw_bytes]


def _plane(layout: KVLayout, elements: torch.Tensor) -> torch.Tensor:
    shape = (layout.max_batch_size, layout.max_seq_len, *layout.row_shape)
    strides = [1]
    for extent in reversed(layout.row_shape):
        strides.append(strides[-1] * extent)
    strides.append(layout.slot_stride_bytes // layout.itemsize)
    return elements.as_strided(shape, strides[::-1])


def _slices(layout: KVLayout, flat: Sequence[torch.Tensor], which: int) -> tuple[torch.Tensor, ...]:
    shape = (layout.max_batch_size, layout.max_seq_len, layout.num_kv_heads, layout.head_dim)
    places = (layout.slice_geometry(layer, which) for layer in range(layout.num_layers))
    return tuple(flat[place.plane].as_strided(shape, place.strides, place.offset) for place in places)
