"""What the kernels are tested against: attention and rotary embedding in float64, and caches full of NaN to find in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last tokens ``[q_len, Hq, D]`` of one request over ``[len, H, D]``, and its log-sum-exp."""
    q_len, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    k, v = (rows.double().repeat_interleave(num_heads // num_kv_heads, 1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * (head_dim**-0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(length - q_len, length, device=q.device)[:, None]
    tokens = torch.arange(length, device=q.device)[None]
    hidden = (tokens > positions) if causal else torch.zeros(q_len, length, dtype=torch.bool, device=q.device)
    if window:
        hidden = hidden | (tokens <= positions - window)
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def attend_all(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reqids: Sequence[int],
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Each lane of a packed batch by itself; zeros and -inf for padded lanes."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    for (begin, end), reqid, length in zip(pairwise(ends(q_lens)), reqids, seq_lens, strict=True):
        if reqid >= 0 and length and end > begin:
            k = k_cache[reqid, :length].double() * k_scale
            v = v_cache[reqid, :length].double() * v_scale
            out[begin:end], lse[begin:end] = attend(q[begin:end], k, v, **options)
    return out, lse


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``[rows, heads, D]`` by ``[rows, D / 2]``, in float64."""
    low, high = rows.double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def ends(lens: Sequence[int]) -> list[int]:
    """Running sum of lengths, from 0."""
    found = [0]
    for length in lens:
        found.append(found[-1] + length)
    return found


def index(values: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """Values as an index vector."""
    return torch.tensor(values, dtype=dtype, device=device)


def planes(
    batch: int,
    length: int,
    layers: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    layout: str = "sliced",
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Caches of all layers, ``[N, B, L, H, D]`` in strides of a layout, filled with NaN."""
    shape = {
        "sliced": (batch, length, layers, heads, head_dim),
        "interleaved": (batch, length, layers, 2, heads, head_dim),
        "per_layer": (layers, batch, length, heads, head_dim),
    }[layout]
    first = torch.full(shape, float("nan"), device=device).to(dtype)
    second = first if layout == "interleaved" else first.clone()
    if layout == "sliced":
        return first.permute(2, 0, 1, 3, 4), second.permute(2, 0, 1, 3, 4)
    if layout == "interleaved":
        return first[:, :, :, 0].permute(2, 0, 1, 3, 4), first[:, :, :, 1].permute(2, 0, 1, 3, 4)
    return first, second


def fill(k: Tensor, v: Tensor, reqids: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Put random values in the rows that are in use and leave all others NaN."""
    for reqid, length in zip(reqids, seq_lens, strict=True):
        if reqid >= 0:
            for cache in (k, v):
                shape = cache[reqid, :length].shape
                cache[reqid, :length] = torch.randn(shape, device=cache.device).to(cache.dtype)


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN compares as infinite."""
    difference = (out.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    return float(difference) if torch.isfinite(difference) else float("inf")
