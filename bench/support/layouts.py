"""The models and layouts that the memory benchmark compares: geometry, no measurement."""

from __future__ import annotations

import torch

from slicedkv.cli.footprint import Footprint, footprints, layout_name
from slicedkv.cli.plan import MODELS, heads_per_gpu
from slicedkv.layout import KVLayout, LayoutKind

__all__ = ["LAYOUTS", "Shape", "layouts", "modelled", "shapes"]

Shape = tuple[int, int, int]
"""Layers, KV heads on one GPU and head dimension."""

_KIB, _MIB = 1 << 10, 1 << 20
LAYOUTS: tuple[tuple[LayoutKind, int], ...] = (
    ("sliced", 2 * _MIB),
    ("interleaved", 2 * _MIB),
    ("per_layer", 64 * _KIB),
    ("per_layer", 128 * _KIB),
    ("per_layer", 256 * _KIB),
    ("per_layer", 2 * _MIB),
)
"""Kinds, and bytes of a page. On a GPU only a modified driver has pages below 2 MiB."""

_WEIGHTS_GB = {"llama-3-8b": 16.1, "yi-6b": 12.1, "yi-34b": 68.8, "llama-3-70b": 141.2}
"""Of bfloat16."""


def shapes(free_gb: float, quick: bool) -> dict[Shape, str]:
    """Shapes of models on 1, 2, 4 or 8 GPUs, where the weights fit into `free_gb` of each GPU.

    Returns
    -------
    dict of Shape to str
        For each shape the models that have it, as in "llama-3-8b TP2, yi-6b TP1".
    """
    found: dict[Shape, str] = {}
    for model, weights in _WEIGHTS_GB.items():
        layers, heads, dim = MODELS[model]
        for gpus in (1, 2, 4, 8):
            if weights / gpus <= free_gb and gpus <= heads:
                shape = (layers, heads_per_gpu(heads, gpus), dim)
                name = f"{model} TP{gpus}"
                found[shape] = f"{found[shape]}, {name}" if shape in found else name
    return {shape: found[shape] for shape in ((32, 8, 128), (60, 4, 128))} if quick else found


def layout_of(shape: Shape, kind: LayoutKind, page_bytes: int, slots: int, max_seq_len: int) -> KVLayout:
    """A layout of bfloat16."""
    return KVLayout(kind, *shape, torch.bfloat16.itemsize, slots, max_seq_len, page_bytes)


def layouts(shape: Shape, max_seq_len: int, slots: int = 1) -> dict[str, KVLayout]:
    """The layouts that a `SlicedKVCache` has, by the names of their columns."""
    found = (layout_of(shape, kind, page_bytes, slots, max_seq_len) for kind, page_bytes in LAYOUTS)
    return {f"{layout_name(layout)} (measured)": layout for layout in found}


def modelled(shape: Shape, max_seq_len: int, slots: int = 1) -> dict[str, Footprint]:
    """The layouts that only arithmetic knows, by the names of their columns."""
    known = footprints(layout_of(shape, *LAYOUTS[0], slots, max_seq_len))
    return {"paged, 16 tokens (modelled)": known["paged"], "static (modelled)": known["static"]}
