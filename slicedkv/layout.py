"""Where a token's K and V lie: tokens -> bytes -> pages, strides, capacity and waste. Pure arithmetic.

Must not know torch, drivers or the state of a cache: everything here follows from a frozen `KVLayout`.

Three kinds of layout (vAttention, ASPLOS 2025, section "Tensor Slicing"):

========== ======================= ======= =====================================
kind       one plane               planes  one row (the bytes of one token)
========== ======================= ======= =====================================
sliced     ``[B, L, N, H, D]``     2       all layers of K (or of V)
interleaved ``[B, L, N, 2, H, D]`` 1       all layers of K and V
per_layer  ``[B, L, H, D]``        2 N     one layer of K (or of V)
========== ======================= ======= =====================================

A slot is a whole number of pages, so no two slots share one. Inside a slot, rows may straddle pages. One slot of a
plane with ``max_seq_len`` 6 and ``guard_tokens`` 1, where a row is 6 bytes and a page 16::

    pages  |       0       |       1       |       2       |
    rows   |t0   |t1   |t2   |t3   |t4   |t5   |guard|     |

t2 and t5 straddle pages. A full request has its guard row behind t5; the last 6 bytes hold nothing. A shorter
request has its guard row in the place of its next token. So pages 0 and 1 back a request of four tokens, whose guard
row lies in the place of t4, and a fifth token needs page 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from .errors import ConfigError

__all__ = ["K", "KVLayout", "LayoutKind", "SliceGeometry", "V", "align_up", "ceil_div", "paged_kv_bytes"]

LayoutKind = Literal["sliced", "interleaved", "per_layer"]
K, V = 0, 1


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor``, rounded up. `divisor` is positive; no float takes part, so any size is exact."""
    return -(-value // divisor)


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def paged_kv_bytes(token_bytes: int, seq_len: int, group_tokens: int = 16) -> int:
    """Bytes a paged KV cache holds for one request when it allocates `group_tokens` tokens at a time."""
    return align_up(seq_len, group_tokens) * token_bytes


class SliceGeometry(NamedTuple):
    """One layer slice ``[B, L, H, D]`` in elements of its plane: strides and the offset of its first element."""

    plane: int
    offset: int
    strides: tuple[int, int, int, int]


@dataclass(frozen=True)
class KVLayout:
    """Geometry of a cache.

    Attributes
    ----------
    kind : {"sliced", "interleaved", "per_layer"}
    num_layers, num_kv_heads, head_dim : int
        N, H and D.
    itemsize : int
        Bytes of one element.
    max_batch_size, max_seq_len : int
        B slots of L tokens.
    page_bytes : int
        Bytes of one page.
    guard_tokens : int
        Rows behind a request's length that stay mapped too, for kernels that read past it.
    """

    kind: LayoutKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    max_batch_size: int
    max_seq_len: int
    page_bytes: int
    guard_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ConfigError(f"layout is {self.kind!r}; use one of {', '.join(get_args(LayoutKind))}")

    @cached_property
    def num_planes(self) -> int:
        """Number of reservations: 2, 1 or 2N."""
        return {"sliced": 2, "interleaved": 1, "per_layer": 2 * self.num_layers}[self.kind]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one token's elements in a plane."""
        heads = (self.num_kv_heads, self.head_dim)
        return {
            "sliced": (self.num_layers, *heads),
            "interleaved": (self.num_layers, 2, *heads),
            "per_layer": heads,
        }[self.kind]

    @cached_property
    def row_elements(self) -> int:
        """Elements of one token in one plane: the token stride of every layer slice."""
        elements = 1
        for extent in self.row_shape:
            elements *= extent
        return elements

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.row_elements * self.itemsize

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes; the same for every kind."""
        return self.row_bytes * self.num_planes

    @cached_property
    def rows_per_slot(self) -> int:
        """Rows a slot has addresses for: max_seq_len and the guard rows behind it."""
        return self.max_seq_len + self.guard_tokens

    @cached_property
    def pages_per_slot(self) -> int:
        """Pages of one slot in one plane when it is full."""
        return ceil_div(self.rows_per_slot * self.row_bytes, self.page_bytes)

    @cached_property
    def slot_stride_bytes(self) -> int:
        """Distance of two slots in a plane, a whole number of pages."""
        return self.pages_per_slot * self.page_bytes

    @property
    def plane_bytes(self) -> int:
        """Virtual bytes of one plane."""
        return self.max_batch_size * self.slot_stride_bytes

    @cached_property
    def tokens_per_page(self) -> int:
        """Whole tokens in one page of one plane, at least 1 (a row may be longer than a page)."""
        return max(1, self.page_bytes // self.row_bytes)

    def pages_for(self, seq_len: int) -> int:
        """Pages per plane behind tokens ``[0, seq_len + guard_tokens)``; 0 for an empty request."""
        if seq_len <= 0:
            return 0
        rows = min(seq_len + self.guard_tokens, self.rows_per_slot)
        return ceil_div(rows * self.row_bytes, self.page_bytes)

    def tokens_backed(self, pages: int) -> int:
        """Longest `seq_len` that `pages` pages per plane back, guard rows included; the inverse of `pages_for`."""
        rows = min(pages * self.page_bytes // self.row_bytes, self.rows_per_slot)
        return max(0, rows - self.guard_tokens)

    def page_span(self, first_token: int, end_token: int) -> tuple[int, int]:
        """First and end of the pages per plane that hold some part of rows ``[first_token, end_token)``."""
        if first_token >= end_token:
            return 0, 0
        return first_token * self.row_bytes // self.page_bytes, ceil_div(end_token * self.row_bytes, self.page_bytes)

    def whole_pages(self, seq_len: int) -> int:
        """Pages per plane that tokens ``[0, seq_len)`` fill."""
        return seq_len * self.row_bytes // self.page_bytes

    def rows_within(self, pages: int) -> int:
        """Rows that lie at least in part in the first `pages` pages of a slot."""
        return min(ceil_div(pages * self.page_bytes, self.row_bytes), self.rows_per_slot)

    def bytes_for(self, seq_len: int) -> int:
        """Physical bytes a request of `seq_len` tokens needs over all planes."""
        return self.pages_for(seq_len) * self.num_planes * self.page_bytes

    def waste_bytes(self, seq_len: int) -> int:
        """Bytes behind a request of `seq_len` tokens that hold no token."""
        return self.bytes_for(seq_len) - seq_len * self.token_bytes

    def capacity(self, memory_bytes: int, seq_len: int) -> int:
        """How many requests of `seq_len` tokens fit in `memory_bytes` of physical memory, if slots do not run out."""
        pages = self.pages_for(seq_len) * self.num_planes
        return memory_bytes // self.page_bytes // pages if pages else self.max_batch_size

    def slice_geometry(self, layer: int, which: int) -> SliceGeometry:
        """Where layer `layer` of K (`which` 0) or V (1) lies.

        Raises
        ------
        ConfigError
            `layer` is not in ``[0, num_layers)``.
        """
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer is {layer}; it must be in [0, {self.num_layers})")
        slice_elements = self.num_kv_heads * self.head_dim
        plane, offset = {
            "sliced": (which, layer * slice_elements),
            "interleaved": (0, (2 * layer + which) * slice_elements),
            "per_layer": (2 * layer + which, 0),
        }[self.kind]
        slot_stride = self.slot_stride_bytes // self.itemsize
        return SliceGeometry(plane, offset, (slot_stride, self.row_elements, self.head_dim, 1))
