"""Figures and plots about memory: what layouts hold beyond tokens, and how many requests fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .figure import Figure, Row, rows_with
from .plots import Plot

SOURCE = "footprint-host.json"
SLICED, INTERLEAVED = "sliced, 2 MiB pages (measured)", "interleaved, 2 MiB pages (measured)"
SMALL = "per layer, 64 KiB pages (measured)"
_SHOWN = ("llama-3-8b TP1", "yi-34b TP2", "llama-3-70b TP8")


def ratio(over_all: Callable[[Iterable[float]], float], measure: str, columns: tuple[str, ...]) -> Any:
    """Pick the largest or smallest ratio of `columns` to the column of the small pages, over all shapes and traces."""
    return lambda rows: over_all(row[name] / row[SMALL] for row in rows_with(rows, measure=measure) for name in columns)


FIGURES = (
    Figure(
        "footprint.sliced_vs_small_page_max",
        SOURCE,
        "x",
        "<= 1.0",
        "waste of a request, sliced, over that with 64 KiB pages per layer, worst shape and trace",
        ratio(max, "waste_mib", (SLICED,)),
    ),
    Figure(
        "footprint.interleaved_vs_small_page_max",
        SOURCE,
        "x",
        "<= 0.5",
        "waste of a request, interleaved, over that with 64 KiB pages per layer, worst shape and trace",
        ratio(max, "waste_mib", (INTERLEAVED,)),
    ),
    Figure(
        "footprint.batch_vs_small_page_min",
        SOURCE,
        "x",
        ">= 1.0",
        "requests that fit in 40 GB, sliced or interleaved, over those with 64 KiB pages per layer, worst shape "
        "and trace",
        ratio(min, "largest_batch", (SLICED, INTERLEAVED)),
    ),
)


def _over_time(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    steps = rows[0]["series"]["step"]
    axes.fill_between(steps, rows[0]["series"]["used_mib"], color="#8fbcdb", label="used: K and V of active requests")
    for row in rows:
        style = "--" if "modelled" in row["layout"] else "-"
        axes.plot(row["series"]["step"], row["series"]["held_mib"], style, linewidth=1.4, label=row["layout"])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("decode step")
    axes.set_ylabel("MiB, logarithmic")
    first = rows[0]
    axes.set_title(f"{first['model']}, {first['trace']}, {first['requests_at_once']} requests at a time, no lookahead")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)


def _by_layout(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    names = [name for name in rows[0] if name.endswith(("(measured)", "(modelled)")) and ":" not in name]
    height = 0.8 / len(rows)
    for index, row in enumerate(rows):
        places = [place + index * height for place in range(len(names))]
        bars = axes.barh(places, [row[name] for name in names], height, label=row["model"])
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel("MiB a request, logarithmic")
    axes.set_title(f"waste of a request of {rows[0]['trace']}, averaged over its decode steps")
    axes.legend(fontsize="small")


def _shown(rows: list[Row]) -> list[Row]:
    """Waste of some models for the first trace."""
    waste = rows_with(rows, measure="waste_mib")
    return [row for row in waste if row["trace"] == waste[0]["trace"] and row["model"] in _SHOWN]


PLOTS = (
    Plot(
        "footprint-over-time.png", SOURCE, "memory over time", lambda rows: rows_with(rows, measure="serve"), _over_time
    ),
    Plot("footprint-waste.png", SOURCE, "waste by layout", _shown, _by_layout),
)
