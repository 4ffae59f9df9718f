"""Rows of host caches filled with numbers of their own, so that bytes that moved can be told apart."""

from __future__ import annotations

import torch
from inside import page_bytes_of

from slicedkv import SlicedKVCache

KIB, MIB = 1 << 10, 1 << 20
LAYOUTS = ["sliced", "interleaved", "per_layer"]


def write(cache: SlicedKVCache, reqid: int, seq_len: int, seed: int) -> None:
    """Fill a request's rows with numbers of its own, and the rest of what is mapped with others."""
    for plane in page_bytes_of(cache, reqid):
        plane.fill_(0x5A)
    for layer in range(cache.layout.num_layers):
        for kv, view in enumerate((cache.k(layer), cache.v(layer))):
            view[reqid, :seq_len] = expected(cache, seq_len, seed, layer, kv)


def expected(cache: SlicedKVCache, seq_len: int, seed: int, layer: int, kv: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed * 1000 + layer * 2 + kv)
    return torch.rand(seq_len, cache.layout.num_kv_heads, cache.layout.head_dim, generator=random)


def holds(cache: SlicedKVCache, reqid: int, seq_len: int, seed: int) -> bool:
    return all(
        torch.equal(view[reqid, :seq_len], expected(cache, seq_len, seed, layer, kv))
        for layer in range(cache.layout.num_layers)
        for kv, view in enumerate((cache.k(layer), cache.v(layer)))
    )


def begin(cache: SlicedKVCache, seq_len: int, seed: int) -> int:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: seq_len})
    write(cache, reqid, seq_len, seed)
    return reqid
