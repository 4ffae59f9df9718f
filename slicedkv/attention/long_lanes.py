"""What backends share that compute a long lane by itself: one call over views of K and V that end with the request.

Such a call needs no page table and no lengths on the device, and it is the fastest that FlashAttention and FlashInfer
have. It is also the one that is safe over slices. A kernel loads K and V in whole tiles. What a tile has behind the
view's shape becomes zeros; what lies behind a length that the kernel is told, it reads: NaN, or pages that are not
mapped. So views are cut, and no kernel is told a length.

Lanes that do not fill the GPU by themselves are computed together, by one launch for neighbours.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .base import KV, KVSource, LayerKind
from .batch import Batch, Lane
from .triton import TritonBackend

__all__ = ["LaneKernel", "LongLaneBackend", "Span", "open_lane_kernel"]


class LaneKernel(Protocol):
    """A kernel that attends from the new tokens of one request, its last ones, to all its tokens."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill `out` ``[1, q_len, Hq, D]``, like `q`, from K and V ``[1, seq_len, H, D]``."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Packed rows that prefill computes with one call: those of a long lane, or those of short ones.

    `rows` counts from the first row of prefill. `short` is what `_plan_short` made.
    """

    rows: slice
    lane: Lane | None = None
    short: Any = None


def open_lane_kernel(name: str, **options: Any) -> LaneKernel:
    """Return the kernel of a backend that has one, `attend` of its module, with options such as `scale`."""
    kernel: LaneKernel = functools.partial(importlib.import_module(f"{__package__}.{name}").attend, **options)
    return kernel


class LongLaneBackend(TritonBackend):
    """Decode by the Triton kernel, long lanes one by one, short lanes together: by Triton unless overridden.

    A lane is long when it fills the GPU by itself, with `long_rows` new tokens times query heads, for longer than the
    host takes to launch it: `long_pairs` pairs of a row and a token that it sees. A lane alone has nobody to be
    launched with, and less is enough, `alone_rows` and `alone_pairs`. The bounds are those of an H200;
    `bench/prefill.py --short` measures lanes near them.
    """

    fills_padding: ClassVar[bool] = False
    long_rows: ClassVar[int] = 512 * 32
    long_pairs: ClassVar[int] = (2 << 20) * 32
    alone_rows: ClassVar[int] = 64 * 32
    alone_pairs: ClassVar[int] = (1 << 20) * 32
    queries_a_call: int = 1 << 30
    """Lanes with more queries are cut, where neighbouring queries then share what they read in the GPU's cache."""

    def __init__(self, cache: KVSource, *, num_qo_heads: int, **options: Any) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, **options)
        self._spans: list[Span] = []

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kind: LayerKind) -> None:
        """See `LaneKernel`."""

    def _is_long(self, lane: Lane, *, alone: bool) -> bool:
        rows = lane.q_len * self.num_qo_heads
        seen = lane.seq_len - (lane.q_len - 1) // 2 if self.causal else lane.seq_len
        pairs = rows * min(seen, self.window or seen)
        if alone:
            return rows >= self.alone_rows and pairs >= self.alone_pairs
        return rows >= self.long_rows and pairs >= self.long_pairs

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        super()._plan(batch, lanes, graph=graph)
        self._plan_rest(batch, lanes, graph=graph)
        self._cut(lanes)

    def _plan_rest(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        """Prepare what else a backend needs, before prefill is cut in spans."""

    def _cut(self, lanes: Sequence[Lane]) -> None:
        """Cut what is not decode in spans: each long lane alone, neighbouring short ones together."""
        first = self._decode_lanes * self._decode_q_len
        lanes = [lane for lane in lanes if lane.begin >= first]
        self._spans = []
        short: list[Lane] = []
        for lane in lanes:
            is_long = self._is_long(lane, alone=len(lanes) == 1)
            if short and (short[-1].end < lane.begin or is_long):
                self._add_short(short, first)
                short = []
            if is_long:
                self._spans.append(Span(slice(lane.begin - first, lane.end - first), lane=lane))
            else:
                short.append(lane)
        if short:
            self._add_short(short, first)

    def _add_short(self, lanes: Sequence[Lane], first: int) -> None:
        rows = slice(lanes[0].begin - first, lanes[-1].end - first)
        self._spans.append(Span(rows, short=self._plan_short(lanes, len(self._spans))))

    def _plan_short(self, lanes: Sequence[Lane], index: int) -> Any:
        """Prepare one launch for neighbouring lanes, the span of this index."""
        count, ends = len(lanes), [lane.end - lanes[0].begin for lane in lanes]
        values = [*(lane.reqid for lane in lanes), *(lane.seq_len for lane in lanes), 0, *ends]
        numbers = torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        numbers = numbers.to(self.device, non_blocking=True)
        reqids, seq_lens, cu_q_lens = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        return reqids, cu_q_lens, seq_lens, max(lane.q_len for lane in lanes)

    def _run_short(self, layer: int, short: Any, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        *numbers, max_q_len = short
        self._prefill(q, cached, tuple(numbers), max_q_len, out, kind)

    def _run_prefill(self, layer: int, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        for span in self._spans:
            if span.lane is None:
                self._run_short(layer, span.short, q[span.rows], cached, out[span.rows], kind)
            else:
                self._run_long(span.lane, q[None, span.rows], cached, out[None, span.rows], kind)

    def _run_long(self, lane: Lane, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        for begin in range(0, lane.q_len, self.queries_a_call):
            end = min(begin + self.queries_a_call, lane.q_len)
            seen = lane.past_len + end if self.causal else lane.seq_len
            first = 0 if kind.window is None else max(0, lane.past_len + begin + 1 - kind.window)
            k, v = (_rows_of(lane.reqid, first, seen, rows) for rows in cached)
            if end - begin < lane.q_len:
                self._attend(q[:, begin:end], k, v, out[:, begin:end], kind)
            else:
                self._attend(q, k, v, out, kind)


def _rows_of(reqid: int, begin: int, end: int, rows: Tensor) -> Tensor:
    """Return ``rows[reqid : reqid + 1, begin:end]``, in one operation: a call a lane and layer, so it counts."""
    slot, token, *inner = rows.stride()
    place = rows.storage_offset() + reqid * slot + begin * token
    return rows.as_strided((1, end - begin, *rows.shape[2:]), (slot, token, *inner), place)
