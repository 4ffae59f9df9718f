"""Is decode over slices as fast as over other layouts, and near the rate of the memory?

    python -m bench.decode [--quick] [--tune | --tiles]

Our kernel runs every shape on slices and on contiguous layers. FlashInfer, if installed, runs it on slices and on a
paged cache with shuffled pages of 16 tokens. Each timing is one CUDA graph over all layers, and variants take turns.
`--tune` instead searches launch choices for `triton_kernels/tuning.py` and prints them; `--tiles` compares some tiles
on every shape.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slicedkv.attention.paged_view import PagedView
from slicedkv.triton_kernels import DecodeTile, decode_attention, decode_workspace_numel

from .support.common import copy_rate, parser, progress, record, show, time_cuda
from .support.slices import HEAD_DIM, Memory, Place, Shape, attend, check, shuffled_pages
from .support.timing import Call, captured, in_turn

NEEDS_GPU = True
Row = dict[str, Any]
MODELS = ((32, 8, 4), (60, 4, 8), (80, 1, 8))
"""Layers, KV heads and group: Llama-3-8B, Yi-34B on two GPUs, Llama-3-70B on eight."""
BATCHES, LENGTHS = (1, 4, 16, 64, 128), (1024, 4096, 16384, 65536, 131072)
LARGE_LAYER_BYTES = 512 << 20
TUNED: dict[str, tuple[int, ...]] = {
    "tile_bytes": (16384, 32768),
    "stages": (2, 3, 4),
    "warps": (4, 8),
    "heads": (1, 2),
    "busy_programs": (1, 2),
}
"""Launch choices, of which `--tune` tries all combinations."""
CANDIDATES = {
    f"{size >> 10}k_h{heads}_s{stages}": DecodeTile(size, heads, 4, stages, busy_programs=1)
    for size, heads, stages in ((16384, 2, 4), (32768, 1, 3), (32768, 2, 2), (32768, 2, 3))
}
"""Tiles that `--tiles` compares with the table's on every shape."""
TUNED_ON = (
    (1, 131072, 0), (8, 8192, 0), (16, 32768, 0), (128, 2048, 0), (1, 16384, 1), (16, 1024, 1), (128, 1024, 1),
    (16, 16384, 1), (1, 16384, 2), (64, 8192, 2),
)  # fmt: skip
"""Batch, length and model of the shapes that `--tune` times."""


def shapes(memory: Memory, quick: bool) -> Iterator[Shape]:
    """The grid, as far as it fits in memory."""
    for layers, heads, group in MODELS:
        for batch in BATCHES[::2] if quick else BATCHES:
            for length in LENGTHS[::2] if quick else LENGTHS:
                shape = Shape(batch, length, layers, heads, group)
                if memory.fits(shape):
                    yield shape


