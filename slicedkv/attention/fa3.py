"""Attention through FlashAttention 3, written for Hopper: the fastest for prompts there.

The package `fa3-fwd` is a build of its forward pass for bfloat16 and full attention. Decode, short lanes and append are
the Triton kernels', which are faster at them.
"""

from __future__ import annotations

from typing import ClassVar

import fa3_fwd_interface  # noqa: F401  makes torch.ops.fa3_fwd known
import torch
from torch import Tensor

from .base import KVSource, LayerKind, is_hopper
from .long_lanes import LongLaneBackend

__all__ = ["FlashAttention3Backend", "attend"]

_MAX_HEAD_DIM = 256


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float, causal: bool) -> None:
    """See `LaneKernel`; bfloat16. It calls the operator itself, for the package's functions have no `out`."""
    torch.ops.fa3_fwd.fwd(
        q, k, v, out=out, softmax_scale=scale, is_causal=causal, num_splits=1
    )  # fmt: skip


class FlashAttention3Backend(LongLaneBackend):
    """FlashAttention 3 backend; see `AttentionBackend`. bfloat16, on Hopper."""

    name: ClassVar[str] = "fa3"
    features: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, cache: KVSource, *, num_qo_heads: int, scale: float | None = None, causal: bool = True) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no Hopper GPU, another dtype, a head dimension without kernels."""
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim is {head_dim}; it takes multiples of 16, at most {_MAX_HEAD_DIM}"
        if not is_hopper(device):
            return "needs a Hopper GPU, compute capability 9"
        return None if dtype == torch.bfloat16 else f"has no kernels for {dtype}; fa3-fwd is built for bfloat16"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kind: LayerKind) -> None:
        attend(q, k, v, out, scale=self.scale, causal=self.causal)
