"""What every benchmark does with its rows: whatever ends it, what was measured by then is in the file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.support.common import record

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"measure": "one", "us": 1.5, "series": {"x": [1]}}, {"measure": "two", "us": 2.5}]


def options(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(device="cpu", out=folder, commit="c", quick=False)


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    assert path.name == "name-host.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_rows_are_shown_and_written_as_they_come(tmp_path: Path, capsys) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        found = written(tmp_path)
        assert (found["rows"], found["complete"]) == ([ROWS[0] | {"of": 1}], False)
        assert capsys.readouterr().out == "measure=one us=1.5\n"
        yield ROWS[1]

    numbered = lambda found: [row | {"of": len(found)} for row in found]  # noqa: E731
    record("name", options(tmp_path), rows(), finish=numbered, rate=3)
    found = written(tmp_path)
    assert found["rows"] == [row | {"of": 2} for row in ROWS]
    assert found["rate"] == 3
    assert "complete" not in found
    assert found["versions"]["driver called from"] in ("C", "Python")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_measured_outlives_what_ends_the_rest(tmp_path: Path, error: type) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ROWS
        raise error

    with pytest.raises(SystemExit if error is KeyboardInterrupt else error) as caught:
        record("name", options(tmp_path), rows())
    assert getattr(caught.value, "code", 130) == 130
    assert (written(tmp_path)["rows"], written(tmp_path)["complete"]) == (ROWS, False)


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """Some libraries take the handler of Ctrl-C away."""
    script = f"""if True:
        import os, sys
        from pathlib import Path
        from types import SimpleNamespace
        sys.path.append({str(ROOT)!r})
        from bench.support.common import record
        def rows():
            yield {{"measure": "one"}}
            os.kill(os.getpid(), 9)
        record("name", SimpleNamespace(device="cpu", out=Path({str(tmp_path)!r}), commit="c", quick=False), rows())
    """
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert written(tmp_path)["rows"] == [{"measure": "one"}]
