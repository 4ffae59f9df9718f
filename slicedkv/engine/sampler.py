"""Logits to tokens, on the device.

Each request draws from its own generator, so its tokens do not depend on what is batched with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import StateError
from .request import NO_TOKEN, FinishReason, Request

__all__ = ["check_numbers", "sample"]

_ROWS_AT_A_TIME = 64  # a few sorted copies of the logits in float64 are the sampler's memory


def sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Choose the next token of each request. It waits for nothing.

    Parameters
    ----------
    logits : Tensor
        ``[len(requests), vocabulary]``.
    requests : sequence of Request
        In the order of the rows. A request with a temperature draws one number for every token.

    Returns
    -------
    Tensor
        ``[len(requests)]`` int64, on the device of the logits; `NO_TOKEN` where the largest logit is not finite.
    """
    best, chosen = logits.max(dim=-1)  # NaN is the largest of all
    failed = ~best.isfinite()
    drawing = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    for start in range(0, len(drawing), _ROWS_AT_A_TIME):
        rows = drawing[start : start + _ROWS_AT_A_TIME]
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(logits.device, non_blocking=True)
        chosen[index] = _draw(logits[index], [requests[row] for row in rows])
    return chosen.masked_fill(failed, NO_TOKEN)


def check_numbers(requests: Sequence[Request]) -> None:
    """Raise if requests of a step have failed because their logits are not numbers.

    Raises
    ------
    StateError
        At least one has.
    """
    failed = [request for request in requests if request.finish_reason is FinishReason.FAILED]
    if failed:
        raise StateError(
            f"the model's logits for {failed} are not finite numbers, so no token is likeliest; these requests are "
            "over, the others go on. Weights may be broken, or too large for the model's dtype"
        )


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution of the kept tokens, likeliest first."""
    numbers = torch.tensor(
        [(request.params.temperature, request.params.top_p, request.drawn) for request in requests],
        dtype=torch.float64,
        device="cpu",
    )
    temperature, top_p, uniform = numbers.to(logits.device, non_blocking=True)[:, :, None].unbind(dim=1)
    # float64: in float32 the sum over a vocabulary of 100,000 may fall short of 1 by more than its tail.
    scores = (logits.double() - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0, however cold
    shares, order = scores.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative = shares.cumsum(dim=-1)
    last = (cumulative - shares < top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1  # NaN is less than nothing
    point = uniform * cumulative.gather(1, last)
    place = torch.minimum(torch.searchsorted(cumulative, point, right=True), last)
    return order.gather(1, place)[:, 0]
