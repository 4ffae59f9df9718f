"""Ctrl-C at any moment: exit code 130 and nothing printed. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(path: Path, *words: str, code: str = "from slicedkv.__main__ import run; sys.exit(run())") -> tuple[int, str]:
    """Run the command as its script does, with modules of `path` before all others; return exit code and output."""
    script = f"import sys; sys.path.insert(0, {str(path)!r}); sys.argv = {['slicedkv', *words]!r}; {code}"
    done = subprocess.run([sys.executable, "-c", script], stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("module", ["torch", "argparse", "slicedkv/errors"])
def test_during_an_import(tmp_path: Path, module: str) -> None:
    """Modules that interrupt in the middle of being imported, and catch what comes of it, as some do."""
    name = module.partition("/")[0]
    (tmp_path / f"{name}.py").write_text(f"{INTERRUPT}try:\n    print('still here')\nexcept BaseException:\n    pass\n")
    code = "from slicedkv.__main__ import run; sys.exit(run())"
    if name == "slicedkv":
        hook = f"import slicedkv.__main__; slicedkv.__path__.insert(0, {str(tmp_path)!r}); "
        (tmp_path / "slicedkv.py").rename(tmp_path / "errors.py")
        code = f"sys.path.pop(0); {hook}{code}"
    assert run(tmp_path, "plan", "yi-6b", code=code) == (130, "")


def test_in_the_middle_of_a_command(tmp_path: Path) -> None:
    code = f"import slicedkv.cli.plan; slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0; "
    assert run(tmp_path, "plan", "yi-6b", code=f"{code}from slicedkv.__main__ import run; sys.exit(run())") == (130, "")


def test_what_a_command_opened_is_closed(tmp_path: Path) -> None:
    command = (
        "import slicedkv, slicedkv.cli.plan\n"
        "def work(options):\n"
        "    try:\n"
        f"        exec({INTERRUPT!r})\n"
        "    finally:\n"
        "        print('closed')\n"
        "slicedkv.cli.plan.run = work\n"
        "from slicedkv.__main__ import run; sys.exit(run())"
    )
    assert run(tmp_path, "plan", "yi-6b", code=f"exec({command!r})") == (130, "closed\n")


def test_again_while_the_interpreter_ends(tmp_path: Path) -> None:
    command = (
        "import atexit, slicedkv.cli.plan\n"
        f"atexit.register(lambda: exec({INTERRUPT!r}))\n"
        f"slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0\n"
        "from slicedkv.__main__ import run; sys.exit(run())"
    )
    assert run(tmp_path, "plan", "yi-6b", code=f"exec({command!r})") == (130, "")


def test_a_shells_background_ignores_it(tmp_path: Path) -> None:
    command = (
        "import signal, slicedkv.cli.plan\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0\n"
        "from slicedkv.__main__ import run; sys.exit(run())"
    )
    assert run(tmp_path, "plan", "yi-6b", code=f"exec({command!r})") == (0, "")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "slicedkv", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("slicedkv ")
