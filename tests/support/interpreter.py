"""Triton's interpreter with less work: the language is patched once a launch, not again in every device function.

The interpreter puts its own functions into `triton.language` when a kernel is launched, and takes them out at the end.
It puts the same ones in again at each call of a device function, which takes two fifths of a test's time.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any


def patch_once_a_launch() -> None:
    """Do so from now on, if Triton's interpreter is loaded and has the parts that this needs. Idempotent."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "_patched_langs"):
        return
    parts = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl")
    interpreter._patched_langs = []  # type: ignore[attr-defined]
    if all(hasattr(interpreter, part) for part in parts):
        _install(interpreter)


def _install(interpreter: Any) -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    launches: list[set[ModuleType]] = interpreter._patched_langs  # of each launch under way, what it patched

    @functools.cache
    def langs_of(fn: Any) -> frozenset[ModuleType]:
        both = interpreter.tl, interpreter.tl.core
        return frozenset(value for value in fn.__globals__.values() if any(value is lang for lang in both))

    def patch_lang(fn: Any) -> Any:
        langs = langs_of(fn)
        if launches and langs <= launches[-1]:
            return interpreter._LangPatchScope()  # of nothing, so it restores nothing
        scope = patch(fn)
        if launches:
            launches[-1] |= langs
        return scope

    def launch_once(executor: Any, *arguments: Any, **options: Any) -> Any:
        launches.append(set())
        try:
            return launch(executor, *arguments, **options)
        finally:
            launches.pop()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launch_once
