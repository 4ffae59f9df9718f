"""How does slicedkv compare with other projects: transformers' continuous batching, and kvcached's allocator?

    python -m bench.peers [--trace CSV ...] [--quick]

Transformers' continuous batching and slicedkv's engine serve the same model (Llama-3-8B with random weights) and the
same requests with the same memory for K and V: tokens per second and peak memory. Then kvcached's allocator and a
`SlicedKVCache` let the same requests grow token by token: microseconds and bytes. Requests are those of
azure_2023_conv, half as long for the engines. If a peer cannot be measured, its row says why.

Some builds of torch bring a C++ library of their own, beside which kvcached may die while it prints. With the system's
library it does not: `LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6 python -m bench.peers`.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .baselines.kvcached import Kvcached
from .baselines.transformers_batching import serve_slicedkv, serve_transformers
from .baselines.workloads import Row, Workload, lengths, longest, model
from .support.child import in_child
from .support.common import parser, progress, record
from .support.growing import Sliced, replay
from .support.spin import SHAPES, Device

NEEDS_GPU = True
SHAPE = "llama-3-8b"
SERVING = Workload("azure_2023_conv", 64, 0.5, 64, 8 * 10**9)
GROWING = Workload("azure_2023_conv", 96, 1.0, 32, 16 << 30)
QUICK = (Workload("azure_2023_conv", 16, 0.25, 16, 2 * 10**9), Workload("azure_2023_conv", 24, 0.5, 8, 4 << 30))
INSTALL = {
    "kvcached": "pip install --no-build-isolation kvcached==0.1.6, which builds it: torch 2.10, C++ and CUDA's headers",
    "transformers": "pip install 'transformers>=5.17'",
}


def guarded(peer: str, what: str, measure: Callable[[], Row]) -> Row:
    """The row that `measure` returns, or a row that says why there is none."""
    progress(f"{what}: {peer}")
    package = peer.partition(",")[0]
    if importlib.util.find_spec(package) is None:
        return absent(peer, what, False, f"not installed: {INSTALL[package]}")
    try:
        return measure()
    except Exception as error:
        return absent(peer, what, True, f"{type(error).__name__}: {error}")


def absent(peer: str, what: str, installed: bool, reason: str) -> Row:
    """A row for a peer that was not measured, with the reason in one line."""
    line = " ".join(reason.replace("|", "/").split())[:500]
    print(f"{peer} was not measured ({what}): {line}", flush=True)
    return {"measure": "not measured", "peer": peer, "what": what, "installed": installed, "reason": line}


def serving_rows(device: str, workload: Workload, paths: Sequence[Path]) -> Iterator[Row]:
    """Both engines, one after the other."""
    requests = lengths(workload, paths)
    load = functools.cache(lambda: model(device))
    for name, serve in (("slicedkv", serve_slicedkv), ("transformers", serve_transformers)):
        yield guarded(name, "serving", lambda serve=serve: serve(load(), workload, requests)[0])  # type: ignore[misc]


def growing_rows(device: str, workload: Workload, paths: Sequence[Path]) -> Iterator[Row]:
    """The cache with both mappers, and kvcached in a process of its own."""
    for mapper in ("background", "sync"):
        measure = functools.partial(grow_sliced, mapper, device, workload, paths)
        yield guarded(f"slicedkv, {mapper}", "growing", measure)
    yield guarded("kvcached", "growing", functools.partial(in_child, grow_kvcached, device, workload, paths))


def grow_sliced(mapper: str, device: str, workload: Workload, paths: Sequence[Path]) -> Row:
    """Grow and free the requests in a `SlicedKVCache`."""
    requests, spinning = lengths(workload, paths), Device(device)
    options = {"mapper": mapper, "memory_limit": workload.memory_bytes}
    opener = functools.partial(spinning.cache, SHAPES[SHAPE], workload.slots, longest(requests), **options)
    found = replay(lambda: Sliced(opener()), requests, workload.slots, spinning, _token_bytes())
    return {"measure": "growing", "allocator": f"slicedkv, {mapper}", "requests": len(requests), **found}


def grow_kvcached(device: str, workload: Workload, paths: Sequence[Path]) -> Row:
    """Grow and free the requests in kvcached. Its C++ code ends the process on some errors."""
    requests, spinning = lengths(workload, paths), Device(device)
    opener = functools.partial(Kvcached, SHAPES[SHAPE], workload.memory_bytes, "cuda:0" if spinning.is_cuda else device)
    found = replay(opener, requests, workload.slots, spinning, _token_bytes())
    return {"measure": "growing", "allocator": "kvcached", "requests": len(requests), **found}


def _token_bytes() -> int:
    return 2 * math.prod(SHAPES[SHAPE]) * torch.bfloat16.itemsize


def rows(device: str, *, quick: bool, paths: Sequence[Path]) -> Iterator[Row]:
    """A row for everything that can be measured, and a row with the reason for the rest."""
    serving, growing = QUICK if quick else (SERVING, GROWING)
    yield from serving_rows(device, serving, paths)
    gc.collect()
    torch.cuda.empty_cache()
    yield from growing_rows(device, growing, paths)


def main() -> None:
    """Measure all peers, and write the rows after each one."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", type=Path, nargs="*", default=[], help="CSV files of the traces")
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    record("peers", options, rows(options.device, quick=options.quick, paths=options.trace))


if __name__ == "__main__":
    main()
