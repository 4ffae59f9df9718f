"""Attention in plain torch operations: the oracle the other backends are tested against. Clear rather than fast.

Computes in float32, in float64 for a float64 cache or where asked, on any device and for every cache dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import AttentionBackend, KVSource, LayerKind
from .plain import attend

__all__ = ["ReferenceBackend"]


class ReferenceBackend(AttentionBackend):
    """Plain-torch backend; see `AttentionBackend`.

    Parameters
    ----------
    compute_dtype : torch.dtype, optional
        float32 or float64; float64 by default for a float64 cache, else float32.
    """

    name: ClassVar[str] = "reference"
    features: ClassVar[frozenset[str]] = frozenset(LayerKind._fields)

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

    def _run(self, layer: int, q: Tensor, out: Tensor, kind: LayerKind) -> None:
        k_slice, v_slice = self.cache.k(layer), self.cache.v(layer)
        for lane in self._lanes:
            # Cut before any arithmetic: what lies behind the length or before the window, NaN included, has no part.
            seen = slice(lane.first_seen(kind.window), lane.seq_len)
            k, v = (rows[lane.reqid, seen].to(self.compute_dtype) for rows in (k_slice, v_slice))
            rows = slice(lane.begin, lane.end)
            found = attend(q[rows].to(self.compute_dtype), k, v, scale=self.scale, causal=self.causal, kind=kind)
            out[rows] = found.to(out.dtype)
