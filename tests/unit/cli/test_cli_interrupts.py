"""Ctrl-C at any moment: exit code 130 and nothing printed. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import run_script

COMMAND = ["slicedkv", "plan", "yi-6b"]
INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(path: Path, code: str) -> tuple[int, str]:
    """Run the command as its script does, with modules of `path` before all others; return exit code and output."""
    script = f"import sys; sys.path.insert(0, {str(path)!r}); sys.argv = {COMMAND!r}; {code}"
    done = subprocess.run([sys.executable, "-c", script], stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout


def run_warm(code: str) -> tuple[int, str]:
    """The same where torch is imported already."""
    status, out, errors = run_script(f"import sys; sys.argv = {COMMAND!r}\n{code}")
    return status, out + errors


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
    assert run(tmp_path, code) == (130, "")


def test_in_the_middle_of_a_command() -> None:
    code = f"import slicedkv.cli.plan; slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0; "
    assert run_warm(f"{code}from slicedkv.__main__ import run; sys.exit(run())") == (130, "")


def test_what_a_command_opened_is_closed() -> None:
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
    assert run_warm(command) == (130, "closed\n")


def test_again_while_the_interpreter_ends() -> None:
    command = (
        "import atexit, slicedkv.cli.plan\n"
        f"atexit.register(lambda: exec({INTERRUPT!r}))\n"
        f"slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0\n"
        "from slicedkv.__main__ import run; sys.exit(run())"
    )
    assert run_warm(command) == (130, "")


def test_a_shells_background_ignores_it() -> None:
    command = (
        "import signal, slicedkv.cli.plan\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"slicedkv.cli.plan.run = lambda options: exec({INTERRUPT!r}) or 0\n"
        "from slicedkv.__main__ import run; sys.exit(run())"
    )
    assert run_warm(command) == (0, "")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "slicedkv", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("slicedkv ")
