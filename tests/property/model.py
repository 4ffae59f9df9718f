"""What the rules of the cache machine share: sizes, what is drawn, and the model of one request."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from hypothesis import strategies as st

from slicedkv import SwapHandle

LAYERS, SLOTS, TOKENS = 3, 4, 200
FULL_PAGES = 96
"""Pages behind four full slots, with every layout and page size below."""
HEAD_DIM = {mmap.PAGESIZE: 20 * mmap.PAGESIZE // 4096, 64 << 10: 320}
"""With these a page holds 17 rows and a part of the 18th."""

lengths = st.integers(0, TOKENS)
picks = st.integers(0, SLOTS - 1)
deltas = st.one_of(st.none(), st.integers(-20, 3), st.integers(10, 120))


@dataclass
class Request:
    """The model of one request: its slot, its number, and how many tokens it had at most and has asked for.

    With a handle it is swapped out, and has no slot.
    """

    reqid: int
    serial: int
    tokens: int = 0
    wanted: int = 0
    handle: SwapHandle | None = None
