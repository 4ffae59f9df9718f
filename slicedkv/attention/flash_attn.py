"""Attention through FlashAttention 2, whose `flash_attn_with_kvcache` follows a slice's strides and finds slots itself.

Decoding lanes are one call, with their slots as `cache_batch_idx`; every other lane is a call of its own. The Triton
kernel appends. FlashAttention 3 is not used: its last tile may read past what is mapped.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from .base import KVSource, missing_for_half
from .batch import PADDED, Batch, Lane
from .triton import TritonBackend

__all__ = ["FlashAttentionBackend"]

_MAX_HEAD_DIM = 256


class FlashAttentionBackend(TritonBackend):
    """FlashAttention backend; see `AttentionBackend`. float16 and bfloat16, on Ampere and newer."""

    name: ClassVar[str] = "flash_attn"
    fills_padding: ClassVar[bool] = False

    def __init__(self, cache: KVSource, *, num_qo_heads: int, scale: float | None = None, causal: bool = True) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        self._real: Tensor | None = None
        self._slots = self._lens = self._seq_lens
        self._others: list[Lane] = []
        self._first = 0

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no GPU or one before Ampere, a dtype or head dimension without kernels."""
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim is {head_dim}; it takes multiples of 8, at most {_MAX_HEAD_DIM}"
        return missing_for_half(device, dtype)

    @property
    def captures(self) -> bool:
        """False: it chooses its launches by lengths."""
        return False

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        super()._plan(batch, lanes, graph=graph)
        self._first = self._decode_lanes * self._decode_q_len
        self._others = [lane for lane in lanes if lane.begin >= self._first]
        # FlashAttention knows no padded lanes: where there are some, the rows of the real ones are gathered.
        real = [lane for lane in range(self._decode_lanes) if batch.reqids[lane] != PADDED]
        self._slots, self._lens = self._reqids[: self._decode_lanes], self._seq_lens[: self._decode_lanes]
        self._real = None
        if len(real) < self._decode_lanes:
            self._real = torch.tensor(real, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
            self._slots, self._lens = self._slots[self._real], self._lens[self._real]

    def _run_decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        shape = (self._decode_lanes, self._decode_q_len, *q.shape[1:])
        lanes, result = q.reshape(shape), out.view(shape)
        if self._real is None:
            result.copy_(self._attend(layer, lanes, self._slots, self._lens))
        elif len(self._real):
            result[self._real] = self._attend(layer, lanes[self._real], self._slots, self._lens)

    def _run_prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        for lane in self._others:
            rows = slice(lane.begin - self._first, lane.end - self._first)
            slot, length = (
                torch.full((1,), value, dtype=torch.int32, device=self.device) for value in (lane.reqid, lane.seq_len)
            )
            out[rows] = self._attend(layer, q[rows][None], slot, length)[0]

    def _attend(self, layer: int, q: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
        """Attend from ``[lanes, q_len, num_qo_heads, D]`` to the slots' rows below their lengths."""
        mixed: Tensor = flash_attn_with_kvcache(
            q, self.cache.k(layer), self.cache.v(layer), cache_seqlens=lens, cache_batch_idx=slots,
            softmax_scale=self.scale, causal=self.causal,
        )  # fmt: skip
        return mixed
