"""Sizes of the machine's cache, what is drawn, and the model of one request: which write each row holds."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from slicedkv import SlicedKVCache, SwapHandle

LAYERS, SLOTS, TOKENS, MOST_GUARD = 3, 4, 200, 3
FULL_PAGES = 96
"""Pages behind four full slots, with every layout and page size below."""
HEAD_DIM = {mmap.PAGESIZE: 20 * mmap.PAGESIZE // 4096, 64 << 10: 320}
"""With these a page holds 17 rows and a part of the 18th."""

lengths = st.integers(0, TOKENS)
picks = st.integers(0, SLOTS - 1)
deltas = st.one_of(st.none(), st.integers(-20, 3), st.integers(10, 120))


def no_writes() -> torch.Tensor:
    return torch.zeros(TOKENS + MOST_GUARD, dtype=torch.int64)


def mark(layer: int, kv: int) -> int:
    """What tells the rows of one layer's K or V from all others."""
    return (layer * 2 + kv) * (TOKENS + MOST_GUARD)


@dataclass(eq=False)
class Request:
    """A request's slot, how many tokens it had at most and in its last step, and how many it asked for.

    Attributes
    ----------
    writes : Tensor
        Number of the write that each row holds; guard rows are written with numbers of their own.
    handle : SwapHandle or None
        With a handle it is swapped out, and has no slot.
    """

    reqid: int
    tokens: int = 0
    last: int = 0
    wanted: int = 0
    writes: torch.Tensor = field(default_factory=no_writes)
    handle: SwapHandle | None = None

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

    def rows(self, span: slice) -> torch.Tensor:
        """What rows hold, but for their `mark`: a number for write and token; exact in float32 for 13,000 writes."""
        tokens = torch.arange(TOKENS + MOST_GUARD)[span]
        numbers = self.writes[span] * (LAYERS * 2 * (TOKENS + MOST_GUARD)) + tokens
        return numbers.to(torch.float32).view(-1, 1, 1)

    def fill(self, cache: SlicedKVCache, span: slice) -> None:
        """Write what rows hold."""
        rows = self.rows(span)
        for layer in range(LAYERS):
            for kv, view in enumerate((cache.k(layer), cache.v(layer))):
                # As a view of its own: the tensor ends at the last token, and guard rows lie behind.
                shape = (span.stop - span.start, *view.shape[2:])
                first = int(view.storage_offset()) + self.reqid * view.stride(0) + span.start * view.stride(1)
                view[self.reqid].as_strided(shape, view.stride()[1:], first)[:] = rows + mark(layer, kv)
