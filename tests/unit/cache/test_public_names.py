"""What `slicedkv` itself has: every public name, imported when it is used, and every error."""

from __future__ import annotations

import subprocess
import sys

import slicedkv
from slicedkv import errors


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(slicedkv.__all__)


def test_every_public_name_is_there() -> None:
    assert {getattr(slicedkv, name).__module__.partition(".")[0] for name in slicedkv.__all__} == {"slicedkv"}
    assert set(slicedkv.__all__) <= set(dir(slicedkv))


def test_a_name_that_does_not_exist_is_said_to() -> None:
    assert not hasattr(slicedkv, "SlicedCache")
    assert not hasattr(slicedkv, "__wrapped__")


def test_nothing_is_imported_before_it_is_used() -> None:
    assert python("import slicedkv, slicedkv.cli, sys; print('torch' in sys.modules)") == "False"


def test_modules_are_there_without_an_import_of_their_own() -> None:
    assert python("import slicedkv; print(slicedkv.vmm.open_driver.__name__, slicedkv.errors.StateError.__name__)") == (
        "open_driver StateError"
    )
