"""The tensors a cache shows: raw planes and per-layer slices, as strided views over its reservations.

Made once, when the cache opens; they cost addresses only. What is handed out is a new view of one each time, so that
nobody can change another's. Each holds its reservation, so a view that outlives the cache keeps its addresses (reading
them then faults, as nothing is mapped there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import K, KVLayout, V
from .memory.backing import Backing
from .tensors import layer_view, tensor_at

__all__ = ["KVViews"]


class KVViews:
    """Views over the planes of one cache.

    Attributes
    ----------
    raw_bytes : tuple of torch.Tensor
        ``[plane_bytes]`` uint8 each, for whole pages.
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
        """Let go of all views, so that their addresses are freed when the last one elsewhere is gone."""
        self.raw_bytes = self._planes = self._keys = self._values = ()

    def bytes_of(self, layout: KVLayout, slot: int, first_byte: int, end_byte: int) -> list[torch.Tensor]:
        """Bytes ``[first_byte, end_byte)`` of a slot, one tensor a plane."""
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
