"""The tensors a cache shows: raw planes and per-layer slices, as strided views over its reservations.

Made once, when the cache opens; they cost addresses only. Each holds its reservation, so a view that outlives the
cache keeps its addresses (reading them then faults, as nothing is mapped there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backing import Backing
from .layout import K, KVLayout, V
from .tensors import LayerView, tensor_at

__all__ = ["KVViews"]


class KVViews:
    """Views over the planes of one cache.

    Attributes
    ----------
    planes : tuple of LayerView
        ``[B, L, N, H, D]`` each (sliced), ``[B, L, N, 2, H, D]`` (interleaved) or ``[B, L, H, D]`` (per_layer).
    keys, values : tuple of LayerView
        Layer slices ``[B, L, H, D]``.
    raw_bytes : tuple of torch.Tensor
        ``[plane_bytes]`` uint8 each, for whole pages.
    """

    def __init__(self, backing: Backing, dtype: torch.dtype) -> None:
        layout, torch_device = backing.layout, backing.pool.driver.torch_device
        self.raw_bytes: tuple[torch.Tensor, ...] = tuple(
            tensor_at(r.address, r.num_bytes, torch_device, r) for r in backing.reservations
        )
        flat = [raw.view(dtype) for raw in self.raw_bytes]
        self.planes: tuple[torch.Tensor, ...] = tuple(_plane(layout, elements) for elements in flat)
        self.keys: tuple[torch.Tensor, ...] = _slices(layout, flat, K)
        self.values: tuple[torch.Tensor, ...] = _slices(layout, flat, V)

    def clear(self) -> None:
        """Let go of all views, so that their addresses are freed when the last one elsewhere is gone."""
        self.raw_bytes = self.planes = self.keys = self.values = ()

    def page_bytes_of(self, layout: KVLayout, slot: int, first_page: int, end_page: int) -> list[torch.Tensor]:
        """Bytes of pages ``[first_page, end_page)`` of a slot, one tensor a plane."""
        return self.bytes_of(layout, slot, first_page * layout.page_bytes, end_page * layout.page_bytes)

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
    return elements.as_strided(shape, strides[::-1]).as_subclass(LayerView)


def _slices(layout: KVLayout, flat: Sequence[torch.Tensor], which: int) -> tuple[torch.Tensor, ...]:
    shape = (layout.max_batch_size, layout.max_seq_len, layout.num_kv_heads, layout.head_dim)
    places = (layout.slice_geometry(layer, which) for layer in range(layout.num_layers))
    return tuple(
        flat[place.plane].as_strided(shape, place.strides, place.offset).as_subclass(LayerView) for place in places
    )
