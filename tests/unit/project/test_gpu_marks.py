"""Tests that need a GPU: where they are, which of them nothing else may use it beside, and how all are run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[2]
FILES = sorted((TESTS / "gpu").glob("test_*.py"))
ALONE = ("free_bytes", "mem_get_info", "_sleep", "perf_counter")
"""Who compares the device's free memory, or counts on work being queued still, must be alone."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", TESTS / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_alone(nodes: list[ast.expr]) -> bool:
    return any("gpu_alone" in ast.unparse(node) for node in nodes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_needs_the_gpu_for_itself_is_marked(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    assert "pytest.mark.gpu" in ast.unparse(marks[0])
    if is_alone(marks):
        return
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not is_alone(node.decorator_list)]
    assert not [node.name for node in functions if any(word in ast.unparse(node) for word in ALONE)]


def test_every_gpu_test_is_in_a_folder_that_is_run() -> None:
    folders = {
        str(path.parent.relative_to(TESTS.parent))
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__) and "mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert folders <= {*load("run_all").FOLDERS}


def test_both_runs_together_are_all_tests() -> None:
    runs = load("run_all").commands(["--durations=3"], 8, side_by_side=True)
    assert [command[command.index("-m", 4) + 1] for command in runs.values()] == [
        "gpu and not gpu_alone",
        "gpu and gpu_alone",
    ]
    assert all(command[-1] == "--durations=3" for command in runs.values())
    (alone,) = load("run_all").commands([], 8, side_by_side=False).values()
    assert alone[-2:] == ["-m", "gpu"]


def test_one_worker_runs_what_belongs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group_of = load("conftest").group_of
    test = "tests/gpu/test_triton_kernels_gpu.py::test_layouts[{}-{}]"
    assert (
        group_of(test.format("sliced", 1))
        == group_of(test.format("per_layer", 1))
        != group_of(test.format("sliced", 2))
    )
    engine = "tests/gpu/test_engine_gpu.py::"
    assert group_of(f"{engine}test_one[flashinfer]") == group_of(f"{engine}test_two")
    assert group_of("a.py::b[sliced-flashinfer]") != group_of("a.py::b[per_layer-flashinfer]")
