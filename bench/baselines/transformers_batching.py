"""Requests through transformers' own continuous batching and through slicedkv's engine, with the same memory for both.

`generate_batch` decodes as many tokens for each request. This module uses the manager that it opens, to which every
request tells its own number. Transformers picks the attention: a flash-attention package where one is installed, else
`scaled_dot_product_attention` over rows gathered from its pages.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

import slicedkv

from ..support.traces import Request
from .workloads import Clock, Row, Workload, longest, open_engine, prompts, submit, token_bytes, warm_up

TOKENS_PER_STEP = 8192
"""Most tokens that one step computes, in both engines."""

LIMIT_S = 120.0
"""A peer that gives no answer for so long has failed."""


def batching_config(
    served: transformers.PreTrainedModel, workload: Workload, tokens_per_step: int
) -> tuple[ContinuousBatchingConfig, int]:
    """Transformers' defaults, but with the workload's memory and requests at a time; and the bytes of its cache."""
    config = ContinuousBatchingConfig(max_batch_tokens=tokens_per_step, max_requests_per_batch=workload.slots)
    group = getattr(config, "page_size", None) or config.block_size  # its name in transformers 5.17
    config.num_blocks = workload.memory_bytes // (group * token_bytes(served))
    return config, config.num_blocks * group * token_bytes(served)


def answers(manager: Any, ids: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Serve prompts with a running manager; return the tokens of each.

    Raises
    ------
    RuntimeError
        A request failed, or the manager's thread ended.
    TimeoutError
        There was no answer for `LIMIT_S` seconds.
    """
    until = time.perf_counter() + LIMIT_S
    names = [manager.add_request(p, max_new_tokens=n, eos_token_id=-1) for p, n in zip(ids, lengths, strict=True)]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        if result is not None:
            until = time.perf_counter() + LIMIT_S
        if result is not None and result.is_finished():
            found[result.request_id] = result.generated_tokens
        elif result is None and not manager.is_running():
            raise RuntimeError("its thread ended before all requests were served")
        if time.perf_counter() > until:
            manager.stop(timeout=5, hard_stop=True)
            raise TimeoutError(f"{len(found)} of {len(names)} requests served after {LIMIT_S:.0f} s")
    return [found[name] for name in names]


@contextmanager
def faster_kernels(trial: Callable[[], object]) -> Iterator[str]:
    """Run `trial` with and without cuDNN's attention, and keep the faster.

    Torch may prefer cuDNN, which makes a plan for every new length.

    Yields
    ------
    str
        "on" or "off".
    """
    former, seconds = torch.backends.cuda.cudnn_sdp_enabled(), {}
    try:
        for allowed in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(allowed)
            begun = time.perf_counter()
            trial()
            seconds[allowed] = time.perf_counter() - begun
        best = min(seconds, key=lambda allowed: seconds[allowed])
        torch.backends.cuda.enable_cudnn_sdp(best)
        yield "on" if best else "off"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(former)


def serve_transformers(
    served: transformers.PreTrainedModel,
    workload: Workload,
    requests: Sequence[Request],
    tokens_per_step: int = TOKENS_PER_STEP,
) -> tuple[Row, list[list[int]]]:
    """Serve requests greedily with transformers' manager; return the row and the tokens."""
    ids, lengths = prompts(served, requests), [request.decode_tokens for request in requests]
    config, cache_bytes = batching_config(served, workload, tokens_per_step)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(lengths))
    weights = _reset_peak(served)
    opened = served.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config, timeout=5
    )
    with opened as manager:
        slots = workload.slots
        answers(manager, [[5, 6, 7]] * slots, range(2, 2 + slots))  # as `warm_up` does it
        with faster_kernels(lambda: answers(manager, ids[::4], [16] * len(ids[::4]))) as kernels:
            begun = time.perf_counter()
            tokens = answers(manager, ids, lengths)
            seconds = time.perf_counter() - begun
        attention = f"{served.config._attn_implementation}, cuDNN {kernels}"
        graphs = manager.continuous_batching_config.use_cuda_graph
    row = _row("transformers", transformers.__version__, attention, graphs, workload, tokens, seconds)
    return {**row, **_memory(served, weights, cache_bytes, outside_bytes=0)}, tokens


def serve_slicedkv(
    served: transformers.PreTrainedModel,
    workload: Workload,
    requests: Sequence[Request],
    tokens_per_step: int = TOKENS_PER_STEP,
) -> tuple[Row, list[list[int]]]:
    """Serve requests greedily with slicedkv's engine, K and V as slices; return the row and the tokens."""
    ids, weights = prompts(served, requests), _reset_peak(served)
    with open_engine(served, "sliced", workload, longest(requests), max_tokens_per_step=tokens_per_step) as engine:
        warm_up(engine)
        submit(engine, ids, requests)
        queued = list(engine.scheduler.waiting)
        clock = Clock()
        clock.run(engine)
        created, graphs = engine.cache.stats().created_bytes, engine.backend.captures
        attention = engine.backend.name
    tokens = [list(request.output_ids) for request in queued]
    row = _row("slicedkv", slicedkv.__version__, attention, graphs, workload, tokens, clock.seconds)
    return {**row, **_memory(served, weights, created, outside_bytes=created)}, tokens


def _row(
    engine: str,
    version: str,
    attention: str,
    graphs: object,
    workload: Workload,
    tokens: list[list[int]],
    seconds: float,
) -> Row:
    count = sum(map(len, tokens))
    return {
        "measure": "serving", "engine": engine, "version": version, "attention": attention.replace("|", " "),
        "cuda_graphs": str(graphs), "requests": len(tokens), "tokens": count,
        "kv_memory_gb": workload.memory_bytes / 1e9, "seconds": seconds, "tokens_per_s": count / seconds,
    }  # fmt: skip


def _reset_peak(served: transformers.PreTrainedModel) -> int:
    """Begin to watch torch's memory; return the bytes allocated now, which are the weights."""
    if served.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _memory(served: transformers.PreTrainedModel, weights: int, cache_bytes: int, *, outside_bytes: int) -> Row:
    """Gigabytes of the weights, of the cache, and the most that the engine held beside the weights.

    The last is the peak of torch's allocator plus `outside_bytes`, which torch does not know of.
    """
    peak = torch.cuda.max_memory_allocated() if served.device.type == "cuda" else weights
    return {
        "weights_gb": weights / 1e9, "kv_held_gb": cache_bytes / 1e9,
        "peak_beside_weights_gb": (peak - weights + outside_bytes) / 1e9,
    }  # fmt: skip
