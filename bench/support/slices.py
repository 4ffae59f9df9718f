"""Memory that the attention benchmarks read: one stretch of pages that slicedkv mapped, as slices or as baselines.

K and V are one slot of a cache. Slices and baselines lie on the same pages, filled once for all shapes, so they differ
in nothing but their layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slicedkv import SlicedKVCache

MIN_BYTES = 768 << 20
"""Bytes that one timing reads at least: many times the GPU's L2, so that it holds nothing of the timing before."""
MAX_CALLS = 1024
HEAD_DIM = 128


class Shape(NamedTuple):
    """One model and one batch, whose requests are equally long."""

    batch: int
    length: int
    layers: int
    heads: int
    group: int

    @property
    def plane_elements(self) -> int:
        """Elements of K of all layers."""
        return self.batch * self.length * self.layers * self.heads * HEAD_DIM

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in bfloat16."""
        return self.plane_elements // self.layers * 4


class Place(NamedTuple):
    """One layer of one of several caches of the same shape, side by side in the memory."""

    layer: int
    copy: int


class Memory:
    """K and V of `num_bytes` together, random bfloat16, on pages of 2 MiB or on extents of several pages."""

    def __init__(self, num_bytes: int, extent_pages: int = 16) -> None:
        tokens = num_bytes // (32 * 8 * HEAD_DIM * 4) // 32 * 32
        self._cache = SlicedKVCache(
            num_layers=32, num_kv_heads=8, head_dim=HEAD_DIM, dtype=torch.bfloat16, max_batch_size=1,
            max_seq_len=tokens, device="cuda", memory_limit=num_bytes + (64 << 20), mapper="sync",
            extent_pages=extent_pages,
        )  # fmt: skip
        if not self._cache.step({self._cache.alloc_reqid(): tokens}):
            raise SystemExit(f"the GPU has no {num_bytes} bytes free")
        self.elements = tokens * 32 * 8 * HEAD_DIM
        self.k, self.v = (plane.as_strided((self.elements,), (1,)) for plane in self._cache.kv_tensors)
        for flat in (self.k, self.v):
            for part in flat.split(1 << 30):
                part.normal_()

    def close(self) -> None:
        """Give the memory back. Use no view afterwards."""
        torch.cuda.synchronize()
        self._cache.close()

    def fits(self, shape: Shape) -> bool:
        """True when a cache of that shape fits."""
        return shape.plane_elements <= self.elements

    def places(self, shape: Shape) -> list[Place]:
        """All layers, for one timing; where the L2 would hold those of one cache, those of several."""
        copies = self.elements // shape.plane_elements
        needed = min(MAX_CALLS, max(shape.layers, math.ceil(MIN_BYTES / shape.layer_bytes)))
        return [Place(i % shape.layers, i // shape.layers) for i in range(min(needed, copies * shape.layers))]

    def sliced(self, shape: Shape, place: Place) -> tuple[Tensor, Tensor]:
        """Layer slices ``[B, L, H, D]`` of a cache that has a token's layers side by side."""
        token = shape.layers * shape.heads * HEAD_DIM
        strides = (shape.length * token, token, HEAD_DIM, 1)
        return self._views(shape, strides, place.layer * shape.heads * HEAD_DIM + place.copy * shape.plane_elements)

    def per_layer(self, shape: Shape, place: Place) -> tuple[Tensor, Tensor]:
        """``[B, L, H, D]`` of contiguous layers."""
        token = shape.heads * HEAD_DIM
        strides = (shape.length * token, token, HEAD_DIM, 1)
        offset = place.layer * shape.batch * shape.length * token + place.copy * shape.plane_elements
        return self._views(shape, strides, offset)

    def _views(self, shape: Shape, strides: tuple[int, ...], offset: int) -> tuple[Tensor, Tensor]:
        size = (shape.batch, shape.length, shape.heads, HEAD_DIM)
        return self.k.as_strided(size, strides, offset), self.v.as_strided(size, strides, offset)


def shuffled_pages(shape: Shape, page_tokens: int = 16) -> Tensor:
    """Page table ``[B, L / page_tokens]`` of a paged cache that has long been in use: pages in random order."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    pages = torch.randperm(shape.batch * shape.length // page_tokens, generator=generator, device="cuda")
    return pages.int().view(shape.batch, -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64: the last tokens ``[q_len, Hq, D]`` of a request over its ``[len, H, D]``."""
    q_len, num_heads, head_dim = q.shape
    length, heads, _ = k.shape
    grouped = q.double().view(q_len, heads, num_heads // heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.double()) / math.sqrt(head_dim)
    hidden = torch.ones(q_len, length, dtype=torch.bool, device=q.device).triu(length - q_len + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.double()).flatten(1, 2)


def check(name: str, out: Tensor, expected: Tensor) -> None:
    """Stop the benchmark if a result is wrong, before it is timed."""
    error = float((out.double() - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise SystemExit(f"{name} is wrong: relative error {error:.3g}")
