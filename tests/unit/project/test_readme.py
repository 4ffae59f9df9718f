"""README and docs: every block of code runs, what commands print is what is shown, and what is named exists."""

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
README, DOCS = ROOT / "README.md", ROOT / "docs"
FILES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def fences(kind: str, file: Path = README) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text_of(file), flags=re.DOTALL | re.MULTILINE)


def prose(file: Path) -> str:
    """A file without its blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(file), flags=re.DOTALL | re.MULTILINE)


def inline(file: Path) -> list[str]:
    """What stands between single backticks, on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(file))]


BLOCKS = [(file.name, number, block) for file in FILES for number, block in enumerate(fences("python", file))]


def test_readme_is_short():
    assert len(text_of(README).splitlines()) <= 180


def test_example_runs(capsys):
    (example,) = fences("python")
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    # 1000 tokens need 32 pages of 2 MiB for K and 32 for V; a little more may be mapped ahead by then.
    assert 64 <= int(capsys.readouterr().out) / (2 << 20) <= 72


@pytest.mark.parametrize(("file", "number", "block"), BLOCKS, ids=[f"{file}-{number}" for file, number, _ in BLOCKS])
def test_every_block_runs_as_it_stands(file, number, block):
    exec(compile(block, f"{file}, block {number}", "exec"), {})


def test_attention_example_attends():
    (example,) = (text for text in fences("python", DOCS / "writing-an-engine.md") if "open_backend" in text)
    names: dict[str, Any] = {}
    exec(compile(example, "writing-an-engine.md", "exec"), names)
    assert names["out"].shape == (513, 32, 128)
    assert names["out"].isfinite().all()


def test_every_kind_of_block_is_known():
    """What is of another kind would be run by no test."""
    for file in FILES:
        opened = re.findall(r"^\s*```(.*)$", text_of(file), flags=re.MULTILINE)
        assert set(opened) <= {"", "python", "sh", "text"}, file
        assert len(opened) % 2 == 0, file


def check_make(words: list[str], line: str) -> None:
    """The target is there, and what `make bench` is told to measure and how."""
    target, *variables = words
    assert f"\n{target}: " in MAKEFILE, line
    given = dict(word.split("=", 1) for word in variables)
    assert all(f"$({name})" in MAKEFILE for name in given), line
    measurement = given.get("NAME")
    if measurement and measurement.isidentifier():
        assert (ROOT / "bench" / f"{measurement}.py").is_file(), line
        source = "".join(map(text_of, (ROOT / "bench").rglob("*.py")))
        options = [word for word in given.get("ARGS", "").split() if word.startswith("--")]
        assert all(f'"{option}"' in source for option in options), line


def check_command(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The subcommand is there, and so are its options."""
    subcommand = [word for word in words if not word.startswith("-")][:1]
    with pytest.raises(SystemExit) as caught:
        main([*subcommand, "--help"])
    assert caught.value.code == 0, line
    shown = capsys.readouterr().out
    assert all(word in shown for word in words if word.startswith("--")), line


def test_shell_blocks_can_be_typed(capsys):
    lines = [line for file in FILES for block in fences("sh", file) for line in block.splitlines()]
    assert lines
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program in {"make", "slicedkv"}, line
        if program == "make":
            check_make(words, line)
        else:
            check_command(words, line, capsys)


def test_commands_in_the_text_can_be_typed(capsys):
    codes = [code for file in FILES for code in inline(file)]
    makes = [code for code in codes if code.startswith("make ")]
    commands = [code.removeprefix(".venv/bin/") for code in codes if re.match(r"(\.venv/bin/)?slicedkv ", code)]
    assert makes
    assert commands
    for line in makes:
        check_make(shlex.split(line)[1:], line)
    for line in commands:
        check_command(shlex.split(line)[1:], line, capsys)


def test_arguments_of_the_demo_are_its_own(monkeypatch):
    parsed = []
    monkeypatch.setattr(slicedkv.cli.demo, "run", lambda options: parsed.append(options) or 0)
    commands = re.findall(r'make demo ARGS="([^"]+)"', text_of(README))
    assert commands
    for words in commands:
        assert main(["demo", *shlex.split(words)]) == 0
    assert parsed[0].memory_limit == "48MiB"


def test_what_commands_print_is_what_is_shown(capsys):
    shown = [block for file in FILES for block in fences("text", file)]
    assert shown
    for block in shown:
        command, _, output = block.partition("\n")
        assert command.startswith("$ slicedkv ")
        assert main(shlex.split(command)[2:]) == 0
        assert output == capsys.readouterr().out


def test_example_of_sharing_runs(capsys):
    (example,) = (text for text in fences("python", DOCS / "sharing.md") if "share_prefix" in text)
    exec(compile(example, "sharing.md", "exec"), {})
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
    text = text_of(DOCS / "sharing.md")
    rows = re.findall(r"^\| (\S+) " + r"\| ([\d.]+ / [\d.]+|-) " * 4 + r"\|$", text, flags=re.MULTILINE)
    assert [model for model, *_ in rows] == list(MODELS)
    for model, *shown in rows:
        for gpus, cell in zip((1, 2, 4, 8), shown, strict=True):
            fits = MODELS[model][1] % gpus == 0
            sizes = [page_tokens(kind, model, gpus) for kind in ("sliced", "interleaved")] if fits else []
            assert cell == (" / ".join(f"{size:.1f}" for size in sizes) or "-"), (model, gpus)
    per_layer = [page_tokens("per_layer", model, 1) for model in MODELS]
    assert f"{min(per_layer):,.0f} to {max(per_layer):,.0f} tokens" in " ".join(text.split())
