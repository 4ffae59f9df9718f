"""README, docs and the pages of the public interface: links lead somewhere, words that are cited are explained."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import slicedkv
from slicedkv import CacheStats, PagePool, SlicedKVCache
from slicedkv.memory.backing import Backing
from slicedkv.paging import victims
from slicedkv.state.cache_state import CacheState

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {file: file.read_text(encoding="utf-8") for file in FILES}
INTERFACE = ("", ".attention", ".engine", ".integrations", ".integrations.transformers", ".triton_kernels", ".vmm")
CASE = re.compile(r"\b[A-E]\d{1,2}\b")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The headings of a file, as links name them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_links_lead_somewhere(file):
    targets = re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", without_blocks(TEXTS[file]))
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (file.parent / path).resolve() if path else file
        assert found.exists(), target
        assert not anchor or anchor in anchors(TEXTS[found]), target


def test_readme_leads_to_every_page():
    for page in (*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        assert f"({page.relative_to(ROOT)}" in TEXTS[ROOT / "README.md"], page.name


def test_named_files_exist():
    for text in TEXTS.values():
        for name in re.findall(r"\b[\w/]+\.py\b", text):
            assert (ROOT / name).exists() or (ROOT / "slicedkv" / name).exists(), name


def test_readme_names_every_folder():
    """And no other; a folder has one line, but for the two of what is read."""
    listed = re.findall(r"^((?:\w+/ )+) ", TEXTS[ROOT / "README.md"], flags=re.MULTILINE)
    names = [name.rstrip("/") for line in listed for name in line.split()]
    assert len(names) == len(set(names))
    package = {path.parent.relative_to(ROOT / "slicedkv").parts[0] for path in (ROOT / "slicedkv").glob("*/*.py")}
    assert set(names) == package | {"bench", "docs", "examples", "tests", "triton_kernels"}


def test_the_first_version_of_the_changelog_is_this_one():
    versions = re.findall(r"^## (\S+)", TEXTS[ROOT / "CHANGELOG.md"], flags=re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == slicedkv.__version__


def test_every_case_and_invariant_that_tests_cite_is_explained():
    text = TEXTS[DOCS / "invariants.md"]
    cases = set(re.findall(r"^- \*\*([A-E]\d+)\*\* ", text, flags=re.MULTILINE))
    invariants = re.findall(r"^(\d+)\. ", text, flags=re.MULTILINE)
    assert invariants == [str(number) for number in range(1, len(invariants) + 1)]
    cited: set[str] = set()
    for file in (ROOT / "tests").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        cited |= {word for line in source.splitlines() if '"' in line or "ases" in line for word in CASE.findall(line)}
        assert set(re.findall(r"\binvariant (\d+)", source)) <= set(invariants), file
    assert cited - cases == set()
    assert {"A1", "B11", "C4", "D5", "E7"} <= cited


def test_page_counts_are_those_of_the_code():
    _, _, text = TEXTS[DOCS / "glossary.md"].partition("## Page counts")
    of_stats = re.findall(r"^\| `stats\(\)\.(\w+)`", text, flags=re.MULTILINE)
    sizes = {field.name for field in fields(CacheStats) if field.name.endswith("_bytes")}
    assert set(of_stats) == sizes - {"page_bytes", "memory_limit_bytes", "swapped_bytes", "host_bytes"}
    methods = re.findall(r"^\| `cache\.(\w+)\(", text, flags=re.MULTILINE)
    assert methods
    assert all(callable(getattr(SlicedKVCache, name)) for name in methods)
    homes = {"PagePool": PagePool, "Backing": Backing, "CacheState": CacheState, "paging.victims": victims}
    inside = re.findall(r"^\| [\w ]+ \| `([\w.]+)\.(\w+)", text, flags=re.MULTILINE)
    assert len(inside) >= 13
    assert all(hasattr(homes[home], name) for home, name in inside)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the public interface, made without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "error", DOCS / "interface.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def described(page: Path) -> set[str]:
    """Names on a page that have a docstring there."""
    sections = re.split(r'(?=<(?:section|div) id="[A-Za-z])', page.read_text(encoding="utf-8"))[1:]
    return {part.split('"')[1] for part in sections if 'class="docstring"' in part}


@pytest.mark.thorough  # it makes the pages, as `make docs` does
def test_every_public_name_is_described(pages):
    # A driver's fence is opaque and described where the contract is.
    elsewhere = described(pages / "slicedkv" / "vmm" / "base.html") & {"Fence"}
    for name in INTERFACE:
        module = import_module(f"slicedkv{name}")
        assert module.__doc__
        found = described(pages / f"slicedkv{name.replace('.', '/')}.html") | elsewhere
        assert set(getattr(module, "__all__", ())) <= found, module.__name__
    assert (pages / "index.html").is_file()


def public_methods(kind: type) -> set[str]:
    """Methods and properties that a class has from this project."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("slicedkv.")]
    members = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    kinds = (FunctionType, property, cached_property, classmethod, staticmethod)
    return {name for name, value in members.items() if not name.startswith("_") and isinstance(value, kinds)}


def test_every_method_is_described(pages):
    classes = [value for name in slicedkv.__all__ if isinstance(value := getattr(slicedkv, name), type)]
    found = described(pages / "slicedkv.html")
    text = (pages / "slicedkv.html").read_text(encoding="utf-8")
    assert {"step", "close", "k", "closed", "layout"} <= public_methods(SlicedKVCache)
    for kind in classes:
        for name in public_methods(kind):
            assert f'id="{kind.__name__}.{name}"' in text, f"{kind.__name__}.{name}"
    assert {f"SlicedKVCache.{name}" for name in public_methods(SlicedKVCache)} <= found
    assert "tokens <code>[0, len + guard_tokens)</code>" in re.sub(r"\s+", " ", text)
