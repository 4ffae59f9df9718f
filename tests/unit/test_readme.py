"""README: its example runs, its table is what the command prints, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from slicedkv.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


def test_example_runs(capsys):
    (example,) = fences("python")
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    # 1000 tokens need 32 pages of 2 MiB for K and 32 for V; a little more may be mapped ahead by then.
    assert 64 <= int(capsys.readouterr().out) / (2 << 20) <= 72


def test_table_is_what_plan_prints(capsys):
    (table,) = fences("text")
    assert main(["plan", "llama-3-8b"]) == 0
    assert table == capsys.readouterr().out


def test_commands_and_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", TEXT):
        assert f"\n{target}: " in makefile
    for name in re.findall(r"\b[\w/]+\.py\b", TEXT):
        assert (ROOT / name).exists() or (ROOT / "slicedkv" / name).exists(), name
    for name in re.findall(r"^(?:  )?(\w+/) ", TEXT, flags=re.MULTILINE):
        assert (ROOT / name).is_dir() or (ROOT / "slicedkv" / name).is_dir(), name
