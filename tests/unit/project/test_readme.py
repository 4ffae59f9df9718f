"""README and docs: every block of code runs, README's tables are what commands print, and what it names exists."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import slicedkv.cli.demo
from slicedkv.cli import main
from slicedkv.cli.plan import MODELS
from slicedkv.layout import KVLayout, LayoutKind

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fences(kind: str, file: Path = FILES[0]) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


BLOCKS = [(file.name, number, block) for file in FILES for number, block in enumerate(fences("python", file))]


def test_example_runs(capsys):
    example, *_ = fences("python")
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    # 1000 tokens need 32 pages of 2 MiB for K and 32 for V; a little more may be mapped ahead by then.
    assert 64 <= int(capsys.readouterr().out) / (2 << 20) <= 72


@pytest.mark.parametrize(("file", "number", "block"), BLOCKS, ids=[f"{file}-{number}" for file, number, _ in BLOCKS])
def test_every_block_runs_as_it_stands(file, number, block):
    exec(compile(block, f"{file}, block {number}", "exec"), {})


def test_attention_example_attends():
    (example,) = (text for text in fences("python") if "open_backend" in text)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (513, 32, 128)
    assert names["out"].isfinite().all()


def test_every_kind_of_block_is_known():
    """What is of another kind would be run by no test."""
    for file in FILES:
        opened = re.findall(r"^```(.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(opened) <= {"", "python", "sh", "text"}, file


def test_shell_blocks_can_be_typed(capsys):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in (line for file in FILES for block in fences("sh", file) for line in block.splitlines()):
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert f"\n{words[0]}: " in makefile, line
        else:
            assert program == "slicedkv", line
            with pytest.raises(SystemExit) as caught:
                main([*words, "--help"])
            assert caught.value.code == 0, line


def test_arguments_of_the_demo_are_its_own(monkeypatch):
    parsed = []
    monkeypatch.setattr(slicedkv.cli.demo, "run", lambda options: parsed.append(options) or 0)
    commands = re.findall(r'make demo ARGS="([^"]+)"', TEXT)
    assert commands
    for words in commands:
        assert main(["demo", *shlex.split(words)]) == 0
    assert parsed[0].memory_limit == "48MiB"


def test_example_of_sharing_runs(capsys):
    (example,) = (text for text in fences("python") if "share_prefix" in text)
    exec(compile(example, "README.md", "exec"), {})
    # Of 1000 tokens 31 pages of 32 tokens are whole, of 900 there are 28; four beams and one sharer, K and V.
    assert int(capsys.readouterr().out) == (4 * 31 + 28) * 2 * (2 << 20)


def page_tokens(kind: LayoutKind, model: str, gpus: int) -> float:
    """Tokens in a page of 2 MiB; the first length that fills one agrees."""
    layers, heads, dim = MODELS[model]
    layout = KVLayout(kind, layers, heads // gpus, dim, 2, 1, 8192, 2 << 20)
    tokens = layout.page_bytes / layout.row_bytes
    assert next(n for n in range(1, 8192) if layout.whole_pages(n)) == math.ceil(tokens)
    assert layout.tokens_per_page == math.floor(tokens)
    return tokens


def test_table_of_sharing_is_computed():
    rows = re.findall(r"^\| (\S+) " + r"\| ([\d.]+ / [\d.]+|-) " * 4 + r"\|$", TEXT, flags=re.MULTILINE)
    assert [model for model, *_ in rows] == list(MODELS)
    for model, *shown in rows:
        for gpus, cell in zip((1, 2, 4, 8), shown, strict=True):
            fits = MODELS[model][1] % gpus == 0
            sizes = [page_tokens(kind, model, gpus) for kind in ("sliced", "interleaved")] if fits else []
            assert cell == (" / ".join(f"{size:.1f}" for size in sizes) or "-"), (model, gpus)
    per_layer = [page_tokens("per_layer", model, 1) for model in MODELS]
    assert f"{min(per_layer):,.0f} to {max(per_layer):,.0f} tokens" in TEXT


def test_table_is_what_plan_prints(capsys):
    (table,) = fences("text")
    assert main(["plan", "llama-3-8b"]) == 0
    assert table == capsys.readouterr().out


def test_commands_and_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([\w-]+)", TEXT):
        assert f"\n{target}: " in makefile
    for name in re.findall(r"\b[\w/]+\.py\b", TEXT):
        assert (ROOT / name).exists() or (ROOT / "slicedkv" / name).exists(), name
    for name in re.findall(r"^(?:  )?(\w+/) ", TEXT, flags=re.MULTILINE):
        assert (ROOT / name).is_dir() or (ROOT / "slicedkv" / name).is_dir(), name
