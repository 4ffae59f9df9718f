"""`slicedkv demo`: SmolLM2 serves requests of different lengths with continuous batching, K and V in a `SlicedKVCache`.

It ties the device, the model, the requests and the report together. It needs no network: a package has the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from ...attention import open_backend
from ...cache import SlicedKVCache
from ...checks import check_int
from ...errors import ConfigError
from ...layout import KVLayout, LayoutKind
from ..devices import choose_device
from ..plan import MODELS
from ..text import format_bytes, parse_bytes, parse_limit
from .display import open_display
from .plot import check_plot, draw
from .prompts import draw_jobs
from .report import MemoryLog, cache_lines, memory_lines
from .serve import serve

if TYPE_CHECKING:
    from ...engine import Engine, Request

__all__ = ["add_arguments", "load_model", "run"]

_MODEL = "SmolLM2-135M-Instruct"
_MAX_SEQ_LEN, _NUM_QO_HEADS = 2048, 9
_LONGEST_TOKENS, _TYPICAL_TOKENS = 704, 256  # of the requests in `prompts`
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FAST_DTYPE = {"cpu": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument("--requests", type=int, default=12, help="how many (default: %(default)s)")
    parser.add_argument("--max-batch-size", type=int, default=4, help="slots (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and lengths; decoding is greedy")
    parser.add_argument("--device", default="auto", help="host, cuda, cuda:<index> or auto (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights, K and V (default: float32 on a CPU, bfloat16)")
    parser.add_argument("--layout", default="sliced", choices=get_args(LayoutKind), help="(default: %(default)s)")
    parser.add_argument("--page-bytes", help="such as 64KiB (default: 2MiB)")
    parser.add_argument("--memory-limit", help="such as 64MiB, bytes, or 0.5 of the free memory (default: a tight one)")
    parser.add_argument("--backend", default="auto", help="attention backend (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("demo-memory.png"), help="PNG (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Serve the requests, print their text as it comes, then the tables, and write the plot.

    Raises
    ------
    ConfigError, BackendUnavailableError
        A value is out of range; the device or a package is missing. The demo raises this before it loads the model.
        Only a memory limit that no request fits into shows later.
    """
    for name in ("requests", "max_batch_size", "max_tokens"):
        check_int(name, getattr(options, name), 1)
    check_plot(options.plot)
    device = choose_device(options.device).torch_device
    dtype, engine_options = _dtype(options.dtype, device), _engine_options(options)
    _try_out(dtype, device, **engine_options)
    with open_display() as display:
        display.line(f"loading {_MODEL}, {dtype} on {device}")
        model, tokenizer = load_model(dtype, device)
        from ...engine import Engine  # after the model: loading it sets up what transformers reads on import

        with Engine(model, tokenizer=tokenizer, max_seq_len=_MAX_SEQ_LEN, **engine_options) as engine:
            if options.memory_limit is None:
                engine.cache.set_memory_limit(_tight_limit(engine.cache.layout))
            log = MemoryLog(engine.cache.layout)
            engine.on_step = log.record
            display.line(_opening(engine, options.requests))
            requests, seconds = serve(engine, draw_jobs(options.requests, options.max_tokens, options.seed), display)
            stats = engine.cache.stats()
    summary = _summary(requests, seconds)
    print(f"\n{summary}\n\n{memory_lines(log)}\n\n{cache_lines(stats, log)}")
    draw(log, options.plot, f"{_MODEL}, {summary}")
    print(f"\nwrote {options.plot}")
    return 0


def load_model(dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Load model and tokenizer."""
    from .model import load_smollm2

    return load_smollm2(dtype, device)


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in ("max_batch_size", "backend", "layout")}
    if options.page_bytes is not None:
        found["page_bytes"] = parse_bytes("--page-bytes", options.page_bytes)
    if options.memory_limit is not None:
        found["memory_limit"] = parse_limit("--memory-limit", options.memory_limit)
    return found


def _try_out(dtype: torch.dtype, device: str, backend: str, **options: Any) -> None:
    """Open what the demo opens, with nothing mapped, so that it is refused before the model is loaded."""
    layers, kv_heads, head_dim = MODELS["smollm2-135m"]
    shape = {"num_layers": layers, "num_kv_heads": kv_heads, "head_dim": head_dim, "max_seq_len": _MAX_SEQ_LEN}
    with SlicedKVCache(**shape, dtype=dtype, device=device, **options) as cache:  # type: ignore[arg-type]
        open_backend(backend, cache, num_qo_heads=_NUM_QO_HEADS)


def _tight_limit(layout: KVLayout) -> int:
    """Memory for the longest request and, in the other slots, typical ones: so little that idle pages go back."""
    return layout.bytes_for(_LONGEST_TOKENS) + (layout.max_batch_size - 1) * layout.bytes_for(_TYPICAL_TOKENS)


def _dtype(name: str, device: str) -> torch.dtype:
    """The dtype of that name; "auto" is the one that the device computes fast."""
    if name == "auto":
        name = _FAST_DTYPE.get(device, "bfloat16")
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _opening(engine: Engine, num_requests: int) -> str:
    layout = engine.cache.layout
    return (
        f"{num_requests} requests, {layout.max_batch_size} at a time, K and V {layout.kind} in pages of "
        f"{format_bytes(layout.page_bytes)}, {layout.tokens_per_page} tokens a page, at most "
        f"{format_bytes(engine.cache.stats().memory_limit_bytes)}, attention by {engine.backend.name}"
    )


def _summary(requests: list[Request], seconds: float) -> str:
    prompts = sum(len(request.prompt_ids) for request in requests)
    answers = sum(len(request.output_ids) for request in requests)
    preemptions = sum(request.num_preemptions for request in requests)
    return (
        f"{len(requests)} requests in {seconds:.1f} s: {prompts:,} prompt tokens, {answers:,} generated "
        f"({answers / seconds:.0f} a second), {preemptions} preempted"
    )
