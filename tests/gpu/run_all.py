"""Run all tests that need a GPU in as little time as they take: `make test-gpu`.

Most run side by side, where pytest-xdist is there, while FlashInfer's modules are built; then those that nothing else
may use the GPU beside. Without xdist it is the same as `pytest -m gpu`.

python tests/gpu/run_all.py [--workers N] [pytest's arguments]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/gpu", "tests/contract")  # of all tests marked gpu
WORKERS = 8
"""A test takes up to 9 GB of the GPU's memory, and two workers have a model of 10 GB."""
WAIT_S = 600
"""For a test that waits for a compiler beside others."""


def commands(arguments: Sequence[str], workers: int, *, side_by_side: bool) -> dict[str, list[str]]:
    """What is run one after the other, by name."""
    pytest = [sys.executable, "-P", "-m", "pytest"]  # -P: the folder triton_kernels here would hide a package
    if not side_by_side:
        return {"all": [*pytest, *FOLDERS, "-m", "gpu", *arguments]}
    # pytest-benchmark, where it is there, warns of xdist, and a warning is an error.
    spread = ["-n", str(workers), "-o", f"timeout={WAIT_S}", "-p", "no:benchmark"]
    return {
        "side by side": [*pytest, *FOLDERS, "-m", "gpu and not gpu_alone", *spread, *arguments],
        "alone": [*pytest, *FOLDERS, "-m", "gpu and gpu_alone", *arguments],
    }


def environment() -> dict[str, str]:
    """This process's, with slicedkv on the path, from this checkout, should it not be installed."""
    found = dict(os.environ)
    if importlib.util.find_spec("slicedkv") is None:
        with tempfile.TemporaryDirectory() as folder:  # the links are wanted, and the extension, not the wheel
            make = [sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", folder]
            subprocess.run(make, cwd=ROOT, check=True)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / ".editable"), found.get("PYTHONPATH")]))
    return found


def main() -> int:
    """Run everything, say how long it took, and return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes side by side (default: %(default)s)")
    options, arguments = parser.parse_known_args()
    began = last = time.monotonic()
    settings, side_by_side = environment(), importlib.util.find_spec("xdist") is not None
    builds = None
    if side_by_side and importlib.util.find_spec("flashinfer") is not None:
        script = Path(__file__).with_name("flashinfer_modules.py")
        builds = subprocess.Popen([sys.executable, "-P", script], cwd=ROOT, env=settings)
    codes, took = [], []
    for name, command in commands(arguments, options.workers, side_by_side=side_by_side).items():
        codes.append(subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode)
        if builds is not None:
            builds.wait()
        last, before = time.monotonic(), last
        took.append(f"{name} {last - before:.0f} s")
    print(f"GPU tests: {', '.join(took)}; {last - began:.0f} s in all", flush=True)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
