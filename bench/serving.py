"""What does an engine gain, and pay, when nothing but the layout of K and V changes?

    python bench/serving.py [--trace CSV ...] [--only long chat steps] [--quick]

The same model, scheduler and requests, K and V managed as slices, interleaved, in a plane for each layer, in a paged
cache (16 tokens a page, FlashInfer over real tables), or reserved for the longest request from the start. The memory is
so small that it binds. A third workload has memory enough, and shows what single steps take when pages are mapped
inside them ("sync") and beside them. Random weights of Llama-3-8B; requests are the first of the public traces
arxiv_long_offline, azure_2023_conv and sync_vs_async_trace, from CSV files or drawn from distributions fitted to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from slicedkv.engine import Engine, EngineStep, SamplingParams
from slicedkv.integrations.transformers import attention_scale, cache_for_model
from slicedkv.layout import align_up

from .support.common import parser, percentiles, progress, record
from .support.traces import FITS, Request, generate, read_trace

NEEDS_GPU = True
Row = dict[str, Any]
MANAGERS = ("sliced", "interleaved", "per_layer", "paged", "static")
SYNC = "_sync"
MAPPERS = tuple(layout + mapper for layout in ("sliced", "per_layer") for mapper in (SYNC, ""))
CHUNK = 8192
WARM_PROMPT = 500
POINTS = 250


class Workload(NamedTuple):
    """Requests of one trace, and the memory they share."""

    trace: str
    requests: int
    scale: float
    slots: int
    memory_bytes: int
    managers: tuple[str, ...] = MANAGERS


WORKLOADS = {
    "long": Workload("arxiv_long_offline", 3, 1.0, 8, 32 * 10**9),
    "chat": Workload("azure_2023_conv", 100, 1.0, 96, 6 * 10**9),
    "steps": Workload("sync_vs_async_trace", 32, 0.5, 32, 24 * 10**9, MAPPERS),
}
QUICK = {
    "long": Workload("arxiv_long_offline", 4, 0.1, 8, 4 * 10**9),
    "chat": Workload("azure_2023_conv", 40, 1.0, 32, 2 * 10**9),
    "steps": Workload("sync_vs_async_trace", 8, 0.2, 8, 4 * 10**9, MAPPERS),
}


def model(device: str) -> transformers.PreTrainedModel:
    """Llama-3-8B with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, rope_theta=500_000.0, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        found = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return found


def lengths(workload: Workload, paths: Sequence[Path]) -> list[Request]:
    """The workload's requests: the first of its trace, scaled."""
    files = {path.stem: path for path in paths}
    if workload.trace in files:
        chosen = read_trace(files[workload.trace]).requests[: workload.requests]
    else:
        chosen = generate(workload.trace, FITS[workload.trace], workload.requests).requests
    return [Request(*(max(1, round(length * workload.scale)) for length in request)) for request in chosen]


def token_bytes(served: transformers.PreTrainedModel) -> int:
    """Bytes of K and V of one token over all layers."""
    config = served.config
    return int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * served.dtype.itemsize)


