"""Is prefill over slices as fast as over contiguous or paged memory, and by which kernel?

    python -m bench.prefill [--quick] [--tune]

Prompts, and chunks on a cached prefix, all causal. Our Triton kernel runs on slices and on contiguous layers. If
FlashInfer is installed, three more run: slicedkv's backend over it, its `single_prefill` on both layouts, and its
kernel for pages, on slices and on shuffled pages of 16 tokens. `--tune` instead times launch choices for
`triton_kernels/tuning.py`.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slicedkv.attention import Batch, open_backend
from slicedkv.attention.paged_view import PagedView
from slicedkv.triton_kernels import PrefillTile, prefill_attention

from .support.common import parser, progress, record, time_cuda
from .support.slices import HEAD_DIM, Memory, Place, Shape, attend, check, shuffled_pages

NEEDS_GPU = True
Row = dict[str, Any]
Run = Callable[[int], object]
LAYERS, HEADS, GROUP = 32, 8, 4
CASES = (
    (16, 2048, 2048), (1, 2048, 2048), (1, 8192, 8192), (1, 32768, 32768), (1, 131072, 131072),
    (1, 2048, 32768), (1, 16384, 131072), (8, 512, 8192), (1, 512, 512), (64, 128, 128), (16, 512, 512),
    (4, 2048, 2048), (1, 128, 8192), (1, 512, 8192), (8, 64, 4096), (1, 4096, 4096), (4, 4096, 4096), (8, 128, 8192),
    (1, 512, 4096),
)  # fmt: skip
"""Requests, new tokens of each, and the length of each."""
ROTATION = 4
LEAD_CYCLES = 20_000_000  # some 10 ms: 64 launches of 4 layers and more


class Layers(list[tuple[Tensor, Tensor]]):
    """Layer slices, in the form in which a backend asks a cache for them."""

    def k(self, layer: int) -> Tensor:
        """K of a layer."""
        return self[layer][0]

    def v(self, layer: int) -> Tensor:
        """V of a layer."""
        return self[layer][1]


class Case:
    """One batch with its queries and the layers it takes turns on."""

    def __init__(self, memory: Memory, batch: int, q_len: int, length: int) -> None:
        self.memory, self.q_len = memory, q_len
        self.shape = Shape(batch, length, LAYERS, HEADS, GROUP)
        self.q = torch.randn(batch * q_len, HEADS * GROUP, HEAD_DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.reqids = torch.arange(batch, device="cuda", dtype=torch.int32)
        self.lens = torch.full_like(self.reqids, length)
        self.cu_q_lens = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * q_len
        pairs = batch * (q_len * length - q_len * (q_len - 1) / 2)
        self.flop = 4 * HEADS * GROUP * HEAD_DIM * pairs

    def views(self, layout: str) -> list[tuple[Tensor, Tensor]]:
        """K and V of the layers that take turns."""
        view = self.memory.sliced if layout == "sliced" else self.memory.per_layer
        return [view(self.shape, Place(layer, 0)) for layer in range(ROTATION)]

    def triton(self, layout: str, tile: PrefillTile | None = None) -> Run:
        """Our kernel."""
        views = self.views(layout)
        lanes = (self.reqids, self.cu_q_lens, self.lens)
        limits = {"max_q_len": self.q_len, "out": self.out, "tile": tile}
        return lambda turn: prefill_attention(self.q, *views[turn], *lanes, **limits)

    def flashinfer_single(self, flashinfer: Any, layout: str) -> Run:
        """FlashInfer, one request after another, without a page table."""
        views = self.views(layout)
        rows = [slice(i * self.q_len, (i + 1) * self.q_len) for i in range(self.shape.batch)]
        single = flashinfer.single_prefill_with_kv_cache

        def run(turn: int) -> None:
            k, v = views[turn]
            for lane, part in enumerate(rows):
                self.out[part] = single(self.q[part], k[lane], v[lane], causal=True, backend="fa3")

        return run

    def adapter(self) -> Run:
        """The library's FlashInfer backend, which chooses among the kernels."""
        source = Layers(self.views("sliced"))
        backend = open_backend("flashinfer", source, num_qo_heads=HEADS * GROUP)
        batch = self.shape.batch
        backend.plan(Batch(range(batch), [self.q_len] * batch, [self.shape.length] * batch))
        return lambda turn: backend.run(turn, self.q, self.out)

    def flashinfer_paged(self, flashinfer: Any) -> tuple[Run, Tensor]:
        """FlashInfer on a paged cache of the same bytes, and the pages of each request."""
        pages = shuffled_pages(self.shape)
        wrapper = self.planned(flashinfer, pages, 16)
        views = [tuple(rows.view(-1, 16, HEADS, HEAD_DIM) for rows in pair) for pair in self.views("per_layer")]
        return lambda turn: wrapper.run(self.q, views[turn], out=self.out), pages

    def flashinfer_view(self, flashinfer: Any) -> Run:
        """FlashInfer's kernel for pages on slices."""
        slices = self.views("sliced")
        view = PagedView.of(slices[0][0], 64)
        table = view.table(self.reqids.tolist(), [self.shape.length] * self.shape.batch)[1].cuda()
        wrapper = self.planned(flashinfer, table.view(self.shape.batch, -1), 64)
        views = [tuple(view.pages(rows) for rows in pair) for pair in slices]
        return lambda turn: wrapper.run(self.q, views[turn], out=self.out)

    def planned(self, flashinfer: Any, table: Tensor, page: int) -> Any:
        """FlashInfer's wrapper for this batch and page table."""
        indptr = torch.arange(self.shape.batch + 1, device="cuda", dtype=torch.int32) * table.shape[1]
        last = torch.full((self.shape.batch,), page, device="cuda", dtype=torch.int32)
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            self.cu_q_lens, indptr, table.flatten(), last, HEADS * GROUP, HEADS, HEAD_DIM, page, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return wrapper

    def check(self, name: str, run: Run, layout: str, pages: Tensor | None = None) -> None:
        """Compare the first and the last new tokens of first and last request with the reference."""
        self.out.fill_(float("nan"))
        run(ROTATION - 1)
        k, v = self.views(layout)[-1]
        for lane in {0, self.shape.batch - 1}:
            rows = [part[lane] if pages is None else _paged(part, pages[lane]) for part in (k, v)]
            begin, end = lane * self.q_len, (lane + 1) * self.q_len
            past = self.shape.length - self.q_len
            first = attend(self.q[begin : begin + 8], *(part[: past + 8] for part in rows))
            check(f"{name}, first tokens", self.out[begin : begin + 8], first)
            check(f"{name}, last tokens", self.out[end - 4 : end], attend(self.q[end - 4 : end], *rows))

    def seconds(self, run: Run, repeats: int) -> float:
        """GPU time of one layer. Layers take turns, and the host launches ahead, as an engine does."""

        def turn_all() -> None:
            for turn in range(ROTATION):
                run(turn)

        return time_cuda(turn_all, repeats=repeats, warmup=1, lead_cycles=LEAD_CYCLES) / ROTATION


