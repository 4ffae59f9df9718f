"""Attention through FlashAttention 2, which follows a slice's strides.

Decoding lanes are one call of `flash_attn_with_kvcache`, which finds slots itself, as `cache_batch_idx`. Long lanes are
a call each of `flash_attn_func`. Short ones and append are the Triton kernels'.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from torch import Tensor

from .base import KV, KVSource, LayerKind, missing_for_half
from .batch import PADDED, Batch, Lane
from .long_lanes import LongLaneBackend

__all__ = ["FlashAttentionBackend"]

_MAX_HEAD_DIM = 256


class FlashAttentionBackend(LongLaneBackend):
    """FlashAttention 2 backend; see `AttentionBackend`. float16 and bfloat16, on Ampere and newer."""

    name: ClassVar[str] = "flash_attn"
    features: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, cache: KVSource, *, num_qo_heads: int, scale: float | None = None, causal: bool = True) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        self._real: Tensor | None = None
        self._slots = self._lens = self._seq_lens

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no GPU or one before Ampere, a dtype or head dimension without kernels."""
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim is {head_dim}; it takes multiples of 16, at most {_MAX_HEAD_DIM}"
        return missing_for_half(device, dtype)

    @property
    def captures(self) -> bool:
        """False: it chooses its launches by lengths."""
        return False

    def _plan_rest(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        # FlashAttention knows no padded lanes: where there are some, the rows of the real ones are gathered.
        real = [lane for lane in range(self._decode_lanes) if batch.reqids[lane] != PADDED]
        self._slots, self._lens = self._reqids[: self._decode_lanes], self._seq_lens[: self._decode_lanes]
        self._real = None
        if len(real) < self._decode_lanes:
            self._real = torch.tensor(real, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
            self._slots, self._lens = self._slots[self._real], self._lens[self._real]

    def _run_decode(self, layer: int, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        shape = (self._decode_lanes, self._decode_q_len, *q.shape[1:])
        lanes, result = q.reshape(shape), out.view(shape)
        if self._real is None:
            result.copy_(self._decode(lanes, cached))
        elif len(self._real):
            result[self._real] = self._decode(lanes[self._real], cached)

    def _decode(self, q: Tensor, cached: KV) -> Tensor:
        """Attend from ``[lanes, q_len, num_qo_heads, D]`` to the slots' rows below their lengths."""
        mixed: Tensor = flash_attn_with_kvcache(
            q, *cached, cache_seqlens=self._lens, cache_batch_idx=self._slots, softmax_scale=self.scale,
            causal=self.causal,
        )  # fmt: skip
        return mixed

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kind: LayerKind) -> None:
        out.copy_(flash_attn_func(q, k, v, softmax_scale=self.scale, causal=self.causal))
