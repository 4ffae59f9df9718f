"""Is prefill over slices as fast as over contiguous or paged memory, and by which kernel?

    python -m bench.prefill [--quick] [--short] [--tune]

Prompts, and chunks on a cached prefix, all causal, in the shape of Llama-3-8B. Every backend that runs here reads the
same bytes as slices and as contiguous layers. "auto" is what the library takes by itself. Beside them stand two paged
caches with shuffled pages: FlashInfer over pages of 16 tokens, FlashAttention 3 over pages of 128. `--short` measures
short lanes instead, where a call a lane costs more than it gains. `--tune` times launch choices for
`triton_kernels/tuning.py`.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slicedkv.attention import AttentionBackend, Batch, available_backends, choose_backend, open_backend
from slicedkv.triton_kernels import PrefillTile, prefill_attention

from .support.common import parser, progress, record
from .support.slices import HEAD_DIM, Memory, Place, Shape, attend, check, shuffled_pages
from .support.timing import Timings, ahead, in_turn

NEEDS_GPU = True
Row = dict[str, Any]
Run = Callable[[int], object]
LAYERS, HEADS, GROUP = 32, 8, 4
CASES = (
    (1, 8192, 8192), (1, 32768, 32768), (1, 8192, 32768), (1, 8192, 131072), (1, 131072, 131072), (16, 2048, 2048),
    (4, 512, 8192), (1, 2048, 8192), (1, 2048, 2048), (4, 2048, 2048), (4, 4096, 4096), (1, 4096, 4096),
    (1, 2048, 32768), (1, 16384, 131072),
)  # fmt: skip
"""Requests, new tokens of each, and the length of each."""
SHORT = (
    (1, 512, 512), (64, 128, 128), (16, 512, 512), (1, 128, 8192), (1, 512, 8192), (8, 64, 4096), (8, 128, 8192),
    (8, 512, 8192), (1, 512, 4096), (1, 64, 65536), (4, 256, 32768),
)  # fmt: skip
BACKENDS = ("fa3", "fa4", "flashinfer", "triton")
LAYOUTS = ("sliced", "contiguous")
PAGES = {"flashinfer_paged": 16, "fa3_paged": 128}
"""Tokens a page."""
LONG_FLOP = 4e12
"""Layers with more take several milliseconds and exceed the L2 many times: a few of them in turn show the same."""
FEW, FEW_ROUNDS = 2, 2
LEAD_CYCLES = 20_000_000  # some 10 ms


class Layers(list[tuple[Tensor, Tensor]]):
    """K and V of layers, in the form in which a backend asks a cache for them."""

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
        self.turns = LAYERS if self.flop < LONG_FLOP else FEW

    def views(self, layout: str) -> Layers:
        """K and V of the layers that take turns."""
        view = self.memory.sliced if layout == "sliced" else self.memory.per_layer
        return Layers(view(self.shape, Place(layer, 0)) for layer in range(self.turns))

    def triton(self, layout: str, tile: PrefillTile | None = None) -> Run:
        """Our kernel."""
        views = self.views(layout)
        lanes = (self.reqids, self.cu_q_lens, self.lens)
        limits = {"max_q_len": self.q_len, "out": self.out, "tile": tile}
        return lambda turn: prefill_attention(self.q, *views[turn], *lanes, **limits)

    def backend(self, name: str, layout: str, **options: Any) -> tuple[Run, AttentionBackend]:
        """A backend of the library, planned."""
        backend = open_backend(name, self.views(layout), num_qo_heads=HEADS * GROUP, **options)
        batch = self.shape.batch
        backend.plan(Batch(range(batch), [self.q_len] * batch, [self.shape.length] * batch))
        return lambda turn: backend.run(turn, self.q, self.out), backend

    def flashinfer_paged(self, pages: Tensor) -> Run:
        """FlashInfer over shuffled pages of 16 tokens."""
        flashinfer, page = importlib.import_module("flashinfer"), PAGES["flashinfer_paged"]
        indptr = torch.arange(self.shape.batch + 1, device="cuda", dtype=torch.int32) * pages.shape[1]
        last = torch.full((self.shape.batch,), page, device="cuda", dtype=torch.int32)
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            self.cu_q_lens, indptr, pages.flatten(), last, HEADS * GROUP, HEADS, HEAD_DIM, page, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        views = [tuple(_pages(rows, page) for rows in pair) for pair in self.views("contiguous")]
        return lambda turn: wrapper.run(self.q, views[turn], out=self.out)

    def fa3_paged(self, pages: Tensor) -> Run:
        """FlashAttention 3 over shuffled pages of 128 tokens: the strongest paged kernel known here."""
        importlib.import_module("fa3_fwd_interface")
        views = [tuple(_pages(rows, PAGES["fa3_paged"]) for rows in pair) for pair in self.views("contiguous")]
        shape = (self.shape.batch, self.q_len, HEADS * GROUP, HEAD_DIM)
        q, out = self.q.view(shape), self.out.view(shape)
        options = {"seqused_k": self.lens, "page_table": pages, "softmax_scale": HEAD_DIM**-0.5, "is_causal": True}
        return lambda turn: torch.ops.fa3_fwd.fwd(q, *views[turn], out=out, **options)

    def check(self, name: str, run: Run, layout: str, pages: Tensor | None = None) -> None:
        """Compare the first and the last new tokens of first and last request with the reference."""
        self.out.fill_(float("nan"))
        run(self.turns - 1)
        k, v = self.views(layout)[-1]
        for lane in {0, self.shape.batch - 1}:
            rows = [part[lane] if pages is None else _paged(part, pages[lane], PAGES[name]) for part in (k, v)]
            begin, end = lane * self.q_len, (lane + 1) * self.q_len
            past = self.shape.length - self.q_len
            first = attend(self.q[begin : begin + 8], *(part[: past + 8] for part in rows))
            check(f"{name}, first tokens", self.out[begin : begin + 8], first)
            check(f"{name}, last tokens", self.out[end - 4 : end], attend(self.q[end - 4 : end], *rows))

    def timed(self, runs: Mapping[str, Run], rounds: int) -> Timings:
        """Time of all layers that take turns. The host launches ahead, as an engine does."""

        def turn_all(run: Run) -> Callable[[], object]:
            return lambda: [run(turn) for turn in range(self.turns)]

        lead = LEAD_CYCLES * (1 + min(self.shape.batch, 16) // 4)
        return in_turn({name: turn_all(run) for name, run in runs.items()}, rounds=rounds, warmup=1, clock=ahead(lead))


def _pages(rows: Tensor, page_tokens: int) -> Tensor:
    return rows.view(-1, page_tokens, HEADS, HEAD_DIM)


def _paged(rows: Tensor, pages: Tensor, page_tokens: int) -> Tensor:
    return _pages(rows, page_tokens)[pages.long()].flatten(0, 1)


def variants(case: Case) -> Iterator[tuple[str, Run, str, Tensor | None]]:
    """Name, run, layout and page table of all that is compared."""
    reasons = available_backends("cuda", torch.bfloat16, HEAD_DIM)
    yield "auto_sliced", case.backend("auto", "sliced")[0], "sliced", None
    for name in BACKENDS:
        if reasons[name] is not None:
            progress(f"{name} is left out: {reasons[name]}")
            continue
        for layout in LAYOUTS:
            yield f"{name}_{layout}", case.backend(name, layout)[0], layout, None
    for name, of, run in (
        ("flashinfer_paged", "flashinfer", case.flashinfer_paged),
        ("fa3_paged", "fa3", case.fa3_paged),
    ):
        if reasons[of] is None and case.shape.length % PAGES[name] == 0:
            pages = shuffled_pages(case.shape, PAGES[name])
            yield name, run(pages), "contiguous", pages


def measure(memory: Memory, batch: int, q_len: int, length: int, rounds: int) -> Row:
    """All variants of one case."""
    case, runs = Case(memory, batch, q_len, length), {}
    row: Row = {"batch": batch, "q_len": q_len, "length": length, "layers_timed": case.turns}
    for name, run, layout, pages in variants(case):
        case.check(name, run, layout, pages)
        runs[name] = run
    timed = case.timed(runs, rounds if case.turns == LAYERS else FEW_ROUNDS)
    row |= {f"{name}_tflop_s": case.flop * case.turns / timed.seconds(name) / 1e12 for name in runs}
    fastest = timed.fastest([name for name in runs if name.endswith("_contiguous")])
    row["fastest_contiguous"] = fastest
    row["auto_vs_contiguous"] = timed.speed("auto_sliced", fastest)
    row |= {f"auto_vs_{name}": timed.speed("auto_sliced", name) for name in PAGES if name in runs}
    row |= {
        f"auto_vs_{name}": timed.speed("auto_sliced", f"{name}_sliced") for name in BACKENDS if f"{name}_sliced" in runs
    }
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
                seconds = case.timed({"tile": run}, 3).seconds("tile")
                found.append((case.flop * case.turns / seconds / 1e12, tile))
            except Exception as failure:  # a tile that asks for too much of the GPU is only a bad tile
                if type(failure).__name__ != "OutOfResources":
                    raise
        for rate, tile in sorted(found, key=lambda pair: -pair[0])[:6]:
            print(f"q {q_len} on {length}: {rate:.0f} TFLOP/s {tile}", flush=True)


def main() -> None:
    """Measure the cases, or time launch choices."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--short", action="store_true", help="measure short lanes instead")
    arguments.add_argument("--tune", action="store_true", help="time launch choices instead")
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    memory = Memory(20 << 30)
    if options.tune:
        tune(memory)
        return
    cases = SHORT if options.short else CASES
    rows = (measure(memory, *case, 3 if options.quick else 5) for case in (cases[:3] if options.quick else cases))
    auto = " + ".join(choose_backend("cuda", torch.bfloat16, HEAD_DIM).backends)
    record("prefill_short" if options.short else "prefill", options, rows, auto=auto)


if __name__ == "__main__":
    main()
