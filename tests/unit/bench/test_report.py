"""What `bench/report.py` makes of the committed results is what is committed: README's figures are never stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import RESULTS, read_results
from bench.reporting import FIGURES, PLOTS
from bench.reporting.figure import Figure, missed, most, reached, reason, summarise
from bench.reporting.footprint import INTERLEAVED, SLICED, SMALL, SOURCE
from bench.reporting.pages import results_page, with_figures
from bench.reporting.plots import draw, drawable, stale_plots

ROOT = Path(__file__).resolve().parents[3]
COMMON = {"machine": {"name": "m"}, "versions": {"python": "3"}, "date": "2026-01-01", "commit": "c", "command": "run"}


def test_report_and_readme_are_made_from_the_committed_results() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.report", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_summary_has_the_promised_fields() -> None:
    summary = json.loads((ROOT / "bench" / "results" / "summary.json").read_text())
    assert summary
    for name, entry in summary.items():
        assert set(entry) == {"value", "unit", "goal", "kind", "source", "date"}, name
        assert (ROOT / "bench" / "results" / entry["source"]).exists(), name


def test_figure_without_its_rows_is_left_out() -> None:
    figure = Figure("a.b", "a.json", "ms", "<= 5", "what", most("ms", measure="x"))
    assert summarise([figure], {}) == {}
    assert summarise([figure], {"a.json": {**COMMON, "rows": []}}) == {}
    rows = [{"measure": "x", "ms": 4.0}, {"measure": "x", "ms": 6.0}]
    summary = summarise([figure], {"a.json": {**COMMON, "rows": rows}})
    assert summary["a.b"]["value"] == 6.0


def test_a_goal_not_reached_is_told_with_the_reason_of_its_result() -> None:
    figure = Figure("a.b", "a.json", "ms", "<= 5", "what", most("ms", measure="x"))

    def page(ms: float, **more: Any) -> str:
        results = {"a.json": {**COMMON, **more, "rows": [{"measure": "x", "ms": ms}]}}
        return results_page([figure], [], results, summarise([figure], results))

    found = page(6.0, reasons={"a.b": "because"})
    assert "- what: 6 ms, goal <= 5. because" in found
    assert "<= 5 (not reached)" in found
    assert "- what: 7 ms, goal <= 5. Nobody has said why yet." in page(7.0), "it was measured anew"
    assert "because" not in page(4.0, reasons={"a.b": "because"})


def test_every_missed_goal_has_a_reason_and_no_other_has() -> None:
    results = read_results(RESULTS)
    said = {(name, file) for file, result in results.items() for name in result.get("reasons", {})}
    assert said == {(figure.name, figure.source) for figure in missed(FIGURES, summarise(FIGURES, results))}
    assert all(reason(figure, results).strip() for figure in FIGURES if (figure.name, figure.source) in said)


def test_the_page_of_results_is_short() -> None:
    assert len((ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_goals() -> None:
    assert reached(1.0, "<= 1.0")
    assert not reached(1.001, "<= 1.0")
    assert reached(60, ">= 60")
    assert not reached(59.9, ">= 60")
    assert reached(7, "")


def test_names_are_used_once() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    files = [plot.file for plot in PLOTS]
    assert len(set(files)) == len(files)


def test_readme_keeps_what_is_outside_its_marks() -> None:
    readme = "before\n<!-- figures: made by bench/report.py -->\nold\n<!-- end of figures -->\nafter\n"
    made = with_figures(readme, [], {})
    assert made.startswith("before\n")
    assert made.endswith("<!-- end of figures -->\nafter\n")
    assert "old" not in made


def footprint_result(interleaved: float = 0.9) -> dict[str, dict]:
    """A result of the memory benchmark for one model and trace."""
    about = {"trace": "t", "model": "llama-3-8b TP1"}
    series = {"step": [0, 1], "used_mib": [1, 2], "held_mib": [2, 3]}
    rows = [
        {"measure": "waste_mib", **about, SLICED: 1.5, INTERLEAVED: interleaved, SMALL: 2.0},
        {"measure": "largest_batch", **about, SLICED: 11, INTERLEAVED: 12, SMALL: 10},
        {"measure": "serve", **about, "layout": SLICED, "requests_at_once": 2, "series": series},
    ]
    return {SOURCE: {**COMMON, "rows": rows}}


def test_footprint_figures() -> None:
    values = {name: entry["value"] for name, entry in summarise(FIGURES, footprint_result()).items()}
    assert values == {
        "footprint.sliced_vs_small_page_max": 0.75,
        "footprint.interleaved_vs_small_page_max": 0.45,
        "footprint.batch_vs_small_page_min": 1.1,
    }


def test_plots_are_stale_when_what_they_show_has_changed(tmp_path) -> None:
    results = footprint_result()
    assert [plot for plot, _ in stale_plots(PLOTS, results, tmp_path)] == [
        plot for plot in PLOTS if plot.source == SOURCE
    ]
    for plot, rows in drawable(PLOTS, results):
        draw(plot, rows, tmp_path)
        assert (tmp_path / plot.file).read_bytes().startswith(b"\x89PNG")
    assert stale_plots(PLOTS, results, tmp_path) == []
    (changed,) = stale_plots(PLOTS, footprint_result(interleaved=0.8), tmp_path)
    assert changed[0].file == "footprint-waste.png"
    assert stale_plots(PLOTS, {SOURCE: {**COMMON, "rows": []}}, tmp_path) == []
    page = results_page(FIGURES, PLOTS, results, summarise(FIGURES, results))
    assert "![waste by layout](results/footprint-waste.png)" in page
    assert "series" not in page
