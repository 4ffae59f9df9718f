"""Figures and plots about attention and append: what slices cost and gain beside other layouts and kernels."""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from .figure import Figure, Row, most, rows_with
from .plots import Plot

DECODE, PREFILL, APPEND, ENGINE = (f"{name}-h200.json" for name in ("decode", "prefill", "append", "engine_step"))
CHUNK, PROMPT = 8192, 2048


def least(key: str, among: Callable[[Row], bool] = lambda row: True) -> Callable[[list[Row]], float]:
    """The smallest `key` among some of the rows that have it."""
    return lambda rows: min(row[key] for row in rows if key in row and among(row))


def geomean(key: str, among: Callable[[Row], bool] = lambda row: True) -> Callable[[list[Row]], float]:
    """The geometric mean of `key` over some of the rows that have it."""
    return lambda rows: geometric_mean(row[key] for row in rows if key in row and among(row))


def is_prompt(row: Row) -> bool:
    """Prompts and chunks of 2,048 tokens and more."""
    return bool(row["q_len"] >= PROMPT)


def is_chunk(row: Row) -> bool:
    """Prompts and chunks of 8,192 tokens and more."""
    return bool(row["q_len"] >= CHUNK)


FIGURES = (
    Figure(
        "decode.vs_flashinfer_paged_geomean",
        DECODE,
        "x",
        ">= 1.1",
        "decode speed over slices against FlashInfer over a paged cache with shuffled pages of 16 tokens, geometric "
        "mean of all shapes",
        geomean("vs_flashinfer_paged"),
    ),
    Figure(
        "decode.vs_flashinfer_paged_min",
        DECODE,
        "x",
        ">= 1.0",
        "decode speed over slices against FlashInfer over a paged cache with shuffled pages of 16 tokens, worst shape",
        least("vs_flashinfer_paged"),
    ),
    Figure(
        "decode.vs_per_layer_geomean",
        DECODE,
        "x",
        ">= 0.98",
        "decode speed over slices against the same kernel over contiguous layers, geometric mean of all shapes",
        geomean("vs_per_layer"),
    ),
    Figure(
        "decode.vs_per_layer_min",
        DECODE,
        "x",
        ">= 0.95",
        "decode speed over slices against the same kernel over contiguous layers, worst shape",
        least("vs_per_layer"),
    ),
    Figure(
        "decode.copy_rate_share",
        DECODE,
        "of the copy rate",
        ">= 0.92",
        "bytes that decode reads per second, worst shape whose layers hold 512 MiB and more",
        least("copy_rate_share", lambda row: bool(row["large"])),
    ),
    Figure(
        "prefill.vs_flashinfer_paged_min_8k",
        PREFILL,
        "x",
        ">= 1.2",
        'prefill speed over slices, backend "auto", against FlashInfer\'s fa3 kernels over a paged cache, worst case '
        "from 8,192 new tokens on",
        least("auto_vs_flashinfer_paged", is_chunk),
    ),
    Figure(
        "prefill.vs_flashinfer_paged_min",
        PREFILL,
        "x",
        ">= 1.0",
        'prefill speed over slices, backend "auto", against FlashInfer\'s fa3 kernels over a paged cache, worst case '
        "from 2,048 new tokens on",
        least("auto_vs_flashinfer_paged", is_prompt),
    ),
    Figure(
        "prefill.vs_fa3_paged_geomean",
        PREFILL,
        "x",
        ">= 1.0",
        'prefill speed over slices, backend "auto", against FlashAttention 3 over a paged cache with shuffled pages of '
        "128 tokens, geometric mean of all cases",
        geomean("auto_vs_fa3_paged"),
    ),
    Figure(
        "prefill.vs_contiguous_min",
        PREFILL,
        "x",
        ">= 0.97",
        'prefill speed over slices, backend "auto", against the fastest kernel over contiguous layers, worst case '
        "from 2,048 new tokens on",
        least("auto_vs_contiguous", is_prompt),
    ),
    Figure(
        "append.copy_rate_share",
        APPEND,
        "of a copy's rate",
        ">= 0.8",
        "append of 512 rows and more against a plain copy of the same bytes, worst case",
        least("same_size_copy_share", lambda row: row["tokens"] >= 512),
    ),
    Figure(
        "append.rotary_cost",
        APPEND,
        "of append's time",
        "<= 0.1",
        "what rotary embedding of K adds to an append of 2,048 rows and more, worst case",
        lambda rows: max(row["rotary_cost"] for row in rows if row["tokens"] >= 2048),
    ),
    Figure(
        "engine.host_us_b64",
        ENGINE,
        "us",
        "",
        "host time of the engine's decode step with CUDA graphs, 64 requests, 8 layers of Llama-3-8B",
        most("host_us", backend="auto", graphs=True),
    ),
    Figure(
        "engine.attention_share_b64",
        ENGINE,
        "of GPU time",
        "",
        "append and attention in the engine's decode step, 64 requests of some 1,200 tokens, 8 layers of Llama-3-8B",
        most("attention_share", backend="auto", graphs=True),
    ),
)


def _bandwidth(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for name, key in (
        ("slices", "sliced_us"),
        ("contiguous layers", "per_layer_us"),
        ("FlashInfer, paged", "flashinfer_paged_us"),
    ):
        points = sorted((_layer_bytes(row) / 2**20, _layer_bytes(row) / row[key] / 1e3) for row in rows)
        axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.8, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MiB of K and V that one layer reads")
    axes.set_ylabel("GB/s")
    axes.set_title("decode: bytes read per second, bfloat16, heads of 128")
    axes.grid(alpha=0.3)
    axes.legend()


def _layer_bytes(row: Row) -> float:
    return float(row["batch"] * row["length"] * row["heads"] * 128 * 4)


def _prompts(rows: list[Row]) -> list[Row]:
    """One prompt or chunk at a time."""
    return [row for row in rows_with(rows, batch=1) if is_prompt(row) and "auto_vs_fa3_paged" in row]


def _ratios(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    names = [f"{row['q_len']:,} on {row['length']:,}" for row in rows]
    kinds = {
        "against FlashInfer, pages of 16": "auto_vs_flashinfer_paged",
        "against FlashAttention 3, pages of 128": "auto_vs_fa3_paged",
        "against contiguous layers, the fastest kernel": "auto_vs_contiguous",
    }
    for index, (label, key) in enumerate(kinds.items()):
        bars = axes.bar(
            [place + 0.27 * index for place in range(len(rows))], [row[key] for row in rows], 0.27, label=label
        )
        axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([place + 0.27 for place in range(len(rows))], names)
    axes.set_ylabel("times as fast")
    axes.set_title("prefill over slices, one request, new tokens on all its tokens")
    axes.margins(y=0.15)
    axes.legend(loc="upper right")


PLOTS = (
    Plot("decode-bandwidth.png", DECODE, "bytes read per second by decode", lambda rows: rows, _bandwidth),
    Plot("prefill-ratio.png", PREFILL, "prefill over slices against other caches", _prompts, _ratios),
)
