"""Is append to slices as fast as a plain copy of as many bytes, and what does rotary embedding add?

    python -m bench.append [--quick]

Rows of a packed batch go to one layer of Llama-3-8B's shape: in decode many requests with one token each, in prefill
few with many. Every call of a timing has a source and a target of its own. In decode the kernel gets no ends of lanes,
as from the adapters. FlashInfer's append, if installed, runs beside it; it gets lane and position of every row.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slicedkv.attention.paged_view import PagedView
from slicedkv.triton_kernels import append_kv

from .support.common import copy_rate, parser, record
from .support.slices import HEAD_DIM, Memory, Place, Shape
from .support.timing import Call, captured, in_turn

NEEDS_GPU = True
Row = dict[str, Any]
LAYERS, HEADS, GROUP = 32, 8, 4
CASES = ((1, 1), (64, 1), (256, 1), (512, 1), (1, 512), (4, 512), (1, 8192), (4, 8192))
"""Requests, and how many new tokens each has."""
MIN_BYTES, MAX_CALLS = 512 << 20, 512


class Sources:
    """New rows of many calls."""

    def __init__(self, batch: int, q_len: int) -> None:
        self.rows = batch * q_len
        self.bytes_moved = 2 * 2 * self.rows * HEADS * HEAD_DIM * 2
        self.calls = min(MAX_CALLS, max(4, MIN_BYTES // self.bytes_moved))
        shape = (self.calls, 2, self.rows, HEADS, HEAD_DIM)
        self.kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.q = torch.randn(self.rows, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.q_out = torch.empty_like(self.q)


def measure(memory: Memory, batch: int, q_len: int, rounds: int, copied: float) -> Row:
    """Time append alone, with rotary embedding of K, of K and q, and a copy of the same bytes."""
    sources = Sources(batch, q_len)
    shape = Shape(batch, max(32, q_len * 2), LAYERS, HEADS, GROUP)
    lens = torch.full((batch,), shape.length - 3 if q_len > 1 else 17, device="cuda", dtype=torch.int32)
    reqids = torch.arange(batch, device="cuda", dtype=torch.int32)
    ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * q_len
    lanes = (reqids, ends if q_len > 1 else None, lens)
    angles = torch.rand(shape.length, HEAD_DIM // 2, device="cuda") * 6
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    copies = memory.elements // shape.plane_elements
    views = [memory.sliced(shape, Place(i % LAYERS, i // LAYERS % copies)) for i in range(sources.calls)]

    def calls(**options: Any) -> list[Call]:
        return [
            lambda new=new, kv=kv: append_kv(*new, *kv, *lanes, **options)
            for new, kv in zip(sources.kv, views, strict=True)
        ]

    check(sources, views, int(lens[0]), q_len, calls()[-1])
    variants = {
        "append": calls(),
        "append_rotary": calls(**tables),
        "append_rotary_q": calls(**tables, q=sources.q, q_out=sources.q_out),
    }
    theirs = flashinfer_calls(sources, views, (reqids, ends, lens))
    if theirs:
        check(sources, views, int(lens[0]), q_len, theirs[-1])
        variants["flashinfer"] = theirs
    targets = torch.empty_like(sources.kv)
    variants["copy"] = [lambda to=to, new=new: to.copy_(new) for to, new in zip(targets, sources.kv, strict=True)]
    timed = in_turn({name: captured(each) for name, each in variants.items()}, rounds=rounds)
    row: Row = {"batch": batch, "q_len": q_len, "tokens": sources.rows}
    row |= {f"{name}_us": timed.seconds(name) / sources.calls * 1e6 for name in variants}
    rate = sources.bytes_moved * sources.calls / timed.seconds("append")
    row |= {"append_gb_s": rate / 1e9, "copy_rate_share": rate / copied}
    row["same_size_copy_share"] = timed.speed("append", "copy")
    return row | {"rotary_cost": timed.speed("append", "append_rotary") - 1}


def flashinfer_calls(sources: Sources, views: list[tuple[Tensor, Tensor]], lanes: tuple[Tensor, ...]) -> list[Call]:
    """FlashInfer's append on a view of the slices as pages; empty if it is not installed."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        return []
    reqids, cu_q_lens, lens = lanes
    view = PagedView.of(views[0][0], 32)
    indptr, numbers, last = (part.cuda() for part in view.table(reqids.tolist(), lens.tolist()))
    rows = torch.arange(sources.rows, device="cuda", dtype=torch.int32)
    lane = torch.searchsorted(cu_q_lens, rows, right=True).int() - 1
    position = lens[lane] - cu_q_lens[lane + 1] + rows
    pages = [tuple(view.pages(part) for part in pair) for pair in views]
    return [
        lambda new=new, kv=kv: flashinfer.append_paged_kv_cache(*new, lane, position, kv, numbers, indptr, last)
        for new, kv in zip(sources.kv, pages, strict=True)
    ]


def check(sources: Sources, views: list[tuple[Tensor, Tensor]], length: int, q_len: int, last: Call) -> None:
    """Stop the benchmark if append is wrong, before it is timed."""
    last()
    for cache, rows in zip(views[-1], sources.kv[-1], strict=True):
        if not torch.equal(cache[:, length - q_len : length].reshape(rows.shape), rows):
            raise SystemExit(f"append of {sources.rows} rows is wrong")


def main() -> None:
    """Measure all cases."""
    options = parser(__doc__ or "").parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    copied = copy_rate()
    memory, rounds = Memory(16 << 30), 3 if options.quick else 7
    rows = (measure(memory, *case, rounds, copied) for case in (CASES[::3] if options.quick else CASES))
    record("append", options, rows, copy_rate_gb_s=copied / 1e9)


if __name__ == "__main__":
    main()
