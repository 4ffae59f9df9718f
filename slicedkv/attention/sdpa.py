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

from .base import FLOAT8_DTYPES, AttentionBackend, KVSource
from .batch import Batch, Lane

__all__ = ["SDPABackend"]


class SDPABackend(AttentionBackend):
    """SDPA backend; see `AttentionBackend`."""

    name: ClassVar[str] = "sdpa"

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

    def _run(self, layer: int, q: Tensor, out: Tensor) -> None:
        k_slice, v_slice = self.cache.k(layer), self.cache.v(layer)
        for lane in self._lanes:
            k = k_slice[lane.reqid, : lane.seq_len].transpose(0, 1)[None]
            v = v_slice[lane.reqid, : lane.seq_len].transpose(0, 1)[None]
            rows = q[lane.begin : lane.end]
            attend = self._attend_one if lane.q_len == 1 else self._attend_many
            out[lane.begin : lane.end] = attend(rows, k, v)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token sees everything, so a group of query heads can be the query rows of its KV head."""
        grouped = q.reshape(1, self.num_kv_heads, self.group_size, self.head_dim)
        mixed = scaled_dot_product_attention(grouped, k, v, scale=self.scale)
        return mixed.reshape(1, self.num_qo_heads, self.head_dim)

    def _attend_many(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.causal and q.shape[0] < k.shape[2]:
            return self._attend_chunk(q, k, v)
        mixed = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=self.causal, scale=self.scale, enable_gqa=self.group_size > 1
        )
        return mixed[0].transpose(0, 1)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from later tokens of a request: they need a lower-right bias, since is_causal aligns top left.

        Not every kernel groups heads with this bias, but all take a stride of 0. So KV heads become the batch, and each
        serves its group of query heads without being repeated.
        """
        q_len, seq_len = q.shape[0], k.shape[2]
        grouped = q.reshape(q_len, self.num_kv_heads, self.group_size, self.head_dim).permute(1, 2, 0, 3)
        k, v = (rows.transpose(0, 1).expand(-1, self.group_size, -1, -1) for rows in (k, v))
        bias = causal_lower_right(q_len, seq_len)
        mixed = scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).reshape(q_len, self.num_qo_heads, self.head_dim)
