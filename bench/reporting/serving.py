"""Figures and plots of serving whole workloads: throughput by manager of K and V, and what single steps take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reporting.figure import Figure, Row, rows_with
from reporting.plots import Plot

SOURCE = "serving-h200.json"
MAPPERS = (("_sync", "#d9534f", "mapped inside the step"), ("", "#337ab7", "mapped beside it"))


def beside_paged(workload: str) -> Callable[[list[Row]], float]:
    """Throughput over slices, over that of the paged manager."""
    return lambda rows: max(row["vs_paged"] for row in rows_with(rows, measure=workload, manager="sliced"))


FIGURES = (
    Figure(
        "serving.long_vs_paged",
        SOURCE,
        "x",
        ">= 1.15",
        "tokens per second served on requests of arxiv_long_offline, Llama-3-8B, over those with a paged cache",
        beside_paged("long"),
    ),
    Figure(
        "serving.chat_vs_paged",
        SOURCE,
        "x",
        ">= 0.98",
        "the same on requests of azure_2023_conv",
        beside_paged("chat"),
    ),
)


def _throughput(figure: Any, rows: list[Row]) -> None:
    workloads = list(dict.fromkeys(row["measure"] for row in rows))
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        found = rows_with(rows, measure=workload)
        bars = axes.bar([row["manager"] for row in found], [row["tokens_per_s"] for row in found], color="#5b9bd5")
        axes.bar_label(bars, fmt="%.4g")
        first = found[0]
        axes.set_title(f"{workload}: {first['requests']} requests, {first['memory_gb']:g} GB for K and V")
        axes.set_ylabel("tokens per second")


def _batches(figure: Any, rows: list[Row]) -> None:
    workloads = list(dict.fromkeys(row["measure"] for row in rows))
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        for row in rows_with(rows, measure=workload):
            batch = row["series"]["batch"]
            axes.plot([row["steps"] * i / len(batch) for i in range(len(batch))], batch, label=row["manager"])
        axes.set_title(workload)
        axes.set_xlabel("step")
        axes.set_ylabel("requests at once")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


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


def _with_paged(rows: list[Row]) -> list[Row]:
    """Workloads that all managers served."""
    return [row for row in rows if "vs_paged" in row]


PLOTS = (
    Plot("serving-throughput.png", SOURCE, "throughput by manager of K and V", _with_paged, _throughput),
    Plot("serving-batch.png", SOURCE, "requests at once over time", _with_paged, _batches),
    Plot(
        "serving-steps.png", SOURCE, "time of decode steps, sync and background",
        lambda rows: rows_with(rows, measure="steps"), _steps,
    ),
)  # fmt: skip
