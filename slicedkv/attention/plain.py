"""Attention of one request in plain torch operations: clear rather than fast, with all that a layer can have."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import PLAIN, LayerKind

__all__ = ["attend", "visible"]


def visible(q_len: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[q_len, seq_len]``: which tokens each of the last `q_len` tokens sees."""
    past = seq_len - q_len
    seen = torch.ones(q_len, seq_len, dtype=torch.bool, device=device).tril(past)
    return seen if window is None else seen.triu(past + 1 - window)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, kind: LayerKind = PLAIN) -> Tensor:
    """Attend from the last tokens of a request to all of it.

    Parameters
    ----------
    q : Tensor
        ``[q_len, Hq, D]``.
    k, v : Tensor
        ``[seq_len, H, D]``, of the dtype of `q`, in which everything is computed.
    scale : float
    causal : bool
    kind : LayerKind

    Returns
    -------
    Tensor
        ``[q_len, Hq, D]``.
    """
    (q_len, num_qo_heads, head_dim), (seq_len, num_kv_heads, _) = q.shape, k.shape
    grouped = q.reshape(q_len, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    if causal:
        scores = scores.masked_fill(~visible(q_len, seq_len, kind.window, q.device), float("-inf"))
    if kind.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = kind.sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1).expand(-1, -1, q_len, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
