"""What the engines of `serving`, `peers` and `engine_step` serve: model, requests, and what manages K and V.

The weights are random: they cost as much time as trained ones.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from slicedkv.engine import Engine, EngineStep, SamplingParams
from slicedkv.integrations.transformers import attention_scale, cache_for_model
from slicedkv.layout import align_up, ceil_div

from ..support.common import percentiles
from ..support.traces import FITS, Request, generate, read_trace

Row = dict[str, Any]
MANAGERS = ("sliced", "interleaved", "per_layer", "paged", "paged_fa3", "static")
PAGED = {"paged": ("flashinfer", 16), "paged_fa3": ("fa3", 128)}
"""Of a paged manager: whose kernel computes prompts, and tokens a page."""
SYNC = "_sync"
"""Behind a manager's name: its mapper maps inside the step."""
CHUNK = 8192
WARM_PROMPT = 500
DOCUMENT_TOKENS, QUESTION, ANSWER = 32_768, (32, 128), (32, 96)
"""Of requests about documents: tokens of a document, and the least and most of a question and of an answer."""
PREFIX_SHARE = 0.9
"""Of the memory, what finished requests may leave there."""
POINTS = 250


class Workload(NamedTuple):
    """Requests of one trace, and the memory they share.

    Attributes
    ----------
    trace : str
        Name of the trace.
    requests : int
        How many of its first requests are served.
    scale : float
        What their lengths are multiplied by.
    slots : int
        Requests at a time.
    memory_bytes : int
        For K and V.
    managers : tuple of str
        What manages K and V, one after the other.
    documents : int
        With documents, each request asks a question about one of so many, and prefixes are shared.
    """

    trace: str
    requests: int
    scale: float
    slots: int
    memory_bytes: int
    managers: tuple[str, ...] = MANAGERS
    documents: int = 0


def model(device: str, layers: int = 32) -> transformers.PreTrainedModel:
    """Llama-3-8B with random weights, or its first layers."""
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
        rope_theta=500_000.0, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        found = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return found


def lengths(workload: Workload, paths: Sequence[Path]) -> list[Request]:
    """The workload's requests, scaled: the first of its trace, or some drawn from its fit if `paths` lack it."""
    if workload.documents:
        source = random.Random(0)
        document = round(DOCUMENT_TOKENS * workload.scale)
        return [
            Request(document + source.randint(*QUESTION), source.randint(*ANSWER)) for _ in range(workload.requests)
        ]
    files = {path.stem: path for path in paths}
    if workload.trace in files:
        chosen = read_trace(files[workload.trace]).requests[: workload.requests]
    else:
        chosen = generate(workload.trace, FITS[workload.trace], workload.requests).requests
    return [Request(*(max(1, round(length * workload.scale)) for length in request)) for request in chosen]


def longest(requests: Sequence[Request]) -> int:
    """The `max_seq_len` that these requests need."""
    return align_up(max(request.tokens for request in requests), 64)


def prompts(
    served: transformers.PreTrainedModel, requests: Sequence[Request], workload: Workload | None = None
) -> list[list[int]]:
    """Random prompts of the requests' lengths, the same ones each time; with documents, one of these and a question."""
    source, vocabulary = torch.Generator().manual_seed(1), served.config.vocab_size

    def draw(tokens: int) -> list[int]:
        return [int(token) for token in torch.randint(3, vocabulary, (tokens,), generator=source).tolist()]

    if workload is None or not workload.documents:
        return [draw(request.prompt_tokens) for request in requests]
    document = round(DOCUMENT_TOKENS * workload.scale)
    documents = [draw(document) for _ in range(workload.documents)]
    order = random.Random(1)
    return [order.choice(documents) + draw(request.prompt_tokens - document) for request in requests]


def token_bytes(served: transformers.PreTrainedModel) -> int:
    """Bytes of K and V of one token over all layers."""
    config = served.config
    return int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * served.dtype.itemsize)


