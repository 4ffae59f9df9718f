"""Write the pages of the public interface from the docstrings: `python docs/interface.py FOLDER`, or `make docs`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from pdoc import doc, render

MODULES = (
    "slicedkv",
    "slicedkv.attention",
    "slicedkv.engine",
    "slicedkv.integrations",
    "slicedkv.integrations.transformers",
    "slicedkv.triton_kernels",
    "slicedkv.vmm",
    "slicedkv.vmm.base",
)


def complete(module: ModuleType) -> ModuleType:
    """Give a module what pdoc does not look up itself: names imported late, and types in named tuples."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        setattr(module, name, value)
        if isinstance(value, type) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = get_type_hints(value)
    return module


def inherited(kind: doc.Class, public: set[type]) -> list[doc.Doc]:
    """What a class has from bases of ours that have no place of their own on the pages."""
    hidden = {(base.__module__, base.__qualname__) for base in kind.obj.__mro__ if base not in public}
    members = [members for home, members in kind.inherited_members.items() if home in hidden]
    return [member for part in members for member in part if member.taken_from[0].startswith("slicedkv.")]


def write(folder: Path) -> None:
    """Write an index, a search index and one page a module."""
    pages = {name: doc.Module(complete(import_module(name))) for name in MODULES}
    for name, page in pages.items():  # the public ones, instead of all that are in the folder
        vars(page)["submodules"] = [other for below, other in pages.items() if below.rpartition(".")[0] == name]
    kinds = [kind for page in pages.values() for kind in page.classes]
    for kind in kinds:
        vars(kind)["own_members"] = [*kind.own_members, *inherited(kind, {other.obj for other in kinds})]
    render.configure(docformat="numpy", show_source=False, footer_text=f"slicedkv {pages['slicedkv'].obj.__version__}")
    texts = {f"{name.replace('.', '/')}.html": render.html_module(page, pages) for name, page in pages.items()}
    texts |= {"index.html": render.html_index(pages), "search.js": render.search_index(pages)}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
