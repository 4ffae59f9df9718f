"""Plots of results as PNG files. Each carries a digest of its rows and its code, which tells when it is stale."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .figure import Row

__all__ = ["Plot", "draw", "stale_plots"]


class Plot(NamedTuple):
    """One PNG file beside the results.

    Attributes
    ----------
    file, source : str
        Its name, and the name of the result whose rows it shows.
    caption : str
    pick : callable
        Takes from the rows those to show; no plot is drawn without any.
    draw : callable
        Draws those rows on a matplotlib figure.
    """

    file: str
    source: str
    caption: str
    pick: Callable[[list[Row]], list[Row]]
    draw: Callable[[Any, list[Row]], None]


def digest(plot: Plot, rows: list[Row]) -> str:
    """A text that differs when the rows shown or the code that draws them differ."""
    text = json.dumps(rows) + inspect.getsource(plot.draw)
    return f"slicedkv {hashlib.sha256(text.encode()).hexdigest()}"


def drawable(plots: Iterable[Plot], results: dict[str, Row]) -> list[tuple[Plot, list[Row]]]:
    """The plots whose rows exist, with these rows."""
    picked = [(plot, plot.pick(results[plot.source]["rows"])) for plot in plots if plot.source in results]
    return [(plot, rows) for plot, rows in picked if rows]


def stale_plots(plots: Iterable[Plot], results: dict[str, Row], folder: Path) -> list[tuple[Plot, list[Row]]]:
    """The plots that are missing, show other rows, or were drawn by other code."""

    def is_stale(plot: Plot, rows: list[Row]) -> bool:
        path = folder / plot.file
        return not path.exists() or digest(plot, rows).encode() not in path.read_bytes()

    return [found for found in drawable(plots, results) if is_stale(*found)]


def draw(plot: Plot, rows: list[Row], folder: Path) -> None:
    """Write the PNG file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise SystemExit("plots need matplotlib; pip install 'slicedkv[demo]'") from error
    figure = Figure(figsize=(11, 6), layout="constrained")
    plot.draw(figure, rows)
    figure.savefig(folder / plot.file, dpi=100, metadata={"Software": None, "Comment": digest(plot, rows)})
