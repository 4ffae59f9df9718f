"""Attention through `torch.nn.functional.scaled_dot_product_attention`, one call per request, over views of the cache.

K and V are never copied: the fused kernels take a layer slice's strides, and query heads are grouped rather than KV
heads repeated. Runs wherever torch does.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .base import FLOAT8_DTYPES, AttentionBackend, KVSource, LayerKind
from .batch import Batch, Lane
from .plain import attend, visible

__all__ = ["SDPABackend"]


class SDPABackend(AttentionBackend):
    """SDPA backend; see `AttentionBackend`. Capped scores and sinks, which torch's function lacks, are plain torch."""

    name: ClassVar[str] = "sdpa"
    features: ClassVar[frozenset[str]] = frozenset(LayerKind._fields)

    def __init__(self, cache: KVSource, *, num_qo_heads: int, scale: float | None = None, causal: bool = True) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        self._decode_index: tuple[Tensor, Tensor] | None = None

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: SDPA cannot read float8."""
        return f"SDPA cannot read {dtype}" if dtype in FLOAT8_DTYPES else None

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        self._decode_index = None
        if len(lanes) == batch.total_q:  # one row each, no padded lane among them
            index = torch.tensor([(lane.reqid, lane.past_len) for lane in lanes], dtype=torch.int64, device="cpu")
            slots, positions = index.view(-1, 2).to(self.device, non_blocking=True).unbind(dim=1)
            self._decode_index = slots, positions

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        for rows, new in ((self.cache.k(layer), k), (self.cache.v(layer), v)):
            if self._decode_index is not None:
                rows[self._decode_index] = new
                continue
            for lane in self._lanes:
                rows[lane.reqid, lane.past_len : lane.seq_len] = new[lane.begin : lane.end]

    def _run(self, layer: int, q: Tensor, out: Tensor, kind: LayerKind) -> None:
        k_slice, v_slice = self.cache.k(layer), self.cache.v(layer)
        for lane in self._lanes:
            first = lane.first_seen(kind.window)
            k, v = (rows[lane.reqid, first : lane.seq_len] for rows in (k_slice, v_slice))
            rows = slice(lane.begin, lane.end)
            out[rows] = self._attend(q[rows], k, v, kind)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kind: LayerKind) -> Tensor:
        if kind.soft_cap is not None or kind.sinks is not None:
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            found = attend(*(rows.to(wide) for rows in (q, k, v)), scale=self.scale, causal=self.causal, kind=kind)
            return found.to(q.dtype)
        k, v = (rows.transpose(0, 1)[None] for rows in (k, v))
        if q.shape[0] == 1:
            return self._attend_one(q, k, v)
        if kind.window is not None and kind.window < k.shape[2]:
            return self._attend_chunk(q, k, v, visible(q.shape[0], k.shape[2], kind.window, q.device))
        return self._attend_many(q, k, v)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token sees everything, so a group of query heads can be the query rows of its KV head."""
        grouped = q.reshape(1, self.num_kv_heads, self.group_size, self.head_dim)
        mixed = scaled_dot_product_attention(grouped, k, v, scale=self.scale)
        return mixed.reshape(1, self.num_qo_heads, self.head_dim)

    def _attend_many(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.causal and q.shape[0] < k.shape[2]:
            return self._attend_chunk(q, k, v, causal_lower_right(q.shape[0], k.shape[2]))
        mixed = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=self.causal, scale=self.scale, enable_gqa=self.group_size > 1
        )
        return mixed[0].transpose(0, 1)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attend where `is_causal`, which aligns top left, does not say who sees whom, and a bias does.

        Not every kernel groups heads with this bias, but all take a stride of 0. So KV heads become the batch, and each
        serves its group of query heads without being repeated.
        """
        q_len = q.shape[0]
        grouped = q.reshape(q_len, self.num_kv_heads, self.group_size, self.head_dim).permute(1, 2, 0, 3)
        k, v = (rows.transpose(0, 1).expand(-1, self.group_size, -1, -1) for rows in (k, v))
        mixed = scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).reshape(q_len, self.num_qo_heads, self.head_dim)
