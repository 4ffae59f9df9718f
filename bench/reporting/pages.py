"""RESULTS.md and README's table of figures, as text."""

from __future__ import annotations

from collections.abc import Sequence

from .figure import Figure, Row, missed, reached, reason
from .plots import Plot, drawable

__all__ = ["results_page", "with_figures"]

MARKS = ("<!-- figures: made by bench/report.py -->", "<!-- end of figures -->")
ABOUT = (
    "`python -m bench.report` makes this page from the files in `results/`. Those hold every row that was measured. "
    "Columns and layouts that say modelled are arithmetic; all else was measured."
)
MEASUREMENTS = (
    "Each file tells machine, driver, versions, commit and command. `make bench NAME=mapper` measures one anew, "
    "`slicedkv bench --list` tells what each is for."
)


def figure_table(figures: Sequence[Figure], summary: dict[str, Row], folder: str) -> str:
    """Figures as a Markdown table, with links to their files below `folder`."""
    lines = ["| figure | value | goal | source |", "|---|---|---|---|"]
    for figure in figures:
        if figure.name in summary:
            entry = summary[figure.name]
            verdict = "" if reached(entry["value"], figure.goal) else " (not reached)"
            source = f"[{figure.source}]({folder}results/{figure.source})"
            value = f"{entry['value']:g} {figure.unit}"
            lines.append(f"| {figure.meaning} | {value} | {figure.goal}{verdict} | {source} |")
    return "\n".join(lines)


def missed_list(figures: Sequence[Figure], results: dict[str, Row], summary: dict[str, Row]) -> str:
    """The figures below their goals as a Markdown list, each with its reason."""
    lines = []
    for figure in missed(figures, summary):
        entry = summary[figure.name]
        value, why = f"{entry['value']:g} {figure.unit}", reason(figure, results) or "Nobody has said why yet."
        lines.append(f"- {figure.meaning}: {value}, goal {figure.goal}. {why}")
    return "\n".join(lines)


def result_table(results: dict[str, Row]) -> str:
    """Every result as a row of a Markdown table: the file that has its rows, and where they come from."""
    lines = ["| rows | machine | date | commit |", "|---|---|---|---|"]
    for name, result in results.items():
        machine = ", ".join(result["machine"][key] for key in ("name", "processor") if key in result["machine"])
        interrupted = "" if result.get("complete", True) else ", interrupted: rows are missing"
        lines.append(f"| [{name}](results/{name}){interrupted} | {machine} | {result['date']} | {result['commit']} |")
    return "\n".join(lines)


def results_page(
    figures: Sequence[Figure], plots: Sequence[Plot], results: dict[str, Row], summary: dict[str, Row]
) -> str:
    """RESULTS.md: figures, goals that were not reached and why, the files that have the rows, and the plots."""
    parts = ["# Results", ABOUT, "## Figures", figure_table(figures, summary, "")]
    if below := missed_list(figures, results, summary):
        parts += ["## Goals not reached", below]
    parts += ["## Measurements", MEASUREMENTS, result_table(results)]
    if shown := [plot for plot, _ in drawable(plots, results)]:
        parts += ["## Plots", *(f"![{plot.caption}](results/{plot.file})" for plot in shown)]
    return "\n\n".join(parts) + "\n"


def with_figures(readme: str, figures: Sequence[Figure], summary: dict[str, Row]) -> str:
    """README with a new table of figures between its marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"README.md lacks the marks {MARKS[0]!r} and {MARKS[1]!r}")
    return f"{before}{MARKS[0]}\n{figure_table(figures, summary, 'bench/')}\n{MARKS[1]}{after}"
