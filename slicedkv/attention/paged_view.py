"""A layer slice as pages of tokens, for kernels that find K and V through a page table. Nothing is copied.

Such kernels see ``[pages, page_tokens, H, D]`` and take the address of page ``i`` as ``i * stride``. Slots lie
``slot_stride`` elements apart and pages of a slot ``page_tokens * token_stride``; with their greatest common divisor as
the stride, every page of every slot has a number, whatever the layout. Most numbers name no page and are never used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from .batch import Lane

__all__ = ["PageTable", "PagedView", "ramps"]

_UINT32, _INT32 = 2**32, 2**31


@dataclass(frozen=True, slots=True)
class PagedView:
    """How the slices of one cache are numbered in pages; the same for every layer, and for K and V.

    Attributes
    ----------
    page_tokens : int
        Tokens a page.
    stride : int
        Elements between neighbouring page numbers.
    slot_pages, page_step : int
        Numbers between slots, and between the pages of a slot.
    """

    page_tokens: int
    stride: int
    slot_pages: int
    page_step: int

    @classmethod
    def of(cls, rows: Tensor, page_tokens: int) -> PagedView:
        """Number the pages of a slice ``[B, L, H, D]``.

        Raises
        ------
        ConfigError
            Kernels hold the stride as uint32 and page numbers as int32, and one of them would not fit.
        """
        slot, token = rows.stride(0), rows.stride(1)
        stride = math.gcd(slot, page_tokens * token)
        view = cls(page_tokens, stride, slot // stride, page_tokens * token // stride)
        last = view.number(rows.shape[0] - 1, (rows.shape[1] - 1) // page_tokens)
        if stride >= _UINT32 or last >= _INT32:
            raise ConfigError(
                f"slices with strides {tuple(rows.stride())} need page numbers up to {last} of {stride} elements; "
                f"kernels with page tables hold them as int32 and uint32: use backend 'triton', or fewer slots"
            )
        return view

    def number(self, slot: int, page: int) -> int:
        """Return the number of a slot's page."""
        return slot * self.slot_pages + page * self.page_step

    def pages(self, rows: Tensor) -> Tensor:
        """Return a slice as ``[pages, page_tokens, H, D]``.

        The last page of the last slot may lie partly or wholly outside the view, when `max_seq_len` is no multiple of
        a page: kernels take base and strides from the view and its rows from a request's length.
        """
        room = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
        token, (_, _, heads, head_dim) = rows.stride(1), rows.shape
        reach = (self.page_tokens - 1) * token + (heads - 1) * rows.stride(2) + head_dim
        count = max(1, (room - reach) // self.stride + 1)
        return rows.as_strided((count, self.page_tokens, heads, head_dim), (self.stride, *rows.stride()[1:]))

    def table(self, reqids: Sequence[int], seq_lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the page table of some requests, each at least one token long: int32 tensors on the CPU.

        Returns
        -------
        indptr, numbers, last_page_tokens : Tensor
            ``[n + 1]`` first entry of each request; ``[indptr[n]]`` page numbers; ``[n]`` tokens on each last page.
        """
        lens = torch.tensor(seq_lens, dtype=torch.int64, device="cpu")
        counts = (lens + self.page_tokens - 1) // self.page_tokens
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=indptr[1:])
        firsts = torch.tensor(reqids, dtype=torch.int64, device="cpu") * self.slot_pages
        numbers = ramps(firsts, counts, self.page_step)
        return indptr.int(), numbers.int(), (lens - (counts - 1) * self.page_tokens).int()


class PageTable:
    """The page table of a step's lanes, made when a part of it is first asked for, and then once.

    Parameters
    ----------
    view : PagedView
    lanes : sequence of Lane
    """

    def __init__(self, view: PagedView, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self._view = view
        self._index = {lane.reqid: index for index, lane in enumerate(lanes)}
        self._whole: tuple[Tensor, Tensor, Tensor] | None = None
        self._ends: list[int] = []

    def of(self, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor, Tensor]:
        """Return `PagedView.table` of some of the lanes, which lie side by side among them."""
        if self._whole is None:
            reqids, seq_lens = [lane.reqid for lane in self.lanes], [lane.seq_len for lane in self.lanes]
            self._whole = self._view.table(reqids, seq_lens)
            self._ends = self._whole[0].tolist()
        if len(lanes) == len(self.lanes):
            return self._whole
        indptr, numbers, last = self._whole
        begin = self._index[lanes[0].reqid]
        end = begin + len(lanes)
        return (
            indptr[begin : end + 1] - self._ends[begin], numbers[self._ends[begin] : self._ends[end]], last[begin:end]
        )  # fmt: skip


def ramps(firsts: Tensor, counts: Tensor, step: int) -> Tensor:
    """Return ``counts[i]`` numbers from ``firsts[i]`` on in steps of `step`, for each `i`, one after the other.

    One cumulative sum, for `torch.repeat_interleave` on the CPU wakes all of torch's threads even for a dozen numbers.
    In a process that may use 16 of a machine's cores that took up to 40 ms, with the GPU idle (bench/serving.py). From
    32,768 numbers on other operations wake them, too.

    Parameters
    ----------
    firsts, counts : Tensor
        ``[n]`` int64 on the CPU; each count at least 1.
    """
    ends = torch.cumsum(counts, 0)
    rises = torch.full((int(ends[-1]) if len(ends) else 0,), step, dtype=torch.int64, device="cpu")
    rises[:1] = firsts[:1]
    rises[ends[:-1]] = firsts[1:] - (firsts[:-1] + (counts[:-1] - 1) * step)
    return torch.cumsum(rises, 0)
