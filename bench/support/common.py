"""What every benchmark shares: the machine's description, timing by CUDA events, and the file a result goes to."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slicedkv.vmm import native

from .timing import cuda_seconds

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = (
    "torch", "triton", "cuda-bindings", "flashinfer-python", "fa3-fwd", "flash-attn-4", "transformers", "kvcached",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed, and whether the driver is called from C."""
    found = {"python": platform.python_version(), "driver called from": "C" if native.load() else "Python"}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def machine(device: str) -> dict[str, Any]:
    """Describe the machine that a result comes from."""
    if device == "cpu":
        return {"name": "host", "processor": _processor(), "kernel": platform.release()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
    }


def short_name(device: str) -> str:
    """Name of the machine in file names: "host", or the GPU's, such as "h200"."""
    return "host" if device == "cpu" else torch.cuda.get_device_name(device).removeprefix("NVIDIA ").lower().split()[0]


def record(
    name: str,
    options: argparse.Namespace,
    rows: Iterable[dict[str, Any]],
    *,
    finish: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    **more: Any,
) -> None:
    """Show each row as it comes and write all rows so far, so that the file keeps them whatever ends the rest.

    Parameters
    ----------
    finish : callable
        Turns the rows so far into the rows to write.
    **more
        As for `write_result`.

    Raises
    ------
    SystemExit
        After Ctrl-C. The file says that it is not complete.
    """
    found: list[dict[str, Any]] = []
    try:
        for row in rows:
            found.append(row)
            show({key: value for key, value in row.items() if key != "series"})
            write_result(name, options, finish(found), **more, complete=False)
    except KeyboardInterrupt:
        progress(f"interrupted; {len(found)} rows of {name} were written")
        raise SystemExit(130) from None
    print("wrote", write_result(name, options, finish(found), **more), flush=True)


def write_result(name: str, options: argparse.Namespace, rows: Sequence[dict[str, Any]], **more: Any) -> Path:
    """Write `<name>-<machine>.json` with all that a repetition needs, and return its path.

    The new file replaces the old one as a whole: nobody finds half a file.
    """
    device, folder = options.device, options.out
    result = {
        "name": name,
        "machine": machine(device),
        "versions": versions(),
        "date": date.today().isoformat(),
        "commit": options.commit or commit(),
        "command": command() + (" --quick" if options.quick else ""),
        **more,
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{short_name(device)}.json"
    written = path.with_suffix(".part")
    written.write_text(json.dumps(result, indent=1) + "\n")
    return written.replace(path)


def command() -> str:
    """What runs the measurement that is running, without its arguments."""
    return f"python -m bench.{Path(sys.argv[0]).stem}"


@cache
def commit() -> str:
    """The commit that runs, with a "+" where the working tree differs from it."""
    revision = _command("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    return revision + ("+" if _command("git", "status", "--porcelain", "--untracked-files=no") else "")


def time_cuda(call: Callable[[], Any], *, repeats: int = 7, warmup: int = 2) -> float:
    """Median seconds of `call` on the current stream. What is compared is timed by `timing.in_turn` instead."""
    for _ in range(warmup):
        call()
    return statistics.median(cuda_seconds(call) for _ in range(repeats))


def copy_rate(num_bytes: int = 4 << 30) -> float:
    """Bytes a second of a device-to-device copy; each counts twice, once read and once written."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / time_cuda(lambda: target.copy_(source))


def percentiles(values: Sequence[float], *shares: float) -> list[float]:
    """For each share the value that this share of all values lies below."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]


def show(row: dict[str, Any]) -> None:
    """Print one row as soon as it is there."""
    words = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    print(*words, flush=True)


def progress(text: str) -> None:
    """Say what is being measured."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments that every benchmark has."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(prog=command(), description=description, formatter_class=raw)
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    found.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    found.add_argument("--commit", help="the commit that runs, where git does not tell")
    found.add_argument("--quick", action="store_true", help="fewer steps and shapes")
    return found


def _command(*words: str) -> str:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor()
