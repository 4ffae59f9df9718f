"""Make `results/summary.json`, plots, `RESULTS.md` and README's table of figures from the results.

    python -m bench.report [--check]

`--check` changes nothing and fails when a file would change. What is reported is in `reporting/`. Where a result misses
a goal, write why into its file, before the rows: `"reasons": {"mapper.cold_2gib_ms": "One line."}`. The next
measurement writes the file anew, without it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .reporting import FIGURES, HEADLINES, PLOTS
from .reporting.figure import summarise
from .reporting.pages import results_page, with_figures
from .reporting.plots import draw, stale_plots

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """All results by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))}


def texts(results: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Every text file this script makes."""
    summary = summarise(FIGURES, results)
    readme = BENCH.parent / "README.md"
    return {
        RESULTS / "summary.json": json.dumps(summary, indent=1) + "\n",
        BENCH / "RESULTS.md": results_page(FIGURES, PLOTS, results, summary),
        readme: with_figures(readme.read_text(), [f for f in FIGURES if f.name in HEADLINES], summary),
    }


def main() -> int:
    """Write the files, or compare them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="fail when a file would change")
    check = options.parse_args().check
    results = read_results(RESULTS)
    stale = {path: text for path, text in texts(results).items() if not path.exists() or path.read_text() != text}
    plots = stale_plots(PLOTS, results, RESULTS)
    for path in [*stale, *(RESULTS / plot.file for plot, _ in plots)]:
        print(f"{'stale' if check else 'wrote'} {path.relative_to(BENCH.parent)}")
    if check:
        return 1 if stale or plots else 0
    for path, text in stale.items():
        path.write_text(text)
    for plot, rows in plots:
        draw(plot, rows, RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
