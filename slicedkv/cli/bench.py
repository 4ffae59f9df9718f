"""`slicedkv bench`: finds the measurements of the source checkout and runs one by name, or all that can run here.

The library never imports `bench`: one script runs as ``__main__``, as if started by hand; all run as processes, one
after the other, so that none disturbs the next. A script that can do nothing without a GPU says ``NEEDS_GPU = True``.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import ConfigError

__all__ = ["FOLDER", "add_arguments", "run"]

FOLDER = Path(__file__).resolve().parents[2] / "bench"
"""The checkout's folder of measurements; missing when slicedkv was installed from a wheel."""

_REPORT = "report"
"""The script that measures nothing and sums up the results of all others."""


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
    scripts = _scripts()
    if options.list:
        width = max(map(len, scripts))
        for name, path in scripts.items():
            print(f"{name:{width}}  {_summary(path)}{' (needs a GPU)' if _needs_gpu(path) else ''}")
        return 0
    if options.name is None:
        return _run_all(scripts, options)
    if options.name not in scripts:
        raise ConfigError(f"there is no measurement {options.name!r}; use one of {', '.join(scripts)}")
    path = scripts[options.name]
    with _arguments([str(path), *_common(options), *options.arguments]):
        runpy.run_path(str(path), run_name="__main__")
    return 0


def _common(options: argparse.Namespace) -> list[str]:
    """The arguments that every measurement has."""
    return [*(["--quick"] if options.quick else []), *([] if options.out is None else ["--out", str(options.out)])]


def _run_all(scripts: dict[str, Path], options: argparse.Namespace) -> int:
    """Run what can run here, one process after the other, then the report; go on after one that fails."""
    idle = [] if torch.cuda.is_available() else [name for name, path in scripts.items() if _needs_gpu(path)]
    names = [name for name in scripts if name not in {*idle, _REPORT}]
    failed = [name for name in names if not _run_child(name, [str(scripts[name]), *_common(options)])]
    if options.out is None and _REPORT in scripts and not _run_child(_REPORT, [str(scripts[_REPORT])]):
        failed.append(_REPORT)
    if idle:
        print(f"not run, for they need a GPU and torch finds none: {', '.join(idle)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run_child(name: str, words: Sequence[str]) -> bool:
    """Run one script; False when it failed. After Ctrl-C it has the time to write what it has measured."""
    print(f"{name}:", flush=True)
    began = time.monotonic()
    with subprocess.Popen([sys.executable, *words]) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()
            raise
    print(
        f"{name}: {'done' if code == 0 else f'exit code {code}'} after {time.monotonic() - began:.0f} s\n", flush=True
    )
    return code == 0


def _scripts() -> dict[str, Path]:
    """Scripts by name: the files of the folder that can be run."""
    paths = sorted(FOLDER.glob("*.py")) if FOLDER.is_dir() else []
    found = {path.stem: path for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    if not found:
        raise ConfigError(
            f"there are no measurements at {FOLDER}: they come with the source, not with the installed package; "
            "clone the repository and install it with pip install -e ."
        )
    return found


def _summary(path: Path) -> str:
    """First line of a script's docstring."""
    text = ast.get_docstring(_tree(path)) or ""
    return text.partition("\n")[0]


def _needs_gpu(path: Path) -> bool:
    """True when the script says ``NEEDS_GPU = True``."""
    return any(isinstance(line, ast.Assign) and ast.unparse(line) == "NEEDS_GPU = True" for line in _tree(path).body)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    former = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = former