class Decode:
    """Calls of our kernel on one shape, which share their buffers."""

    def __init__(self, shape: Shape, tile: DecodeTile | None = None) -> None:
        self.shape, self.tile = shape, tile
        self.q = torch.randn(shape.batch, shape.heads * shape.group, HEAD_DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.reqids = torch.arange(shape.batch, device="cuda", dtype=torch.int32).flip(0).contiguous()
        self.lens = torch.full_like(self.reqids, shape.length)
        self.workspace: Tensor | None = None

    def call(self, k: Tensor, v: Tensor) -> Call:
        """Attend over one layer."""
        if self.workspace is None:
            numel = decode_workspace_numel(self.q, k, v, tile=self.tile)
            self.workspace = torch.empty(numel, device="cuda")
        buffers = {"workspace": self.workspace, "out": self.out, "tile": self.tile}
        return lambda: decode_attention(self.q, k, v, self.reqids, self.lens, **buffers)

    def check(self, name: str, k: Tensor, v: Tensor) -> None:
        """Compare first and last lane with the reference."""
        self.out.fill_(float("nan"))
        self.call(k, v)()
        for lane in {0, self.shape.batch - 1}:
            reqid = int(self.reqids[lane])
            check(
                f"{name} {self.shape}", self.out[lane : lane + 1], attend(self.q[lane : lane + 1], k[reqid], v[reqid])
            )


def flashinfer_calls(memory: Memory, shape: Shape, places: list[Place]) -> dict[str, list[Call]]:
    """FlashInfer with tensor cores, on a paged cache of the same bytes and on slices; empty if not installed."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        return {}
    ours = Decode(shape)
    paged = [[rows.view(-1, 16, shape.heads, HEAD_DIM) for rows in memory.per_layer(shape, place)] for place in places]
    slices = [memory.sliced(shape, place) for place in places]
    view = PagedView.of(slices[0][0], 64)
    viewed = [[view.pages(rows) for rows in pair] for pair in slices]
    pages = shuffled_pages(shape)
    of_slices = view.table(ours.reqids.tolist(), [shape.length] * shape.batch)[1].cuda().view(shape.batch, -1)
    k, v = paged[0]
    first = pages[0].long()
    expected = {
        "flashinfer_paged": attend(ours.q[:1], k[first].flatten(0, 1), v[first].flatten(0, 1)),
        "flashinfer_sliced": attend(ours.q[:1], *(rows[int(ours.reqids[0])] for rows in slices[0])),
    }
    calls = {}
    for name, table, page, layers in (
        ("flashinfer_paged", pages, 16, paged),
        ("flashinfer_sliced", of_slices, 64, viewed),
    ):
        wrapper = planned(flashinfer, shape, table, page)
        check(f"{name} {shape}", wrapper.run(ours.q, tuple(layers[0]))[:1], expected[name])
        calls[name] = [lambda w=wrapper, kv=tuple(kv): w.run(ours.q, kv, out=ours.out) for kv in layers]
    return calls


def planned(flashinfer: Any, shape: Shape, table: Tensor, page: int) -> Any:
    """FlashInfer's wrapper for one token of every request."""
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * table.shape[1]
    last = torch.full((shape.batch,), page, dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    heads = (shape.heads * shape.group, shape.heads, HEAD_DIM)
    wrapper.plan(indptr, table.flatten(), last, *heads, page, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return wrapper


def measure(memory: Memory, shape: Shape, rounds: int, copied: float) -> Row:
    """All variants of one shape, in turn."""
    places, ours = memory.places(shape), Decode(shape)
    calls: dict[str, list[Call]] = {}
    for name, view in (("sliced", memory.sliced), ("per_layer", memory.per_layer)):
        views = [view(shape, place) for place in places]
        ours.check(name, *views[-1])
        calls[name] = [ours.call(k, v) for k, v in views]
    calls |= flashinfer_calls(memory, shape, places)
    timed = in_turn({name: captured(each) for name, each in calls.items()}, rounds=rounds)
    seconds = {name: timed.seconds(name) / len(places) for name in calls}
    rate = shape.layer_bytes / seconds["sliced"]
    row: Row = {**shape._asdict(), "layers_timed": len(places)}
    row |= {f"{name}_us": value * 1e6 for name, value in seconds.items()}
    row |= {"sliced_gb_s": rate / 1e9, "copy_rate_share": rate / copied}
    row |= {f"vs_{name}": timed.speed("sliced", name) for name in calls if name != "sliced"}
    return row | {"large": shape.layer_bytes >= LARGE_LAYER_BYTES}


def cost(memory: Memory, tile: DecodeTile) -> float:
    """Geometric mean of the time over that of a read at 4 TB/s; infinite if the tile does not fit."""
    total = 1.0
    for batch, length, model in TUNED_ON:
        shape = Shape(batch, length, *MODELS[model])
        try:
            ours = Decode(shape, tile)
            views = [memory.sliced(shape, place) for place in memory.places(shape)]
            ours.check(f"{tile}", *views[-1])
            seconds = time_cuda(captured([ours.call(k, v) for k, v in views]), repeats=5) / len(views)
        except Exception as failure:  # a tile that asks for too much of the GPU is only a bad tile
            if type(failure).__name__ != "OutOfResources":
                raise
            return float("inf")
        total *= seconds / (shape.layer_bytes / 4e12)
    return total ** (1 / len(TUNED_ON))


def tune(memory: Memory) -> None:
    """Try all combinations and print the best."""
    found = []
    for values in itertools.product(*TUNED.values()):
        tile = DecodeTile(**dict(zip(TUNED, values, strict=True)))
        found.append((cost(memory, tile), tile))
        show({"cost": found[-1][0], **dataclasses.asdict(tile)})
    for least, tile in sorted(found, key=lambda pair: pair[0])[:8]:
        print(f"{least:.4f} {tile}", flush=True)


def tiles(memory: Memory, shape: Shape) -> Row:
    """Speed of each tile of `CANDIDATES` over that of the table's, on slices, and what slices cost it."""
    views, places = {"sliced": memory.sliced, "per_layer": memory.per_layer}, memory.places(shape)
    calls = {}
    for name, tile in {"table": None, **CANDIDATES}.items():
        ours = Decode(shape, tile)
        for layout, view in views.items():
            kv = [view(shape, place) for place in places]
            try:
                ours.check(f"{name}, {layout}", *kv[-1])
                calls[f"{name} {layout}"] = captured([ours.call(*pair) for pair in kv])
            except Exception as failure:  # as in `cost`
                if type(failure).__name__ != "OutOfResources":
                    raise
    timed = in_turn(calls, rounds=3)
    row: Row = {**shape._asdict(), "table_us": timed.seconds("table sliced") / len(places) * 1e6}
    row["table_vs_per_layer"] = timed.speed("table sliced", "table per_layer")
    for name in CANDIDATES:
        if f"{name} sliced" in calls:
            row[name] = timed.speed(f"{name} sliced", "table sliced")
            row[f"{name}_vs_per_layer"] = timed.speed(f"{name} sliced", f"{name} per_layer")
    return row


def main() -> None:
    """Measure the grid, or search launch choices."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--tune", action="store_true", help="search launch choices instead")
    arguments.add_argument("--tiles", action="store_true", help="compare tiles on every shape instead")
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    copied = copy_rate()
    progress(f"copy rate {copied / 1e9:.0f} GB/s")
    memory = Memory(24 << 30 if options.quick else 72 << 30 if options.tune or options.tiles else 100 * 10**9)
    if options.tune:
        tune(memory)
        return
    if options.tiles:
        for shape in shapes(memory, options.quick):
            show(tiles(memory, shape))
        return
    rounds = 3 if options.quick else 5
    rows = (measure(memory, shape, rounds, copied) for shape in shapes(memory, options.quick))
    record("decode", options, rows, copy_rate_gb_s=copied / 1e9)


if __name__ == "__main__":
    main()
