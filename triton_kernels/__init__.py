"""Triton kernels over strided K and V: append new tokens, decode, prefill.

K and V of one layer are ``[B, L, H, D]`` tensors of any slot, token and head stride. Most of them may have no memory
behind it: kernels touch only rows below a request's length. Importing this reads no environment variable and starts no
GPU.
"""

from __future__ import annotations

from .append import append_kv
from .decode import decode_attention, decode_workspace_numel
from .prefill import prefill_attention
from .tuning import AppendTile, DecodeTile, PrefillTile

__all__ = [
    "AppendTile",
    "DecodeTile",
    "PrefillTile",
    "append_kv",
    "decode_attention",
    "decode_workspace_numel",
    "prefill_attention",
]
