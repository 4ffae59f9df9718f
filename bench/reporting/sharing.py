"""Figures about sharing a prefix: what a hit costs, what memory it saves, and how much sooner a first token comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figure import Figure, Row, rows_with

SOURCE = "sharing-h200.json"
LONG = 32_768


def near_32k(value: Callable[[Row], float], **wanted: Any) -> Callable[[list[Row]], float]:
    """Pick from the row of a measurement whose prefix is nearest to 32,768 tokens."""
    return lambda rows: value(min(rows_with(rows, **wanted), key=lambda row: abs(row["tokens"] - LONG)))


FIGURES = (
    Figure(
        "sharing.hit_us_32k",
        SOURCE,
        "us",
        "",
        "`share_prefix` of 32,768 tokens of Llama-3-8B with a new request, until it returns",
        near_32k(lambda row: row["us_p50"], measure="hit", extent_pages=16),
    ),
    Figure(
        "sharing.lookup_us_32k",
        SOURCE,
        "us",
        "",
        "finding a prefix of 32,768 tokens in the engine's index of 64 requests",
        near_32k(lambda row: row["us_p50"], measure="lookup"),
    ),
    Figure(
        "sharing.memory_share_64x32k",
        SOURCE,
        "of the memory without sharing",
        "",
        "memory of 64 requests with one prefix of 32,768 tokens",
        near_32k(
            lambda row: row["created_bytes"] / row["unshared_bytes"], measure="memory", extent_pages=16, requests=64
        ),
    ),
    Figure(
        "sharing.first_token_32k",
        SOURCE,
        "x",
        "",
        "time to the first token behind 32,768 unknown tokens over that behind shared ones, 8 layers of Llama-3-8B",
        near_32k(lambda row: row["miss_over_hit"], measure="first_token"),
    ),
)
