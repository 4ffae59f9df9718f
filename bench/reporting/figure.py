"""`Figure`, one headline figure, and the ways to pick its value from the rows of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

__all__ = ["Figure", "Row", "missed", "most", "reached", "reason", "rows_with", "summarise"]

Row = dict[str, Any]


class Figure(NamedTuple):
    """One headline figure: where its value comes from and what it should reach.

    The result that misses a goal says why, under "reasons". Measured anew it says nothing: no reason outlives what it
    explains.

    Attributes
    ----------
    name : str
        Its key in the summary, such as "mapper.stalls_idle_main".
    source : str
        File of `results/`.
    unit, goal, meaning : str
        The goal is ">= 60", "<= 1.0", or "" for a figure without a goal.
    pick : callable
        Takes the value from the rows of the file; raises `ValueError` when they do not hold it.
    kind : {"measured", "modelled"}
    """

    name: str
    source: str
    unit: str
    goal: str
    meaning: str
    pick: Callable[[list[Row]], float]
    kind: Literal["measured", "modelled"] = "measured"


def rows_with(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows in which every named value is as given."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def most(key: str, **wanted: Any) -> Callable[[list[Row]], float]:
    """The largest `key` among the rows that have it and these values."""
    return lambda rows: max(row[key] for row in rows_with(rows, **wanted) if key in row)


def reached(value: float, goal: str) -> bool:
    """Compare a value with a goal such as ">= 60"."""
    if not goal:
        return True
    sign, bound = goal.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def missed(figures: Iterable[Figure], summary: dict[str, Row]) -> list[Figure]:
    """The figures that were measured and did not reach their goal."""
    return [
        figure
        for figure in figures
        if figure.name in summary and not reached(summary[figure.name]["value"], figure.goal)
    ]


def reason(figure: Figure, results: dict[str, Row]) -> str:
    """Why a goal was missed, as the result says; "" where it does not."""
    return str(results[figure.source].get("reasons", {}).get(figure.name, ""))


def summarise(figures: Iterable[Figure], results: dict[str, Row]) -> dict[str, Row]:
    """The flat summary of every figure whose file exists and holds its rows."""
    summary = {}
    for figure in figures:
        if figure.source not in results:
            continue
        result = results[figure.source]
        try:
            value = figure.pick(result["rows"])
        except ValueError:  # a part of the benchmark was not run
            continue
        summary[figure.name] = {
            "value": round(value, 3),
            "unit": figure.unit,
            "goal": figure.goal,
            "kind": figure.kind,
            "source": figure.source,
            "date": result["date"],
        }
    return summary
