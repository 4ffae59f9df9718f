"""What `bench/report.py` makes of the committed results is what is committed: README's figures are never stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_report_and_readme_are_made_from_the_committed_results() -> None:
    done = subprocess.run([sys.executable, "bench/report.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_summary_has_the_promised_fields() -> None:
    summary = json.loads((ROOT / "bench" / "results" / "summary.json").read_text())
    assert summary
    for name, entry in summary.items():
        assert set(entry) == {"value", "unit", "goal", "kind", "source", "date"}, name
        assert (ROOT / "bench" / "results" / entry["source"]).exists(), name
