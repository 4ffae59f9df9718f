"""`StepPlan`: what the scheduler wants one step to compute. Requests and numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .admission import slot_of
from .request import Request

__all__ = ["StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: requests in packed order and how many of their pending tokens each computes."""

    requests: tuple[Request, ...]
    q_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return sum(self.q_lens)

    def seq_lens(self, running: Iterable[Request]) -> dict[int, int]:
        """Lengths by slot after this step. Running requests that compute nothing in it keep theirs."""
        lens = {slot_of(request): request.num_computed for request in running}
        for request, q_len in zip(self.requests, self.q_lens, strict=True):
            lens[slot_of(request)] += q_len
        return lens
