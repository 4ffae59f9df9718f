"""Figures and plots of whole workloads: throughput by what manages K and V, and what single steps take."""

from __future__ import annotations

from typing import Any

from .figure import Figure, Row, most, rows_with
from .plots import Plot

LONG, CHAT, PREFIX, STEPS = (f"serving_{name}-h200.json" for name in ("long", "chat", "prefix", "steps"))

FIGURES = (
    Figure(
        "serving.long_vs_paged",
        LONG,
        "x",
        ">= 1.15",
        "tokens served per second over those with a paged cache, requests of arxiv_long_offline, Llama-3-8B",
        most("vs_paged", manager="sliced"),
    ),
    Figure(
        "serving.long_vs_fa3_paged",
        LONG,
        "x",
        ">= 1.0",
        "the same over those with a paged cache of 128 tokens a page and FlashAttention 3",
        most("vs_paged_fa3", manager="sliced"),
    ),
    Figure(
        "serving.chat_vs_paged",
        CHAT,
        "x",
        ">= 1.05",
        "tokens served per second over those with a paged cache, requests of azure_2023_conv, Llama-3-8B",
        most("vs_paged", manager="sliced"),
    ),
    Figure(
        "serving.chat_stall_ms",
        CHAT,
        "ms",
        "<= 10",
        "waiting for the driver while these requests were served",
        most("stall_ms", manager="sliced"),
    ),
    Figure(
        "serving.prefix_vs_paged",
        PREFIX,
        "x",
        ">= 1.0",
        "tokens served per second over those with a paged cache and its prefix cache, 64 questions about 8 documents "
        "of 32,768 tokens, Llama-3-8B",
        most("vs_paged", manager="sliced"),
    ),
)


def _served(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    bars = left.bar([row["manager"] for row in rows], [row["tokens_per_s"] for row in rows], color="#5b9bd5")
    left.bar_label(bars, fmt="%.4g")
    left.set_title(f"{rows[0]['requests']} requests, {rows[0]['memory_gb']:g} GB for K and V")
    left.set_ylabel("tokens per second")
    for row in rows:
        batch = row["series"]["batch"]
        right.plot([row["steps"] * i / len(batch) for i in range(len(batch))], batch, label=row["manager"])
    right.set_xlabel("step")
    right.set_ylabel("requests at once")
    right.grid(alpha=0.3)
    right.legend(fontsize="small")


def _steps(figure: Any, rows: list[Row]) -> None:
    layouts = list(dict.fromkeys(row["manager"].removesuffix("_sync") for row in rows))
    for axes, layout in zip(figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0], layouts, strict=True):
        for suffix, colour, label in (
            ("_sync", "#d9534f", "mapped inside the step"),
            ("", "#337ab7", "mapped beside it"),
        ):
            for row in rows_with(rows, manager=layout + suffix):
                axes.plot(row["series"]["decode_step_ms"], linewidth=0.9, color=colour, label=label)
        axes.set_title(f"{layout}: {rows[0]['requests']} requests")
        axes.set_xlabel("decode steps, the longest of each few")
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        axes.legend()


PLOTS = (
    *(
        Plot(f"serving-{name}.png", source, "throughput and batch by manager of K and V", lambda rows: rows, _served)
        for name, source in (("long", LONG), ("chat", CHAT), ("prefix", PREFIX))
    ),
    Plot("serving-steps.png", STEPS, "time of decode steps, sync and background", lambda rows: rows, _steps),
)
