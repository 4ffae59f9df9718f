"""Attention in plain torch operations: the oracle the other backends are tested against. Clear rather than fast.

Computes in float32, in float64 for a float64 cache or where asked, on any device and for every cache dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import AttentionBackend, KVSource
from .batch import Lane

__all__ = ["ReferenceBackend"]


class ReferenceBackend(AttentionBackend):
    """Plain-torch backend; see `AttentionBackend`.

    Parameters
    ----------
    compute_dtype : torch.dtype, optional
        float32 or float64; float64 by default for a float64 cache, else float32.
    """

    name: ClassVar[str] = "reference"

    def __init__(
        self,
        cache: KVSource,
        *,
        num_qo_heads: int,
        scale: float | None = None,
        causal: bool = True,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        default = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.compute_dtype = compute_dtype or default
        if self.compute_dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"compute_dtype is {compute_dtype}; use torch.float32 or torch.float64")

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None: plain torch runs everywhere."""
        return None

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        k_slice, v_slice = self.cache.k(layer), self.cache.v(layer)
        for lane in self._lanes:
            k_slice[lane.reqid, lane.past_len : lane.seq_len] = k[lane.begin : lane.end].to(self.dtype)
            v_slice[lane.reqid, lane.past_len : lane.seq_len] = v[lane.begin : lane.end].to(self.dtype)

    def _run(self, layer: int, q: Tensor, out: Tensor) -> None:
        k_slice, v_slice = self.cache.k(layer), self.cache.v(layer)
        for lane in self._lanes:
            # Cut to the length before any arithmetic: whatever lies behind it, NaN included, cannot take part.
            k = k_slice[lane.reqid, : lane.seq_len].to(self.compute_dtype)
            v = v_slice[lane.reqid, : lane.seq_len].to(self.compute_dtype)
            rows = slice(lane.begin, lane.end)
            out[rows] = self._attend(lane, q[rows].to(self.compute_dtype), k, v).to(out.dtype)

    def _attend(self, lane: Lane, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.reshape(lane.q_len, self.num_kv_heads, self.group_size, self.head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * self.scale
        if self.causal:
            visible = torch.ones(lane.q_len, lane.seq_len, dtype=torch.bool, device=q.device).tril(lane.past_len)
            scores = scores.masked_fill(~visible, float("-inf"))
        mixed = torch.einsum("hgqk,khd->qhgd", scores.softmax(dim=-1), v)
        return mixed.flatten(1, 2)