def open_engine(
    served: transformers.PreTrainedModel, manager: str, workload: Workload, max_seq_len: int, **options: Any
) -> Engine:
    """Open an engine whose K and V this manager manages."""
    common = {"max_tokens_per_step": CHUNK, **options}
    slots = workload.slots
    if manager in PAGED:
        return _open_paged(served, manager, workload, max_seq_len, common)
    mapper = "sync" if manager.endswith(SYNC) else "background"
    kind = "sliced" if manager == "static" else manager.removesuffix(SYNC)
    if manager == "static":
        slots = max(1, min(slots, workload.memory_bytes // (max_seq_len * token_bytes(served))))
    cache = cache_for_model(served, slots, max_seq_len, memory_limit=workload.memory_bytes, layout=kind, mapper=mapper)
    shared = {"prefix_cache": PREFIX_SHARE} if workload.documents else {}
    return Engine(served, cache=cache, **shared, **common)


def _open_paged(
    served: transformers.PreTrainedModel, manager: str, workload: Workload, max_seq_len: int, options: dict[str, Any]
) -> Engine:
    from .paged import PagedBackend, PagedCache, paged_layout  # needs FlashInfer; the other managers do not
    from .paged_prefix import PagedPrefixes

    config, (kernel, page_tokens) = served.config, PAGED[manager]
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, served.dtype.itemsize)
    layout = paged_layout(*shape, workload.slots, max_seq_len, page_tokens)
    cache: Any = PagedCache(layout, served.dtype, served.device, workload.memory_bytes, page_tokens)
    heads, scale = config.num_attention_heads, attention_scale(served)
    backend: Any = PagedBackend(cache, num_qo_heads=heads, scale=scale, prompts=kernel)
    engine = Engine(served, cache=cache, backend=backend, **options)
    if workload.documents:
        engine.scheduler.admission = PagedPrefixes(cache)
    return engine


def submit(engine: Engine, ids: Sequence[list[int]], requests: Sequence[Request]) -> None:
    """Queue every prompt; the engine decodes as many tokens behind it as its request does."""
    for prompt, request in zip(ids, requests, strict=True):
        engine.submit(prompt, SamplingParams(max_tokens=request.decode_tokens, ignore_eos=True))


def warm_up(engine: Engine) -> None:
    """Compile kernels and capture the graphs of every batch size.

    First one long prompt, then one prompt for each slot. These are more than one step computes, so prompts and tokens
    meet in a step. They end one after the other, so every batch size occurs.
    """
    slots, max_seq_len = engine.cache.layout.max_batch_size, engine.cache.layout.max_seq_len
    engine.generate([[5] * min(2 * CHUNK, max_seq_len - 2)], SamplingParams(max_tokens=2, ignore_eos=True))
    for index in range(slots):
        prompt = [5] * max(1, min(WARM_PROMPT, max_seq_len - slots - 2))
        engine.submit(prompt, SamplingParams(max_tokens=2 + index, ignore_eos=True))
    engine.run()


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
        with_prompts = [step for step in self.steps if step.num_tokens != len(step.seq_lens)]
        prompts_s = sum(step.seconds for step in with_prompts)
        steps = [step.seconds * 1e3 for step in decoding]
        host = [_host_ms(step) for step in decoding]
        (first_p50, first_p99), (gap_p50, gap_p99) = percentiles(firsts, 0.5, 0.99), percentiles(gaps, 0.5, 0.99)
        (step_p50, step_p999) = percentiles(steps, 0.5, 0.999)
        return {
            "seconds": self.seconds, "tokens_per_s": sum(map(len, self.times.values())) / self.seconds,
            "ttft_s_p50": first_p50, "ttft_s_p99": first_p99,
            "tpot_ms_p50": gap_p50 * 1e3, "tpot_ms_p99": gap_p99 * 1e3,
            "decode_step_ms_p50": step_p50, "decode_step_ms_p999": step_p999, "decode_step_ms_max": max(steps),
            "decode_step_host_ms_p50": statistics.median(host), "decode_steps": len(decoding),
            "prompt_steps": len(with_prompts), "prompt_steps_s": prompts_s,
            "prompt_step_host_ms_p50": statistics.median(_host_ms(step) for step in with_prompts),
            "batch_mean": statistics.fmean(running), "batch_max": max(running), "steps": len(self.steps),
            "series": {"batch": thinned(running), "decode_step_ms": thinned(steps)},
        }  # fmt: skip


def _host_ms(step: EngineStep) -> float:
    return (step.seconds - step.wait_seconds) * 1e3


def thinned(values: Sequence[float]) -> list[float]:
    """Few enough values for a plot: the largest of each stretch."""
    stretch = ceil_div(len(values), POINTS)
    return [round(max(values[i : i + stretch]), 3) for i in range(0, len(values), stretch)]
