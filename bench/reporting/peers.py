"""Figures and a plot about other projects: transformers' continuous batching, and kvcached's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figure import Figure, Row, most, rows_with
from .plots import Plot

SOURCE = "peers-h200.json"
OURS, KVCACHED = "slicedkv, background", "kvcached"


def ratio(key: str) -> Callable[[list[Row]], float]:
    """`key` of slicedkv over that of transformers, which serves the same requests."""
    ours, theirs = (most(key, measure="serving", engine=name) for name in ("slicedkv", "transformers"))
    return lambda rows: ours(rows) / theirs(rows)


def growing(key: str, allocator: str) -> Callable[[list[Row]], float]:
    """An allocator's `key`."""
    return most(key, measure="growing", allocator=allocator)


FIGURES = (
    Figure(
        "peers.tokens_vs_transformers",
        SOURCE,
        "x",
        "",
        "tokens served per second over those of transformers' continuous batching with the attention that it picks, "
        "Llama-3-8B, the same requests and memory",
        ratio("tokens_per_s"),
    ),
    Figure(
        "peers.memory_vs_transformers",
        SOURCE,
        "x",
        "",
        "most memory held beside the weights over that of transformers' continuous batching",
        ratio("peak_beside_weights_gb"),
    ),
    Figure(
        "peers.decode_us_p99",
        SOURCE,
        "us",
        "",
        "growing 32 requests by a decode step, 99th percentile, mapper in the background",
        growing("decode_us_p99", OURS),
    ),
    Figure(
        "peers.kvcached_decode_us_p99",
        SOURCE,
        "us",
        "",
        "growing 32 requests by a decode step in kvcached, 99th percentile",
        growing("decode_us_p99", KVCACHED),
    ),
    Figure("peers.free_us_p50", SOURCE, "us", "", "freeing a request, median", growing("free_us_p50", OURS)),
    Figure(
        "peers.kvcached_free_us_p50",
        SOURCE,
        "us",
        "",
        "freeing a request in kvcached, median",
        growing("free_us_p50", KVCACHED),
    ),
    Figure(
        "peers.held_per_used",
        SOURCE,
        "x",
        "",
        "physical memory held over bytes of tokens, mean of all steps, memory not short",
        growing("held_per_used", OURS),
    ),
    Figure(
        "peers.kvcached_held_per_used",
        SOURCE,
        "x",
        "",
        "physical memory held over bytes of tokens in kvcached, mean of all steps, memory not short",
        growing("held_per_used", KVCACHED),
    ),
)


def _held(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    first = rows[0]["series"]
    axes.fill_between(first["step"], first["used_mib"], color="#8fbcdb", label="used: K and V of the requests")
    for row in rows:
        axes.plot(row["series"]["step"], row["series"]["held_mib"], linewidth=1.4, label=row["allocator"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("MiB of physical memory")
    axes.set_title(f"{rows[0]['requests']} requests, {rows[0]['slots']} at a time, memory not short")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


PLOTS = (
    Plot("peers-held.png", SOURCE, "memory over time", lambda rows: rows_with(rows, measure="growing"), _held),
)  # fmt: skip
