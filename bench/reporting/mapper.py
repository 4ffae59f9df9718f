"""Figures about the mapper: how well it hides mapping."""

from __future__ import annotations

from .figure import Figure, most

BACKGROUND = {"measure": "stalls", "mapper": "background"}
FIGURES: tuple[Figure, ...] = (
    Figure(
        "mapper.stalls_idle_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "decode steps that waited for the driver, main thread asleep between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="idle"),
    ),
    Figure(
        "mapper.stalls_busy_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "decode steps that waited for the driver, main thread busy in pure Python between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="busy"),
    ),
    Figure(
        "mapper.lookahead_pages_max",
        "mapper-h200.json",
        "pages per request and plane",
        "<= 0.15",
        "pages mapped ahead, mean of a run of steady decode, worst run",
        most("lookahead_pages_per_request", **BACKGROUND),
    ),
    Figure(
        "mapper.pages_per_s_busy_main",
        "mapper-h200.json",
        "pages/s",
        ">= 2500",
        "2 MiB pages that the mapper maps while the main thread holds the GIL",
        most("pages_per_s", measure="throughput", main_thread="busy", extent_pages=1),
    ),
    Figure(
        "mapper.map_gb_s_alone",
        "mapper-h200.json",
        "GB/s",
        ">= 60",
        "2 MiB pages that the mapper maps while the main thread sleeps, handles ready",
        most("gb_per_s", measure="throughput", main_thread="idle", extent_pages=1),
    ),
    Figure(
        "mapper.cold_2gib_ms",
        "mapper-h200.json",
        "ms",
        "<= 5",
        "how long the first step of a 2 GiB prompt waits in a slot with nothing mapped, with extents",
        most("stall_ms", measure="prompt", slot="cold", extent_pages=16, notice_ms=0.0),
    ),
    Figure(
        "mapper.step_us_b256",
        "mapper-h200.json",
        "us",
        "<= 10",
        "`step` when nothing grows, 256 slots, lengths as a tensor",
        most("step_us_p50", measure="step", slots=256, growing=0, form="tensor"),
    ),
    Figure(
        "mapper.step_us_b4096",
        "mapper-h200.json",
        "us",
        "<= 25",
        "`step` when nothing grows, 4,096 slots, lengths as a tensor",
        most("step_us_p50", measure="step", slots=4096, growing=0, form="tensor"),
    ),
)
