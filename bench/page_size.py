"""What does slicing cost the kernels as the cache grows, on pages of 2 MiB and on extents of 32 MiB?

    python -m bench.page_size [--quick]

A layer's slice lies all over the cache, a contiguous layer does not. So a call over slices walks over all addresses of
the cache, which the GPU's address translation may feel. Decode reads 16 equal requests; prefill computes 2,048 new
tokens of one. Both read the same memory as slices and as contiguous layers: a cache of Llama-3-8B of 1 to 100 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .decode import MODELS, Decode
from .prefill import Case
from .support.common import parser, progress, record
from .support.slices import Memory, Shape
from .support.timing import Timings, captured, in_turn

NEEDS_GPU = True
Row = dict[str, Any]
GB = 10**9
EXTENTS = (1, 16)
LAYOUTS = ("sliced", "per_layer")
BATCH, Q_LEN = 16, 2048
TOKEN_BYTES = 32 * 8 * 128 * 4


def tokens(num_bytes: int, batch: int) -> int:
    """Tokens of each request when all together take `num_bytes`."""
    return num_bytes // TOKEN_BYTES // batch // 64 * 64


def decode(memory: Memory, num_bytes: int, rounds: int) -> Timings:
    """One token of each request, by layout."""
    shape = Shape(BATCH, tokens(num_bytes, BATCH), *MODELS[0])
    ours, calls = Decode(shape), {}
    for layout in LAYOUTS:
        views = [getattr(memory, layout)(shape, place) for place in memory.places(shape)]
        ours.check(layout, *views[-1])
        calls[layout] = captured([ours.call(k, v) for k, v in views])
    return in_turn(calls, rounds=rounds)


def prefill(memory: Memory, num_bytes: int, rounds: int) -> Timings:
    """A chunk of one prompt, by layout: our kernel, which depends most on its memory."""
    case = Case(memory, 1, Q_LEN, tokens(num_bytes, 1))
    runs = {layout: case.triton(layout) for layout in LAYOUTS}
    for layout, run in runs.items():
        case.check(layout, run, layout)
    return case.timed(runs, rounds)


def measure(sizes: list[int], rounds: int) -> Iterator[Row]:
    """Every size on both kinds of pages."""
    for extent_pages in EXTENTS:
        progress(f"mapping {sizes[-1] / GB:g} GB in pieces of {2 * extent_pages} MiB")
        memory = Memory(sizes[-1], extent_pages)
        for num_bytes in sizes:
            for name, call in (("decode", decode), ("prefill", prefill)):
                timed = call(memory, num_bytes, rounds)
                yield {
                    "measure": name, "extent_pages": extent_pages, "cache_gb": num_bytes / GB,
                    **{f"all_layers_{layout}_us": timed.seconds(layout) * 1e6 for layout in LAYOUTS},
                    "vs_per_layer": timed.speed("sliced", "per_layer"),
                }  # fmt: skip
        memory.close()


def main() -> None:
    """Measure, print each row as it comes, and write them."""
    options = parser(__doc__ or "").parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    sizes = [size * GB for size in ((1, 16) if options.quick else (1, 4, 16, 50, 100))]
    record("page_size", options, measure(sizes, 3 if options.quick else 7))


if __name__ == "__main__":
    main()
