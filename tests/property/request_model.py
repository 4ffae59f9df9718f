"""The model of one request: which write each of its rows holds, and the numbers that the write left there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LAYERS, TOKENS, MOST_GUARD = 3, 200, 3


def no_writes() -> torch.Tensor:
    return torch.zeros(TOKENS + MOST_GUARD, dtype=torch.int64)


@dataclass
class Request:
    """A request's slot, how many tokens it had at most and in its last step, and how many it asked for.

    Attributes
    ----------
    writes : Tensor
        Number of the write that each row holds; guard rows are written with numbers of their own.
    """

    reqid: int
    tokens: int = 0
    last: int = 0
    wanted: int = 0
    writes: torch.Tensor = field(default_factory=no_writes)

    def write(self, length: int, guard_tokens: int, number: int) -> slice:
        """A step to `length` was True: note that all rows it lets the request write are written; return them."""
        rows = slice(min(self.last, length), length + guard_tokens)
        self.writes[rows] = number
        self.tokens, self.last = max(self.tokens, length), length
        return rows

    def inherit(self, other: Request, length: int) -> None:
        """Note that the request got its first tokens from another one."""
        self.writes[:length] = other.writes[:length]
        self.tokens = self.last = length

    def rows(self, span: slice, layer: int, kv: int) -> torch.Tensor:
        """What rows hold: a number for write, token, layer and K or V; exact in float32 for 13,000 writes."""
        tokens = torch.arange(TOKENS + MOST_GUARD)[span]
        numbers = ((self.writes[span] * LAYERS + layer) * 2 + kv) * (TOKENS + MOST_GUARD) + tokens
        return numbers.to(torch.float32).view(-1, 1, 1)
