"""`slicedkv bench`: finds the measurements of the source checkout and runs one by name.

The library never imports `bench`: a script runs as ``__main__``, as if started by hand.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError

__all__ = ["FOLDER", "add_arguments", "run"]

FOLDER = Path(__file__).resolve().parents[2] / "bench"
"""The checkout's folder of measurements; missing when slicedkv was installed from a wheel."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    parser.add_argument("--list", action="store_true", help="list the measurements and what each is for")
    parser.add_argument("name", nargs="?", help="measurement to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on, such as --quick; try --help")


def run(options: argparse.Namespace) -> int:
    """List the measurements, or run one in this process.

    Raises
    ------
    ConfigError
        There is no checkout here, or no measurement of this name.
    """
    scripts = _scripts()
    if options.list or options.name is None:
        width = max(map(len, scripts))
        for name, path in scripts.items():
            print(f"{name:{width}}  {_summary(path)}")
        return 0
    if options.name not in scripts:
        raise ConfigError(f"there is no measurement {options.name!r}; use one of {', '.join(scripts)}")
    path = scripts[options.name]
    with _arguments([str(path), *options.arguments]):
        runpy.run_path(str(path), run_name="__main__")
    return 0


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
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    former = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = former
