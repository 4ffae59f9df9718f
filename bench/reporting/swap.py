"""Figures about swapping, pausing and resuming."""

from __future__ import annotations

from .figure import Figure, most, rows_with

SOURCE = "swap-h200.json"

FIGURES = (
    Figure(
        "swap.vs_plain_copy",
        SOURCE,
        "x",
        ">= 0.95",
        "rate of swapping 2 GiB of a request out or in against one plain copy of as many bytes between the GPU and "
        "pinned host memory, slowest layout and direction",
        lambda rows: min(row["vs_plain_copy"] for row in rows_with(rows, measure="swap")),
    ),
    Figure(
        "swap.pause_ms_per_gb",
        SOURCE,
        "ms",
        "",
        "pausing a cache whose requests go to host memory, for each GB",
        most("ms_per_gb", measure="pause", offload=True),
    ),
    Figure(
        "swap.resume_ms_per_gb",
        SOURCE,
        "ms",
        "",
        "resuming a cache whose requests come from host memory, for each GB",
        most("ms_per_gb", measure="resume", offload=True),
    ),
)
