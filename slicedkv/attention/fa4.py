"""Attention through FlashAttention 4, `flash-attn-4`, written for Hopper and Blackwell: prompts, windows, soft caps.

Its kernels are compiled at the first use of a dtype, head dimension and mask, some seconds each. Decode, short lanes
and append are the Triton kernels'.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from flash_attn.cute import flash_attn_func
from torch import Tensor

from .base import KVSource, LayerKind, missing_for_half
from .long_lanes import LongLaneBackend

__all__ = ["FlashAttention4Backend", "attend"]

_MAX_HEAD_DIM = {9: 256, 10: 128, 11: 128}
"""By the compute capability's first number."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """See `LaneKernel`; float16 or bfloat16. `window` and `soft_cap` as for the Triton backend."""
    found = flash_attn_func(
        q, k, v, softmax_scale=scale, causal=causal and window is None,
        window_size=(None, None) if window is None else (window - 1, 0), softcap=soft_cap or 0.0,
    )  # fmt: skip
    out.copy_(found[0] if isinstance(found, tuple) else found)


class FlashAttention4Backend(LongLaneBackend):
    """FlashAttention 4 backend; see `AttentionBackend`. float16 and bfloat16, on Hopper and Blackwell.

    Parameters
    ----------
    window, soft_cap
        As for `TritonBackend`.
    """

    name: ClassVar[str] = "fa4"
    features: ClassVar[frozenset[str]] = frozenset({"window", "soft_cap"})

    def __init__(
        self,
        cache: KVSource,
        *,
        num_qo_heads: int,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal, window=window, soft_cap=soft_cap)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no Hopper or Blackwell GPU, a dtype or head dimension without kernels."""
        reason = missing_for_half(device, dtype)
        if reason is not None:
            return reason
        most = _MAX_HEAD_DIM.get(torch.cuda.get_device_capability(device)[0])
        if most is None:
            return "needs compute capability 9, 10 or 11: Hopper or Blackwell"
        return (
            None
            if head_dim % 16 == 0 and head_dim <= most
            else f"head_dim is {head_dim}; it takes multiples of 16 up to {most}"
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kind: LayerKind) -> None:
        attend(q, k, v, out, scale=self.scale, causal=self.causal, window=kind.window, soft_cap=kind.soft_cap)
