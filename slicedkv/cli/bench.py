"""`slicedkv bench`: finds the measurements of the source checkout and runs one by name, or all that can run here.

The library never imports `bench`. A measurement runs as ``python -m bench.NAME`` would run it. Without a name each runs
in a process of its own, one after the other, so that none disturbs the next. A measurement that needs a GPU says
``NEEDS_GPU = True``.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import ConfigError

__all__ = ["FOLDER", "add_arguments", "run", "run_module"]

FOLDER = Path(__file__).resolve().parents[2] / "bench"
"""The checkout's folder of measurements; missing when slicedkv was installed from a wheel."""

_REPORT = "report"
"""The module that measures nothing and sums up the results of all others."""

_CHILD = "import sys; from slicedkv.cli import bench; bench.run_module(sys.argv[1], sys.argv[2:])"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    parser.add_argument("--list", action="store_true", help="list the measurements and what each is for")
    parser.add_argument("--quick", action="store_true", help="without a name: fewer steps and shapes")
    parser.add_argument("--out", type=Path, help="without a name: folder for the results, without a report on them")
    parser.add_argument("name", nargs="?", help="measurement to run; by default all that this machine can")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on, such as --quick; try --help")


def run(options: argparse.Namespace) -> int:
    """List the measurements, run one in this process, or run all that need nothing this machine lacks.

    Returns
    -------
    int
        0, or 1 when one of all failed.

    Raises
    ------
    ConfigError
        There is no checkout here, or no measurement of this name.
    """
    modules = _modules()
    if options.list:
        width = max(map(len, modules))
        for name, path in modules.items():
            print(f"{name:{width}}  {_summary(path)}{' (needs a GPU)' if _needs_gpu(path) else ''}")
        return 0
    if options.name is None:
        return _run_all(modules, options)
    if options.name not in modules:
        raise ConfigError(f"there is no measurement {options.name!r}; use one of {', '.join(modules)}")
    run_module(modules[options.name], [*_common(options), *options.arguments])
    return 0


def run_module(path: str | Path, words: Sequence[str]) -> None:
    """Run a module of the measurements' package as ``__main__``, with `words` as its arguments.

    The checkout is first on the path while it runs, as with ``python -m`` there: another `bench` may lie further on.
    """
    package = Path(path).parent
    former = sys.argv, sys.path[:]
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(package.parent))
    try:
        runpy.run_module(f"{package.name}.{Path(path).stem}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv, sys.path[:] = former


def _common(options: argparse.Namespace) -> list[str]:
    """The arguments that every measurement has."""
    return [*(["--quick"] if options.quick else []), *([] if options.out is None else ["--out", str(options.out)])]


def _run_all(modules: dict[str, Path], options: argparse.Namespace) -> int:
    """Run what can run here, one process after the other, then the report; go on after one that fails."""
    idle = [] if torch.cuda.is_available() else [name for name, path in modules.items() if _needs_gpu(path)]
    names = [name for name in modules if name not in {*idle, _REPORT}]
    failed = [name for name in names if not _run_child(modules[name], _common(options))]
    if options.out is None and _REPORT in modules and not _run_child(modules[_REPORT], []):
        failed.append(_REPORT)
    if idle:
        print(f"not run, for they need a GPU and torch finds none: {', '.join(idle)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run_child(path: Path, words: Sequence[str]) -> bool:
    """Run one module in a process; False when it failed. After Ctrl-C it has the time to write what it has measured."""
    name = path.stem
    print(f"{name}:", flush=True)
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", _CHILD, str(path), *words]) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()
            raise
    end = "done" if code == 0 else f"exit code {code}"
    print(f"{name}: {end} after {time.monotonic() - began:.0f} s\n", flush=True)
    return code == 0


def _modules() -> dict[str, Path]:
    """Modules by name: the files of the folder that can be run."""
    paths = sorted(FOLDER.glob("*.py")) if FOLDER.is_dir() else []
    found = {path.stem: path for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    if not found:
        raise ConfigError(
            f"there are no measurements at {FOLDER}: they come with the source, not with the installed package; "
            "clone the repository and install it with pip install -e ."
        )
    return found


def _summary(path: Path) -> str:
    """First line of a module's docstring."""
    text = ast.get_docstring(_tree(path)) or ""
    return text.partition("\n")[0]


def _needs_gpu(path: Path) -> bool:
    """True when the module says ``NEEDS_GPU = True``."""
    return any(isinstance(line, ast.Assign) and ast.unparse(line) == "NEEDS_GPU = True" for line in _tree(path).body)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
