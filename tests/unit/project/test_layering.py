"""The rules of the house, read from the source: who may import whom, how long things may be, docstrings."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "slicedkv"
KERNELS = ROOT / "triton_kernels"
HOUSE = (
    ("errors", "checks", "unique", "layout", "config", "stats"),
    ("vmm", "memory", "state", "views", "paging", "requests", "opening", "closing", "cache"),
    ("attention", "integrations", "engine", "cli", "__main__"),
)
"""Folders and files of the package from left to right: each imports only what stands to its left."""
ROOMS = tuple(room for row in HOUSE for room in row)
TORCH_FREE = ("layout", "checks", "errors", "state.slots", "vmm.base")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 40
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for folder in (PACKAGE, KERNELS) for path in sorted(folder.rglob("*.py"))}
MODULES = {name: path for name, path in FILES.items() if name.startswith("slicedkv")}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def walk_eager(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not typing_only and not isinstance(child, Function):
            yield child
            yield from walk_eager(child)


def imported(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Absolute names of what `nodes` of module `name` import, also through `import_module("...")`."""
    package = name if FILES[name].stem == "__init__" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            found.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    return found


@cache
def all_imports(name: str) -> frozenset[str]:
    return frozenset(imported(name, ast.walk(tree_of(name))))


@cache
def eager_imports(name: str) -> frozenset[str]:
    return frozenset(imported(name, walk_eager(tree_of(name))))


def importers(package: str) -> set[str]:
    return {name for name in FILES if any(f"{found}.".startswith(f"{package}.") for found in all_imports(name))}


def reachable(start: str) -> set[str]:
    """Modules of slicedkv that importing `start` runs; the packages above it, which run anyway, left out."""
    seen, todo = set(), {start}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= {found for found in eager_imports(name) if found in MODULES and found != "slicedkv"} - seen
    return seen


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*Function.__args__, ast.ClassDef)):
            path = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield path, child
            yield from functions(child, f"{path}.")
        else:
            yield from functions(child, prefix)


def test_rules_see_the_source():
    assert "slicedkv.vmm" in all_imports("slicedkv.opening")
    assert "slicedkv.vmm.base" in reachable("slicedkv.memory.page_pool")
    assert "cuda.bindings.driver" in all_imports("slicedkv.vmm.cuda.driver")


def room_of(name: str) -> str:
    """The folder or file right below the package that a module is in; "" for the package itself."""
    return name.split(".")[1] if "." in name else ""


def used_modules(name: str) -> set[str]:
    """Modules of the package that a module imports, eagerly or late; a folder only for its `__init__`."""
    found = all_imports(name) & MODULES.keys() - {"slicedkv"}
    return {used for used in found if not any(other.startswith(f"{used}.") for other in found)}


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"slicedkv"}))
def test_a_folder_imports_only_what_stands_to_its_left(name):
    own = room_of(name)
    rooms = {room_of(used) for used in used_modules(name)} - {own, "triton_kernels"}
    assert own in ROOMS or own == "triton_kernels", f"{name}: where does {own} stand in the house?"
    assert rooms <= set(ROOMS[: ROOMS.index(own)] if own in ROOMS else ()), name


def test_no_circle_of_modules():
    """Also not within a folder, and not by imports inside functions. The sorter names the circle."""
    graphlib.TopologicalSorter({name: used_modules(name) for name in MODULES if name != "slicedkv"}).prepare()


def test_attention_knows_checks_and_errors_only():
    known = {room_of(used) for name in MODULES if room_of(name) == "attention" for used in used_modules(name)}
    assert known <= {"attention", "checks", "errors", "triton_kernels"}


@pytest.mark.parametrize(
    "name", [*TORCH_FREE, *(name.partition(".")[2] for name in MODULES if room_of(name) == "memory")]
)
def test_torch_free(name):
    assert not {found for found in all_imports(f"slicedkv.{name}") if found.split(".")[0] == "torch"}
    guilty = {part for part in reachable(f"slicedkv.{name}") for found in eager_imports(part) if found == "torch"}
    assert not guilty, f"slicedkv.{name} imports torch through {guilty}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cuda", {"slicedkv.vmm.cuda.driver"}),
        ("flashinfer", {"slicedkv.attention.flashinfer"}),
        ("matplotlib", {"slicedkv.cli.demo.plot"}),
        ("rich", {"slicedkv.cli.demo.display"}),
        ("tests", set()),
        ("bench", set()),
    ],
)
def test_only_one_module_imports(package, allowed):
    assert importers(package) <= allowed


