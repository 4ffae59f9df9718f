"""The rules for `bench`, read from its source: what its folders may import, and how long its files may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
FILES = sorted(BENCH.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 40
LEFT_OF = {"support": {"support"}, "baselines": {"support", "baselines"}, "reporting": {"reporting"}}
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def relative_imports(path: Path) -> Iterator[str]:
    """What a file imports of `bench`, as paths from there: "support.common"."""
    folders = path.relative_to(BENCH).parent.parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = folders[: len(folders) - node.level + 1]
            yield ".".join([*above, *([node.module] if node.module else [alias.name for alias in node.names])])


def docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, Documented) or not ast.get_docstring(node):
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


@pytest.mark.parametrize("folder", LEFT_OF)
def test_a_folder_imports_only_what_stands_below_it(folder):
    paths = [path for path in FILES if path.parent.name == folder]
    found = {(path.name, name) for path in paths for name in relative_imports(path)}
    assert found
    assert {(file, name) for file, name in found if name.split(".")[0] not in LEFT_OF[folder]} == set()


def test_nothing_touches_the_path_for_imports():
    guilty = [path.name for path in FILES if "sys.path" in path.read_text(encoding="utf-8")]
    assert not guilty


def test_files_and_functions_are_short():
    """Counted without docstrings, whose length is no fault."""
    long = {}
    for path in FILES:
        tree = tree_of(path)
        lines = len(path.read_text(encoding="utf-8").splitlines()) - sum(map(docstring_lines, ast.walk(tree)))
        if lines > MAX_FILE_LINES:
            long[path.name] = lines
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.body[0].lineno + 1 - docstring_lines(node)
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.name}, {node.name}"] = lines
    assert not long
