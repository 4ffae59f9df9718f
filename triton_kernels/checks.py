"""What the launchers share: checks that come before a launch, and what a launch must know of a device and of caches.

Knows shapes, dtypes and devices. Must not know any one kernel.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lanes import find_lane

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256
E4M3_CAPABILITY = (8, 9)
ELEMENTS = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip


class Traits(NamedTuple):
    """What launch choices depend on."""

    capability: tuple[int, int]
    multiprocessors: int


@lru_cache
def traits(device: torch.device) -> Traits:
    """Describe a device; the CPU of Triton's interpreter has capability (0, 0)."""
    if device.type == "cpu":
        return Traits((0, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    return Traits((properties.major, properties.minor), properties.multi_processor_count)


def interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: kernels run on CPU tensors, slowly, and on no others."""
    return not isinstance(find_lane, triton.runtime.JITFunction)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches on the current one, whatever the arguments say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches the kernels cannot address.

    Raises
    ------
    TypeError
        The dtype is none the kernels read on that device, or K and V differ in it.
    ValueError
        Device, shape or strides do not fit.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_dtype(name, cache, FLOAT_DTYPES + FLOAT8_DTYPES)
        if cache.dim() != 4 or 0 in cache.shape:
            raise ValueError(f"{name} has shape {tuple(cache.shape)}; it must be [B, L, H, D], none of them 0")
        check_last_contiguous(name, cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}; they must have one dtype")
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}")
    check_device("v_cache", v_cache, k_cache.device)
    head_dim = k_cache.shape[3]
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; it must be a multiple of 16, at most {MAX_HEAD_DIM}")
    capability = traits(k_cache.device).capability
    if k_cache.is_cuda and k_cache.dtype == torch.float8_e4m3fn and capability < E4M3_CAPABILITY:
        raise TypeError(f"float8_e4m3fn caches need compute capability 8.9; this GPU has {capability}, use float8_e5m2")


def cache_elements(k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    """Return what `cache_pointer` must know of caches whose addresses go to a kernel as numbers.

    Given a tensor, Triton asks the driver about its first byte and refuses it when nothing is mapped there. That is
    so while slot 0 is idle, though the kernel reads other slots only.
    """
    aligned = (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
    return {"ELEMENT": ELEMENTS[k_cache.dtype], "ALIGNMENT": 16 if aligned else k_cache.element_size()}


def check_rows(name: str, rows: Tensor, k_cache: Tensor, *, num_heads: int | None = None) -> None:
    """Refuse packed rows ``[rows, heads, D]`` that do not go with the caches.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    head_dim = k_cache.shape[3]
    if rows.dim() != 3 or rows.shape[2] != head_dim or rows.shape[1] != (num_heads or rows.shape[1]):
        expected = f"[rows, {num_heads or 'heads'}, {head_dim}]"
        raise ValueError(f"{name} has shape {tuple(rows.shape)}; it must be {expected}")
    check_device(name, rows, k_cache.device)
    check_last_contiguous(name, rows)


def check_queries(q: Tensor, k_cache: Tensor) -> None:
    """Refuse queries whose dtype, shape, device or number of heads does not go with the caches.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    check_rows("q", q, k_cache)
    _check_dtype("q", q, FLOAT_DTYPES)
    if k_cache.dtype not in FLOAT8_DTYPES and q.dtype != k_cache.dtype:
        raise TypeError(f"q is {q.dtype} and the cache {k_cache.dtype}; they must have one dtype unless it is a float8")
    if q.shape[1] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"q has {q.shape[1]} heads; they must be a multiple of the cache's {k_cache.shape[2]} KV heads"
        )


def check_like(name: str, tensor: Tensor, model: Tensor) -> None:
    """Refuse an output whose shape, dtype or device is not the model's.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    if tensor.shape != model.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(model.shape)}")
    if tensor.dtype != model.dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {model.dtype}")
    check_device(name, tensor, model.device)
    check_last_contiguous(name, tensor)


def outputs(q: Tensor, out: Tensor | None, lse: Tensor | None, *, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return where attention writes, allocated where nothing is given; `lse` only if it is given or wanted.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    check_like("out", out, q)
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _check_lse(lse, q)
    return out, lse


def _check_lse(lse: Tensor | None, q: Tensor) -> None:
    """Refuse a buffer for logarithms of sums that is not ``[rows, Hq]`` float32 and contiguous.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    if lse is None:
        return
    if lse.dtype != torch.float32:
        raise TypeError(f"lse is {lse.dtype}; it must be float32")
    if lse.shape != q.shape[:2] or not lse.is_contiguous():
        raise ValueError(f"lse has shape {tuple(lse.shape)}; it must be {tuple(q.shape[:2])} and contiguous")
    check_device("lse", lse, q.device)


def check_index(name: str, tensor: Tensor, device: torch.device, length: int) -> None:
    """Refuse an index vector of the wrong dtype, length or device.

    Raises
    ------
    TypeError, ValueError
        As `check_caches`.
    """
    _check_dtype(name, tensor, INDEX_DTYPES)
    if tuple(tensor.shape) != (length,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({length},)")
    check_device(name, tensor, device)
    check_last_contiguous(name, tensor)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuse a tensor that is elsewhere, or where no kernel can run.

    Raises
    ------
    ValueError
        See above.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the cache is on {device}")
    if device.type != ("cpu" if interpreted() else "cuda"):
        where = "TRITON_INTERPRET=1 needs CPU tensors" if interpreted() else "the kernels need CUDA tensors"
        raise ValueError(f"{name} is on {device}; {where}")


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous.

    Raises
    ------
    ValueError
        See above.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}; the last dimension must be contiguous")


def check_scales(k_cache: Tensor, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
    """Return both scales, 1 where none is given.

    Raises
    ------
    ValueError
        A scale is not positive and finite, or the cache is no float8.
    """
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is None:
            continue
        if k_cache.dtype not in FLOAT8_DTYPES:
            raise ValueError(f"{name} is {factor}; scales go with float8 caches only, this one is {k_cache.dtype}")
        check_positive(name, factor)
    return 1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale


def check_positive(name: str, value: float | None) -> None:
    """Refuse an option that is given and not positive and finite.

    Raises
    ------
    ValueError
        See above.
    """
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be positive and finite")


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor``, rounded up. `divisor` is positive."""
    return -(-value // divisor)


def padded(extent: int, least: int = 16) -> int:
    """Return the power of two a tile needs for `extent` elements."""
    return max(least, 1 << (extent - 1).bit_length())


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {tensor.dtype}; it must be one of {known}")
