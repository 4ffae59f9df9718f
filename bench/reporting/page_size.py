"""A plot of what slicing costs the kernels as the cache grows."""

from __future__ import annotations

from typing import Any

from .figure import Row, rows_with
from .plots import Plot

SOURCE = "page_size-h200.json"
PIECES = {1: "pages of 2 MiB", 16: "extents of 32 MiB"}


def _cost(figure: Any, rows: list[Row]) -> None:
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    for axes, measure in zip(figure.subplots(1, len(measures), sharey=True, squeeze=False)[0], measures, strict=True):
        for extent_pages, label in PIECES.items():
            found = rows_with(rows, measure=measure, extent_pages=extent_pages)
            axes.plot([row["cache_gb"] for row in found], [row["vs_per_layer"] for row in found], "o-", label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("GB of K and V in the cache")
        axes.set_ylabel("speed over slices / over contiguous layers")
        axes.set_title(measure)
        axes.grid(alpha=0.3)
        axes.legend()


PLOTS = (Plot("page-size.png", SOURCE, "what slicing costs as the cache grows", lambda rows: rows, _cost),)
