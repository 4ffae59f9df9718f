"""What does an engine gain, and pay, when nothing but the layout of K and V changes?

    python -m bench.serving [--trace CSV ...] [--only long chat prefix steps] [--managers sliced paged ...] [--quick]

Model, scheduler and requests are the same. K and V lie in slices, interleaved, in a plane for each layer, in a paged
cache over real tables (FlashInfer, 16 tokens a page; or FlashAttention 3 for prompts, 128 tokens a page), or in slots
of full length from the start ("static"). The memory is so small that it limits the batch. In `prefix` 64 requests ask
about 8 documents, and prefixes are shared: in slices by the engine's prefix cache, in pages by hashes of pages. The
workload `steps` has memory enough; it shows what single steps take when the mapper maps inside them ("sync") and
beside them.

Each manager serves a workload twice, in order and back, and ratios are taken pass by pass. The model is Llama-3-8B with
random weights. Requests are the first of the public traces arxiv_long_offline, azure_2023_conv and
sync_vs_async_trace, from CSV files or drawn from distributions fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

from slicedkv.layout import ceil_div

from .baselines.workloads import (
    PAGED,
    SYNC,
    Clock,
    Row,
    Workload,
    lengths,
    longest,
    model,
    open_engine,
    prompts,
    submit,
    warm_up,
)
from .support.common import parser, progress, record
from .support.traces import Request

NEEDS_GPU = True
MAPPERS = tuple(layout + mapper for layout in ("sliced", "per_layer") for mapper in (SYNC, ""))
SHARING = ("sliced", "interleaved", *PAGED)
PASSES = 2

WORKLOADS = {
    "long": Workload("arxiv_long_offline", 3, 1.0, 8, 32 * 10**9),
    "chat": Workload("azure_2023_conv", 100, 1.0, 96, 6 * 10**9),
    "prefix": Workload("documents", 64, 1.0, 64, 60 * 10**9, SHARING, documents=8),
    "steps": Workload("sync_vs_async_trace", 32, 0.5, 32, 24 * 10**9, MAPPERS),
}
QUICK = {
    "long": Workload("arxiv_long_offline", 4, 0.1, 8, 4 * 10**9),
    "chat": Workload("azure_2023_conv", 40, 1.0, 32, 2 * 10**9),
    "prefix": Workload("documents", 16, 0.125, 16, 8 * 10**9, SHARING, documents=4),
    "steps": Workload("sync_vs_async_trace", 8, 0.2, 8, 4 * 10**9, MAPPERS),
}


def measure(
    served: transformers.PreTrainedModel, name: str, manager: str, workload: Workload, requests: Sequence[Request]
) -> tuple[Row, list[int]]:
    """Serve a workload once, with all requests queued at the start; return the row and every request's first token."""
    clock = Clock()
    with open_engine(served, manager, workload, longest(requests), on_step=clock.steps.append) as engine:
        warm_up(engine)
        clock.steps.clear()
        before, preempted = engine.cache.stats(), engine.scheduler.num_preemptions
        submit(engine, prompts(served, requests, workload), requests)
        clock.run(engine)
        stats = engine.cache.stats()
        preempted = engine.scheduler.num_preemptions - preempted
    row = {
        "measure": name, "manager": manager, "requests": len(requests), "memory_gb": workload.memory_bytes / 1e9,
        "prompt_tokens": sum(request.prompt_tokens for request in requests), **clock.row(), "preemptions": preempted,
        "stalls": stats.stalls - before.stalls, "stall_ms": (stats.stall_us - before.stall_us) / 1e3,
    }  # fmt: skip
    return row, clock.first_tokens


def rows(served: transformers.PreTrainedModel, name: str, workload: Workload, paths: Sequence[Path]) -> Iterator[Row]:
    """A workload with every manager, once in order and once back: a row a pass.

    First each serves a part of it: libraries load some things for a number of tokens, once in a process, and the first
    manager must not pay for all.
    """
    requests, expected = lengths(workload, paths), list[int]()
    for manager in workload.managers:
        progress(f"{name}: {manager}, warm-up")
        measure(served, name, manager, workload, requests[: ceil_div(len(requests), 4)])
    for index in range(PASSES):
        for manager in workload.managers[:: -1 if index % 2 else 1]:
            progress(f"{name}: {manager}, pass {index + 1}")
            row, tokens = measure(served, name, manager, workload, requests)
            expected = expected or tokens
            same = sum(a == b for a, b in zip(tokens, expected, strict=True))
            yield {**row, "pass": index, f"first_tokens_as_{workload.managers[0]}": same / len(tokens)}
            torch.cuda.empty_cache()


def joined(found: Sequence[Row]) -> list[Row]:
    """One row a manager: the median of its passes, and its throughput over that of the paged ones, pass by pass."""
    passes: dict[str, list[Row]] = {}
    for row in found:
        passes.setdefault(row["manager"], []).append(row)
    return [_join(runs) | _beside(runs, passes) for runs in passes.values()]


def _join(runs: Sequence[Row]) -> Row:
    row = {key: statistics.median(run[key] for run in runs) for key, value in runs[0].items() if type(value) is float}
    return {**runs[0], **row, "passes": len(runs), "stall_ms_each": [run["stall_ms"] for run in runs]}


def _beside(runs: Sequence[Row], passes: dict[str, list[Row]]) -> Row:
    """Throughput over that of each paged manager that served the same passes."""
    others = {name: passes[name] for name in PAGED if len(passes.get(name, ())) == len(runs)}
    return {
        f"vs_{name}": statistics.median(
            run["tokens_per_s"] / other["tokens_per_s"] for run, other in zip(runs, theirs, strict=True)
        )
        for name, theirs in others.items()
    }


def main() -> None:
    """Measure the workloads, and write the rows of each into a file, also after Ctrl-C or a failure."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", type=Path, nargs="*", default=[], help="CSV files of the traces")
    arguments.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments.add_argument("--managers", nargs="+", help="only these managers of K and V")
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    served, traces = model(options.device), sorted(path.stem for path in options.trace) or "generated"
    for name in options.only:
        workload = (QUICK if options.quick else WORKLOADS)[name]
        if options.managers:
            workload = workload._replace(managers=tuple(options.managers))
        found = rows(served, name, workload, options.trace)
        record(f"serving_{name}", options, found, finish=joined, traces=traces)


if __name__ == "__main__":
    main()