def _paged(rows: Tensor, pages: Tensor) -> Tensor:
    return rows.view(-1, 16, HEADS, HEAD_DIM)[pages.long()].flatten(0, 1)


def measure(memory: Memory, batch: int, q_len: int, length: int, repeats: int) -> Row:
    """All variants of one case."""
    case = Case(memory, batch, q_len, length)
    variants: dict[str, tuple[Run, str, Tensor | None]] = {
        "triton_sliced": (case.triton("sliced"), "sliced", None),
        "triton_contiguous": (case.triton("per_layer"), "per_layer", None),
    }
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        progress("flashinfer is not installed: its variants are left out")
    else:
        variants["single_sliced"] = (case.flashinfer_single(flashinfer, "sliced"), "sliced", None)
        variants["single_contiguous"] = (case.flashinfer_single(flashinfer, "per_layer"), "per_layer", None)
        variants["adapter_sliced"] = (case.adapter(), "sliced", None)
        variants["view_sliced"] = (case.flashinfer_view(flashinfer), "sliced", None)
        run, pages = case.flashinfer_paged(flashinfer)
        variants["flashinfer_paged"] = (run, "per_layer", pages)
    row: Row = {"batch": batch, "q_len": q_len, "length": length}
    seconds = {}
    for name, (run, layout, pages) in variants.items():
        case.check(f"{name} {row}", run, layout, pages)
        seconds[name] = case.seconds(run, repeats)
        row[f"{name}_tflop_s"] = case.flop / seconds[name] / 1e12
    best = min(seconds[name] for name in ("triton_sliced", "adapter_sliced") if name in seconds)
    for name in ("flashinfer_paged", "single_contiguous", "triton_contiguous"):
        if name in seconds:
            row[f"best_adapter_vs_{name}"] = seconds[name] / best
    return row


def tune(memory: Memory) -> None:
    """Time launch choices on a prompt and on a chunk, and print the best."""
    for q_len, length in ((8192, 8192), (2048, 32768)):
        case = Case(memory, 1, q_len, length)
        found = []
        for rows, tokens, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
            tile = PrefillTile(rows, tokens, warps, stages)
            try:
                run = case.triton("sliced", tile)
                case.check(f"{tile}", run, "sliced")
                found.append((case.flop / case.seconds(run, 5) / 1e12, tile))
            except Exception as failure:  # a tile that asks for too much of the GPU is only a bad tile
                if type(failure).__name__ != "OutOfResources":
                    raise
        for rate, tile in sorted(found, key=lambda pair: -pair[0])[:6]:
            print(f"q {q_len} on {length}: {rate:.0f} TFLOP/s {tile}", flush=True)


def main() -> None:
    """Measure the cases, or time launch choices."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--tune", action="store_true", help="time launch choices instead")
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    memory = Memory(20 << 30)
    if options.tune:
        tune(memory)
        return
    repeats = 3 if options.quick else 5
    record("prefill", options, (measure(memory, *case, repeats) for case in (CASES[:3] if options.quick else CASES)))


if __name__ == "__main__":
    main()
