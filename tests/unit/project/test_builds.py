"""Source archive, wheel and editable install, each built from the one before, and what is in them.

No network: the build backend runs here, without an environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("slicedkv", "triton_kernels", "tests", "bench", "docs", "examples")
MADE_HERE = shutil.ignore_patterns(
    ".*_cache", ".git", ".venv", ".editable", "__pycache__", "*.so", "build", "site", "*.egg-info"
)


class Built(NamedTuple):
    """An archive of the source, unpacked; the names in a wheel that was built from it, and the wheel."""

    source: Path
    wheel: Path
    names: set[str]


def build(folder: Path, kind: str) -> Path:
    """Build in a folder by the backend that pyproject.toml names."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1767225600"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=MADE_HERE)
    with tarfile.open(build(folder / "checkout", "sdist")) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"slicedkv-{PROJECT['project']['version']}"
    wheel = build(source, "wheel")
    return Built(source, wheel, set(zipfile.ZipFile(wheel).namelist()))


def test_the_source_archive_has_all_sources(built: Built) -> None:
    wanted = {path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    made = {path for path in wanted if path.suffix in {".so", ".pyc"}}
    assert {str(path) for path in wanted - made if not (built.source / path).is_file()} == set()
    files = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml")
    for name in (*files, "setup.py", ".ci/run"):
        assert (built.source / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_one_wheel_serves_all_versions_of_python(built: Built) -> None:
    assert built.wheel.name.startswith(f"slicedkv-{PROJECT['project']['version']}-cp311-abi3-linux_")


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "slicedkv").rglob("*.py")} | {"slicedkv/py.typed"}
    package |= {f"slicedkv/{path.relative_to(ROOT)}" for path in (ROOT / "triton_kernels").rglob("*.py")}
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    extension = {"slicedkv/vmm/_native.abi3.so"} if shutil.which(compiler) else set()
    assert {name for name in built.names if ".dist-info/" not in name} == package | extension


def test_the_license_is_in_the_wheel(built: Built) -> None:
    (name,) = (name for name in built.names if name.endswith(".dist-info/licenses/LICENSE"))
    assert zipfile.ZipFile(built.wheel).read(name) == (ROOT / "LICENSE").read_bytes()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_what_an_index_shows(built: Built) -> None:
    (name,) = (name for name in built.names if name.endswith(".dist-info/METADATA"))
    head, _, text = zipfile.ZipFile(built.wheel).read(name).decode().partition("\n\n")
    assert "License-Expression: Apache-2.0\n" in head
    assert "Author: slicedkv contributors\n" in head
    assert "Project-URL: Paper, https://arxiv.org/abs/2405.04437\n" in head
    assert "Description-Content-Type: text/markdown\n" in head
    assert "(https://arxiv.org/abs/2405.04437)" in text
    assert "reached, are in bench/RESULTS.md;" in text
    targets = {part.partition(")")[0] for part in text.split("](")[1:]}
    assert not {target for target in targets if not target.startswith("https://")}, (
        "a link into the source leads nowhere"
    )


USER = """
from slicedkv import LostSlotsError, SlicedKVCache
from slicedkv.triton_kernels import DecodeTile

def serve(cache: SlicedKVCache, tile: DecodeTile) -> None:
    reveal_type(cache.alloc_reqid())
    reveal_type(tile.stages)
    reveal_type(LostSlotsError("", ()).slots)
    cache.alloc_reqid("many")
"""


@pytest.fixture(scope="module")
def editable(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with an editable install of the unpacked archive, which lost the links."""
    shutil.rmtree(built.source / "dist")
    wheel = build(built.source, "editable")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    return folder / "bin" / "python"


def test_a_type_checker_finds_the_editable_install(editable: Path, tmp_path: Path) -> None:
    """Outside the checkout, without the packages that slicedkv itself needs."""
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(editable), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert told[:3] == [
        'note: Revealed type is "int"',
        'note: Revealed type is "int"',
        'note: Revealed type is "tuple[int, ...]"',
    ]
    assert told[3].startswith('error: Argument 1 to "alloc_reqid" of "SlicedKVCache" has incompatible type "str"')


def test_an_editable_install_hides_no_other_package(editable: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys, slicedkv; "
        "print(slicedkv.__file__, [importlib.util.find_spec(name) for name in ('triton_kernels', 'tests', 'bench')])"
    )
    done = subprocess.run([editable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(".editable/slicedkv/__init__.py [None, None, None]\n")
