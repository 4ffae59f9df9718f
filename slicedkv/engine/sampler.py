"""Logits -> tokens. Each request draws from its own generator, so what is batched with it changes nothing.

Knows requests and torch; neither models nor caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import Request

__all__ = ["sample"]


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose the next token of each request. Synchronises with the GPU.

    Parameters
    ----------
    logits : Tensor
        ``[len(requests), vocabulary]``.
    requests : sequence of Request
        In the order of the rows. The generators of those that sample move on by one number.

    Returns
    -------
    list of int
    """
    if not requests:
        return []
    chosen = logits.argmax(dim=-1)
    for row, request in enumerate(requests):
        if request.params.temperature > 0:
            chosen[row] = _draw(logits[row], request)
    tokens: list[int] = chosen.tolist()
    return tokens


def _draw(logits: Tensor, request: Request) -> Tensor:
    """Draw one token by inverting the cumulative distribution of the kept tokens, likeliest first."""
    # float64: in float32 the sum over a vocabulary of 100,000 may fall short of 1 by more than its tail.
    shares, order = (logits.double() / request.params.temperature).softmax(dim=-1).sort(descending=True, stable=True)
    cumulative = shares.cumsum(dim=-1)
    before = cumulative - shares
    kept = int((before < request.params.top_p).sum())
    point = torch.rand((), generator=request.generator, dtype=torch.float64).item() * cumulative[kept - 1]
    return order[torch.searchsorted(cumulative[:kept], point, right=True).clamp(max=kept - 1)]