def test_ctypes_loads_libraries_in_the_host_driver_only():
    loaders = {"CDLL", "PyDLL", "cdll", "pythonapi", "LibraryLoader"}
    users = {
        (name, node.attr)
        for name in FILES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Attribute) and node.attr in loaders
    }
    # pythonapi is the interpreter itself, which makes DLPack capsules.
    assert users <= {("slicedkv.vmm.host", "CDLL"), ("slicedkv.views", "pythonapi")}


def test_cache_does_not_know_attention():
    below = reachable("slicedkv.cache")
    assert not {name for name in below if name.startswith(("slicedkv.attention", "slicedkv.engine", "slicedkv.cli"))}


def test_kernels_know_torch_and_triton_only():
    for name in FILES:
        if name.split(".")[0] == "triton_kernels":
            roots = {found.split(".")[0] for found in all_imports(name)}
            assert roots - sys.stdlib_module_names <= {"torch", "triton", "triton_kernels"}, name


def is_cuda_test(node: ast.AST) -> bool:
    """A condition on whether something is CUDA."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "is_cuda":
            return True
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.Eq, ast.NotEq)):
            sides = [side.value for side in (part.left, *part.comparators) if isinstance(side, ast.Constant)]
            if "cuda" in sides:
                return True
    return False


def test_no_if_cuda_above_the_drivers():
    guilty = set()
    for name in MODULES:
        if name == "slicedkv.views" or name.startswith("slicedkv.vmm"):
            continue
        for node in ast.walk(tree_of(name)):
            if isinstance(node, (ast.If, ast.IfExp, ast.While)) and is_cuda_test(node.test):
                guilty.add(f"{name}:{node.lineno}")
    # A backend says where it runs; that is not a branch of what it does.
    assert not {place for place in guilty if not place.startswith("slicedkv.attention.")}


def test_import_is_light():
    """Beyond torch, which itself takes along what it finds."""
    code = (
        "import json, sys, torch; known = set(sys.modules); "
        "from slicedkv import *; print(json.dumps([*set(sys.modules) - known]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not {"cuda", "flashinfer", "triton", "transformers", "matplotlib", "rich"} & loaded


def test_import_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import slicedkv.attention; from slicedkv import *"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_new_tensor_says_its_device():
    """What is left away is the user's default device, whatever it is at that moment."""
    makers = {f"torch.{function.__name__}" for function in _device_constructors()} | {"torch.Generator", "torch.Tensor"}
    calls = ((name, node) for name in FILES for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call))
    made = ((name, node) for name, node in calls if ast.unparse(node.func) in makers)
    assert not {f"{name}:{node.lineno}" for name, node in made if "device" not in {word.arg for word in node.keywords}}


def docstring_lines(node: ast.AST) -> int:
    """Lines of a module's, class's or function's own docstring."""
    if not isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__)) or not ast.get_docstring(node):
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def test_files_are_short():
    """Counted without docstrings, whose length is no fault."""
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) - sum(map(docstring_lines, ast.walk(tree_of(name))))
        for name, path in MODULES.items()
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_functions_are_short():
    """Counted without signature and docstring, whose length is no fault."""
    long = {}
    for name in MODULES:
        for path, node in functions(tree_of(name)):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1 - docstring_lines(node)
            if lines > MAX_FUNCTION_LINES:
                long[f"{name}.{path}"] = lines
    assert not long


def documented_methods() -> dict[str, tuple[list[str], set[str]]]:
    """For each class its bases and the methods that have a docstring."""
    found = {}
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef):
                bases = [getattr(base, "id", getattr(base, "attr", "")) for base in node.bases]
                methods = {item.name for item in node.body if isinstance(item, Function) and ast.get_docstring(item)}
                found[node.name] = (bases, methods)
    return found


def inherits_docstring(kind: str, method: str, known: dict[str, tuple[list[str], set[str]]]) -> bool:
    bases, methods = known.get(kind, ([], set()))
    # A protocol describes what another class documents, and unknown bases, such as torch's, document their own.
    return method in methods or "Protocol" in bases or any(inherits_docstring(base, method, known) for base in bases)


def test_tests_look_inside_a_cache_in_one_place():
    """All others ask it by public calls, so that its inside can change without them."""
    private = re.compile(r"\b(?:cache|one|two|sliced|second)\._[a-z]")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "inside.py"]
    found = {path.name for path in files if private.search(path.read_text(encoding="utf-8"))}
    assert len(files) > 100
    assert found == set()


def test_public_names_have_docstrings():
    known = documented_methods()
    bare = []
    for name in MODULES:
        assert ast.get_docstring(tree_of(name)), name
        for node in tree_of(name).body:
            if not isinstance(node, (*Function.__args__, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                bare.append(f"{name}.{node.name}")
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                public = isinstance(item, Function) and not item.name.startswith("_")
                if public and not inherits_docstring(node.name, item.name, known):
                    bare.append(f"{name}.{node.name}.{item.name}")
    assert not bare
