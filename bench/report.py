"""Make `results/summary.json`, `RESULTS.md` and README's table of figures from the results that are there.

    python bench/report.py [--check]

Nothing is measured here. `--check` changes nothing and fails when a file would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

BENCH = Path(__file__).parent
MARKS = ("<!-- figures: made by bench/report.py -->", "<!-- end of figures -->")
Row = dict[str, Any]


class Figure(NamedTuple):
    """One headline figure: where it comes from and what it should reach."""

    name: str
    source: str
    unit: str
    goal: str
    meaning: str
    pick: Callable[[list[Row]], float]
    why_not: str = ""


def rows_with(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows in which every named value is as given."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def most(key: str, **wanted: Any) -> Callable[[list[Row]], float]:
    """The largest `key` among the rows with these values."""
    return lambda rows: max(row[key] for row in rows_with(rows, **wanted))


DRIVER_PAUSES = (
    "In steady decode a few batches of driver calls, creating and mapping alike, take 10 to 50 ms instead of 1, and so "
    "do some of the inline ones of the sync mapper; a process that only watched the clock on this machine for 12 s saw "
    "no pause over 1 ms (map_ops). Hiding them takes pages mapped ten steps ahead, more than the 15 % of a page that "
    "lookahead may cost."
)
BACKGROUND = {"measure": "stalls", "mapper": "background"}
FIGURES = (
    Figure(
        "mapper.stalls_idle_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "decode steps that waited for the driver, main thread idle between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="idle"),
        DRIVER_PAUSES,
    ),
    Figure(
        "mapper.stalls_busy_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "the same, main thread busy in pure Python between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="busy"),
        DRIVER_PAUSES,
    ),
    Figure(
        "mapper.lookahead_pages_max",
        "mapper-h200.json",
        "pages per request and plane",
        "<= 0.15",
        "pages mapped ahead, on average, in the worst of all steady-decode runs",
        most("lookahead_pages_per_request", **BACKGROUND),
    ),
    Figure(
        "mapper.pages_per_s_busy_main",
        "mapper-h200.json",
        "pages/s",
        ">= 2500",
        "2 MiB pages mapped beside a main thread that holds the GIL",
        most("pages_per_s", measure="throughput", main_thread="busy", extent_pages=1),
    ),
    Figure(
        "mapper.map_gb_s_alone",
        "mapper-h200.json",
        "GB/s",
        ">= 60",
        "2 MiB pages mapped by the mapper's thread alone, handles ready",
        most("gb_per_s", measure="throughput", main_thread="idle", extent_pages=1),
        "On this machine one mapping of 2 MiB took 41 us, nearly all of it in the driver; 35 us would be needed. "
        "Extents of 32 MiB reach 996 GB/s.",
    ),
    Figure(
        "mapper.cold_2gib_ms",
        "mapper-h200.json",
        "ms",
        "<= 5",
        "wait of the first step of a 2 GiB prompt in a cold slot, with extents",
        most("stall_ms", measure="prompt", slot="cold", extent_pages=16, notice_ms=0.0),
    ),
    Figure(
        "mapper.step_us_b256",
        "mapper-h200.json",
        "us",
        "<= 10",
        "`step` with nothing to grow, 256 slots, lengths as a tensor",
        most("step_us_p50", measure="step", slots=256, growing=0, form="tensor"),
    ),
    Figure(
        "mapper.step_us_b4096",
        "mapper-h200.json",
        "us",
        "<= 25",
        "the same with 4,096 slots",
        most("step_us_p50", measure="step", slots=4096, growing=0, form="tensor"),
    ),
)


def reached(value: float, goal: str) -> bool:
    """Compare a value with a goal such as ">= 60"."""
    sign, bound = goal.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def read_results(folder: Path) -> dict[str, Row]:
    """All results by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))}


def summarise(results: dict[str, Row]) -> dict[str, Row]:
    """The flat summary of every figure whose source is there."""
    summary = {}
    for figure in FIGURES:
        if figure.source in results:
            result = results[figure.source]
            summary[figure.name] = {
                "value": round(figure.pick(result["rows"]), 3),
                "unit": figure.unit,
                "goal": figure.goal,
                "kind": "measured",
                "source": figure.source,
                "date": result["date"],
            }
    return summary


def figure_table(summary: dict[str, Row], folder: str) -> str:
    """Figures as a Markdown table, sources linked below `folder`."""
    lines = ["| figure | value | goal | source |", "|---|---|---|---|"]
    for figure in FIGURES:
        if figure.name in summary:
            entry = summary[figure.name]
            verdict = "" if reached(entry["value"], figure.goal) else " (not reached)"
            source = f"[{figure.source}]({folder}results/{figure.source})"
            value = f"{entry['value']:g} {figure.unit}"
            lines.append(f"| {figure.meaning} | {value} | {figure.goal}{verdict} | {source} |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """Rows that share their columns as a Markdown table."""
    columns = [name for name in rows[0] if name != "measure"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results_page(results: dict[str, Row], summary: dict[str, Row]) -> str:
    """RESULTS.md: figures, goals that were not reached and why, then every measured row."""
    parts = ["# Results", "Made by `python bench/report.py` from the files in `results/`. Every row was measured."]
    parts += ["## Figures", figure_table(summary, "")]
    missed = [f for f in FIGURES if f.name in summary and not reached(summary[f.name]["value"], f.goal)]
    if missed:
        parts.append("## Goals not reached")
        parts.append("\n".join(f"- {f.meaning}: {summary[f.name]['value']:g} {f.unit}. {f.why_not}" for f in missed))
    for name, result in results.items():
        parts.append(f"## {name}")
        machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        parts.append(f"{machine}. {versions}. {result['date']}, commit {result['commit']}: `{result['command']}`")
        for measure in dict.fromkeys(row.get("measure", "") for row in result["rows"]):
            parts.append(f"### {measure}" if measure else "### rows")
            parts.append(table(rows_with(result["rows"], measure=measure) if measure else result["rows"]))
    return "\n\n".join(parts) + "\n"


def with_figures(readme: str, summary: dict[str, Row]) -> str:
    """README with the figures between its marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"README.md lacks the marks {MARKS[0]!r} and {MARKS[1]!r}")
    return f"{before}{MARKS[0]}\n{figure_table(summary, 'bench/')}\n{MARKS[1]}{after}"


def outputs() -> dict[Path, str]:
    """Every file this script makes, with its text."""
    results = read_results(BENCH / "results")
    summary = summarise(results)
    readme = BENCH.parent / "README.md"
    return {
        BENCH / "results" / "summary.json": json.dumps(summary, indent=1) + "\n",
        BENCH / "RESULTS.md": results_page(results, summary),
        readme: with_figures(readme.read_text(), summary),
    }


def main() -> int:
    """Write the files, or compare them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="fail when a file would change")
    check = options.parse_args().check
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'stale' if check else 'wrote'} {path.relative_to(BENCH.parent)}")
        if not check:
            path.write_text(outputs()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
