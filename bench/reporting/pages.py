"""RESULTS.md and README's table of figures, as text."""

from __future__ import annotations

from collections.abc import Sequence

from .figure import Figure, Row, reached, rows_with
from .plots import Plot, drawable

__all__ = ["results_page", "with_figures"]

MARKS = ("<!-- figures: made by bench/report.py -->", "<!-- end of figures -->")


def figure_table(figures: Sequence[Figure], summary: dict[str, Row], folder: str) -> str:
    """Figures as a Markdown table, sources linked below `folder`."""
    lines = ["| figure | value | goal | source |", "|---|---|---|---|"]
    for figure in figures:
        if figure.name in summary:
            entry = summary[figure.name]
            verdict = "" if reached(entry["value"], figure.goal) else " (not reached)"
            source = f"[{figure.source}]({folder}results/{figure.source})"
            value = f"{entry['value']:g} {figure.unit}"
            lines.append(f"| {figure.meaning} | {value} | {figure.goal}{verdict} | {source} |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """Rows that share their columns as a Markdown table; series are for plots."""
    columns = [name for name in rows[0] if name not in {"measure", "series"}]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results_page(
    figures: Sequence[Figure], plots: Sequence[Plot], results: dict[str, Row], summary: dict[str, Row]
) -> str:
    """RESULTS.md: figures, goals that were not reached and why, then every row and plot."""
    parts = ["# Results", "Made by `python bench/report.py` from the files in `results/`."]
    parts.append("Everything was measured, but for columns and layouts that say modelled: those are arithmetic.")
    parts += ["## Figures", figure_table(figures, summary, "")]
    missed = [f for f in figures if f.name in summary and not reached(summary[f.name]["value"], f.goal)]
    if missed:
        parts.append("## Goals not reached")
        parts.append("\n".join(f"- {f.meaning}: {summary[f.name]['value']:g} {f.unit}. {f.why_not}" for f in missed))
    shown = [plot for plot, _ in drawable(plots, results)]
    for name, result in results.items():
        parts.append(f"## {name}")
        machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        parts.append(f"{machine}. {versions}. {result['date']}, commit {result['commit']}: `{result['command']}`")
        if not result.get("complete", True):
            parts.append("It was interrupted: rows are missing.")
        parts.extend(f"![{plot.caption}](results/{plot.file})" for plot in shown if plot.source == name)
        for measure in dict.fromkeys(row.get("measure", "") for row in result["rows"]):
            parts.append(f"### {measure}" if measure else "### rows")
            parts.append(table(rows_with(result["rows"], measure=measure) if measure else result["rows"]))
    return "\n\n".join(parts) + "\n"


def with_figures(readme: str, figures: Sequence[Figure], summary: dict[str, Row]) -> str:
    """README with the figures between its marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"README.md lacks the marks {MARKS[0]!r} and {MARKS[1]!r}")
    return f"{before}{MARKS[0]}\n{figure_table(figures, summary, 'bench/')}\n{MARKS[1]}{after}"
