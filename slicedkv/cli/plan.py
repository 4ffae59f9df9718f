"""`slicedkv plan`: how many requests fit, and what they waste, for a model's shape. Arithmetic; touches no device."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from ..config import CacheConfig
from ..errors import ConfigError
from ..layout import KVLayout
from .footprint import CUDA_PAGE_BYTES, Footprint, footprints
from .model_config import ModelShape, read_shape
from .text import format_bytes, format_table, parse_bytes

__all__ = ["MODELS", "add_arguments", "heads_per_gpu", "run"]

MODELS = {
    "llama-3-8b": ModelShape(32, 8, 128),
    "llama-3-70b": ModelShape(80, 8, 128),
    "yi-6b": ModelShape(32, 4, 128),
    "yi-34b": ModelShape(60, 8, 128),
    "qwen2.5-7b": ModelShape(28, 4, 128),
    "smollm2-135m": ModelShape(30, 3, 64),
}
"""Shapes of some public models."""

_SAMPLES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    known = f"one of {', '.join(MODELS)}; or a model's config.json, or a folder that has one"
    parser.add_argument("model", nargs="?", help=known)
    parser.add_argument("--layers", type=int, help="layers, in place of the model's")
    parser.add_argument("--kv-heads", type=int, help="KV heads of the whole model")
    parser.add_argument("--head-dim", type=int, help="dimension of a head")
    parser.add_argument("--dtype", default="bfloat16", help="of K and V (default: %(default)s)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the heads (default: 1)")
    parser.add_argument("--max-seq-len", type=int, default=32768, help="longest request (default: %(default)s)")
    parser.add_argument(
        "--seq-len", type=int, default=1500, help="length at which requests are counted (default: %(default)s)"
    )
    parser.add_argument("--max-batch-size", type=int, default=256, help="slots (default: %(default)s)")
    parser.add_argument("--memory", default="64GiB", help="for K and V on each GPU (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Print the table.

    Raises
    ------
    ConfigError
        The shape is incomplete, a value is out of range, or a config.json does not say what is needed.
    """
    name, layout = _layout(options)
    memory_bytes = parse_bytes("--memory", options.memory)
    seq_len = options.seq_len
    if not 1 <= seq_len <= layout.max_seq_len:
        raise ConfigError(f"seq_len is {seq_len}; it must be in [1, {layout.max_seq_len}], the longest request")
    print(
        f"{name}: {layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim} "
        f"on each GPU of {options.tensor_parallel}, {options.dtype}: {layout.token_bytes:,} bytes a token in every "
        f"layout\nrequests of {seq_len:,} tokens ({format_bytes(seq_len * layout.token_bytes)}) in "
        f"{format_bytes(memory_bytes)}, {layout.max_batch_size:,} slots of {layout.max_seq_len:,} tokens; "
        "all of it arithmetic, none measured\n"
    )
    header = ("layout", "tokens a page", "waste", "mean waste", "largest batch", "virtual addresses")
    rows = [_row(found, layout, seq_len, memory_bytes) for found in footprints(layout).values()]
    print(format_table(header, rows))
    print(
        f"\nwaste: bytes held by a request of {seq_len:,} tokens beyond its K and V; mean waste: over all lengths up to"
        f" {layout.max_seq_len:,}\nlargest batch: by memory alone, slots aside"
    )
    return 0


def _layout(options: argparse.Namespace) -> tuple[str, KVLayout]:
    """The model's name, and its shape on one GPU, validated as a cache would."""
    name, shape = _shape(options)
    config = CacheConfig(
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=options.dtype,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        device=torch.device("cpu"),
    )
    heads = heads_per_gpu(config.num_kv_heads, options.tensor_parallel)
    return name, replace(config.kv_layout(CUDA_PAGE_BYTES), num_kv_heads=heads)


def _shape(options: argparse.Namespace) -> tuple[str, ModelShape]:
    """The model's name and shape, known or read. Values that the user gave take the place of the model's."""
    given = {name: getattr(options, name) for name in ModelShape._fields if getattr(options, name) is not None}
    missing = [f"--{name.replace('_', '-')}" for name in ModelShape._fields if name not in given]
    if options.model is None:
        if missing:
            names = f"name a model ({', '.join(MODELS)}), a config.json or a folder that has one"
            raise ConfigError(f"the model's shape is incomplete: {names}, or {' '.join(missing)}")
        return "model", ModelShape(**given)
    if options.model in MODELS:
        return options.model, MODELS[options.model]._replace(**given)
    if not Path(options.model).exists():
        raise ConfigError(
            f"there is no model or file {options.model!r}; use one of {', '.join(MODELS)}, a config.json or a folder "
            "that has one"
        )
    name, shape = read_shape(Path(options.model))
    return name, shape._replace(**given)


def heads_per_gpu(heads: int, gpus: int) -> int:
    """KV heads on one of several GPUs. With more GPUs than heads, each head lies on several.

    Raises
    ------
    ConfigError
        Neither number is a multiple of the other.
    """
    if gpus < 1 or (heads % gpus and gpus % heads):
        raise ConfigError(f"tensor_parallel is {gpus}; {heads} KV heads cannot be shared evenly")
    return max(1, heads // gpus)


def _row(found: Footprint, layout: KVLayout, seq_len: int, memory_bytes: int) -> list[str]:
    def waste(length: int) -> int:
        return found.request_bytes(length) - length * layout.token_bytes

    # An odd stride meets every position within a page, whose tokens are often a power of two.
    lengths = range(1, layout.max_seq_len + 1, (layout.max_seq_len // _SAMPLES) | 1)
    return [
        found.name,
        f"{found.tokens_per_page:,}",
        format_bytes(waste(seq_len)),
        format_bytes(sum(map(waste, lengths)) / len(lengths)),
        f"{memory_bytes // found.request_bytes(seq_len):,}",
        format_bytes(found.virtual_bytes) if found.virtual_bytes else "-",
    ]