def open_engine(
    served: transformers.PreTrainedModel, manager: str, workload: Workload, max_seq_len: int, **options: Any
) -> Engine:
    """An engine whose K and V are managed so."""
    common = {"max_tokens_per_step": CHUNK, **options}
    config, slots = served.config, workload.slots
    if manager == "paged":
        from .baselines.paged import PagedBackend, PagedCache, paged_layout  # needs FlashInfer

        shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, served.dtype.itemsize)
        layout = paged_layout(*shape, slots, max_seq_len)
        cache: Any = PagedCache(layout, served.dtype, served.device, workload.memory_bytes)
        heads = config.num_attention_heads
        backend: Any = PagedBackend(cache, num_qo_heads=heads, scale=attention_scale(served))
        return Engine(served, cache=cache, backend=backend, **common)
    mapper = "sync" if manager.endswith(SYNC) else "background"
    kind = "sliced" if manager == "static" else manager.removesuffix(SYNC)
    if manager == "static":
        slots = max(1, min(slots, workload.memory_bytes // (max_seq_len * token_bytes(served))))
    cache = cache_for_model(served, slots, max_seq_len, memory_limit=workload.memory_bytes, layout=kind, mapper=mapper)
    return Engine(served, cache=cache, **common)


class Clock:
    """When each request got its tokens, and what each step held."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}
        self.first_tokens: list[int] = []
        self.steps: list[EngineStep] = []
        self.seconds = 0.0

    def run(self, engine: Engine) -> None:
        """Serve everything."""
        firsts: dict[int, int] = {}
        begun = time.perf_counter()
        while not engine.idle:
            events = engine.step()
            now = time.perf_counter() - begun
            for event in events:
                self.times.setdefault(event.request.request_id, []).append(now)
                firsts.setdefault(event.request.request_id, event.token)
        self.seconds = time.perf_counter() - begun
        self.first_tokens = [firsts[request_id] for request_id in sorted(firsts)]

    def row(self) -> Row:
        """Throughput and latencies."""
        firsts = [times[0] for times in self.times.values()]
        gaps = [b - a for times in self.times.values() for a, b in pairwise(times)]
        running = [len(step.seq_lens) for step in self.steps]
        decoding = [step for step in self.steps if step.num_tokens == len(step.seq_lens)]
        prompts_s = sum(step.seconds for step in self.steps) - sum(step.seconds for step in decoding)
        steps = [step.seconds * 1e3 for step in decoding]
        host = [(step.seconds - step.wait_seconds) * 1e3 for step in decoding]
        (first_p50, first_p99), (gap_p50, gap_p99) = percentiles(firsts, 0.5, 0.99), percentiles(gaps, 0.5, 0.99)
        (step_p50, step_p999) = percentiles(steps, 0.5, 0.999)
        return {
            "seconds": self.seconds, "tokens_per_s": sum(map(len, self.times.values())) / self.seconds,
            "ttft_s_p50": first_p50, "ttft_s_p99": first_p99,
            "tpot_ms_p50": gap_p50 * 1e3, "tpot_ms_p99": gap_p99 * 1e3,
            "decode_step_ms_p50": step_p50, "decode_step_ms_p999": step_p999, "decode_step_ms_max": max(steps),
            "decode_step_host_ms_p50": statistics.median(host), "decode_steps": len(decoding),
            "prompt_steps": len(self.steps) - len(decoding), "prompt_steps_s": prompts_s,
            "batch_mean": statistics.fmean(running), "batch_max": max(running), "steps": len(self.steps),
            "series": {"batch": thinned(running), "decode_step_ms": thinned(steps)},
        }  # fmt: skip


def thinned(values: Sequence[float]) -> list[float]:
    """Few enough values for a plot, the largest of each stretch."""
    stretch = -(-len(values) // POINTS)
    return [round(max(values[i : i + stretch]), 3) for i in range(0, len(values), stretch)]


def measure(
    served: transformers.PreTrainedModel, name: str, manager: str, workload: Workload, requests: Sequence[Request]
) -> tuple[Row, list[int]]:
    """Serve a workload once, all requests there from the start; return the figures and every request's first token."""
    clock = Clock()
    with open_engine(served, manager, workload, longest(requests), on_step=clock.steps.append) as engine:
        warm_up(engine)
        clock.steps.clear()
        before, preempted = engine.cache.stats(), engine.scheduler.num_preemptions
        submit(engine, prompts(served, requests), requests)
        clock.run(engine)
        stats = engine.cache.stats()
        preempted = engine.scheduler.num_preemptions - preempted
    row = {
        "measure": name, "manager": manager, "requests": len(requests), "memory_gb": workload.memory_bytes / 1e9,
        "prompt_tokens": sum(request.prompt_tokens for request in requests), **clock.row(), "preemptions": preempted,
        "stalls": stats.stalls - before.stalls, "stall_ms": (stats.stall_us - before.stall_us) / 1e3,
    }  # fmt: skip
    return row, clock.first_tokens


def longest(requests: Sequence[Request]) -> int:
    """The `max_seq_len` that these requests need."""
    return align_up(max(request.tokens for request in requests), 64)


def prompts(served: transformers.PreTrainedModel, requests: Sequence[Request]) -> list[list[int]]:
    """Random prompts of the requests' lengths, the same ones each time."""
    source, vocabulary = torch.Generator().manual_seed(1), served.config.vocab_size
    return [torch.randint(3, vocabulary, (request.prompt_tokens,), generator=source).tolist() for request in requests]


def submit(engine: Engine, ids: Sequence[list[int]], requests: Sequence[Request]) -> None:
    """Queue every prompt, to be followed by as many tokens as its request decodes."""
    for prompt, request in zip(ids, requests, strict=True):
        engine.submit(prompt, SamplingParams(max_tokens=request.decode_tokens, ignore_eos=True))


def warm_up(engine: Engine) -> None:
    """Compile kernels and capture the graphs of every batch size: a long prompt, then one for each slot, more than one
    step computes, so that prompts and tokens meet in a step, and which end in turn.
    """
    slots, max_seq_len = engine.cache.layout.max_batch_size, engine.cache.layout.max_seq_len
    engine.generate([[5] * min(2 * CHUNK, max_seq_len - 2)], SamplingParams(max_tokens=2, ignore_eos=True))
    for index in range(slots):
        prompt = [5] * max(1, min(WARM_PROMPT, max_seq_len - slots - 2))
        engine.submit(prompt, SamplingParams(max_tokens=2 + index, ignore_eos=True))
    engine.run()


def rows(served: transformers.PreTrainedModel, name: str, workload: Workload, paths: Sequence[Path]) -> Iterator[Row]:
    """A workload with every manager.

    A part of it is served beforehand by each: what libraries load for a number of tokens they load once in a process,
    and that must not be the first manager's.
    """
    requests, expected = lengths(workload, paths), list[int]()
    for manager in workload.managers:
        progress(f"{name}: {manager}, warm-up")
        measure(served, name, manager, workload, requests[: -(-len(requests) // 4)])
    for manager in workload.managers:
        progress(f"{name}: {manager}")
        row, tokens = measure(served, name, manager, workload, requests)
        expected = expected or tokens
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        yield {**row, f"first_tokens_as_{workload.managers[0]}": same / len(tokens)}
        torch.cuda.empty_cache()


def beside_paged(found: Sequence[Row]) -> list[Row]:
    """Rows with their throughput over that of the paged manager, where it was measured."""
    paged = {row["measure"]: row["tokens_per_s"] for row in found if row["manager"] == "paged"}
    return [
        {**row, **({"vs_paged": row["tokens_per_s"] / paged[row["measure"]]} if row["measure"] in paged else {})}
        for row in found
    ]


def main() -> None:
    """Measure the workloads, and write a file for each with what is there, also after Ctrl-C or a failure."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", type=Path, nargs="*", default=[], help="CSV files of the traces")
    arguments.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = arguments.parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    served, traces = model(options.device), sorted(path.stem for path in options.trace) or "generated"
    for name in options.only:
        found = rows(served, name, (QUICK if options.quick else WORKLOADS)[name], options.trace)
        record(f"serving_{name}", options, found, finish=beside_paged, traces=traces)


if __name__ == "__main__":
    main()
