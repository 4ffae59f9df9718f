"""Compile kernels for GPUs that are not here, and print what each needs. Run by `test_compile.py` in its own process.

python tests/interpret/compile_kernels.py [--all]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slicedkv.triton_kernels import append, decode, decode_parts, prefill
from slicedkv.triton_kernels.checks import ELEMENTS, padded
from slicedkv.triton_kernels.tuning import decode_tile, prefill_tile

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory a program may have, from the CUDA programming guide's table of compute capabilities."""

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
DEFAULTS: dict[str, Any] = {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_LSE": True, "ALIGNMENT": 16}
ROWS = ("q", "out", "k_new", "v_new", "q_out")
FLOATS = ("lse", "parts", "part_lse", "cos_table", "sin_table")
INDICES = ("reqids", "seq_lens", "cu_q_lens", "positions")
LONG = ("k_slot", "v_slot", "k_address", "v_address")


@dataclass
class Case:
    """One specialisation: kernel, dtypes of rows and cache, constants and launch options."""

    kernel: Any
    rows: str
    cache: str
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)


def compile_case(case: Case, arch: int) -> dict[str, Any]:
    """Compile to a cubin; strides and pointers that may matter are multiples of 16, as those of real caches are."""
    types, constants, hints, aligned = {}, {}, {}, []
    for index, parameter in enumerate(case.kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            values = DEFAULTS | {"ELEMENT": ELEMENTS[getattr(torch, case.cache)]} | case.constants
            types[name], constants[(index,)] = "constexpr", values.get(name)
            continue
        types[name] = _type(name, case)
        pointer, integer = types[name][0] == "*", types[name][0] == "i"
        if pointer and not parameter.do_not_specialize_on_alignment:
            aligned.append(name)
        if name in aligned or (integer and not parameter.do_not_specialize):
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, types, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    return {
        "kernel": case.kernel.__name__,
        "arch": arch,
        "rows": case.rows,
        "cache": case.cache,
        "head_dim": case.constants["HEAD_DIM"],
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "shared_limit": SHARED_BYTES[arch],
        "aligned": aligned,
        "ptx": compiled.asm["ptx"],
    }


def _type(name: str, case: Case) -> str:
    if name in ROWS:
        return "*" + TYPES[case.rows]
    if name in FLOATS:
        return "*fp32"
    if name in INDICES:
        return "*i32"
    if name in ("scale", "k_scale", "v_scale"):
        return "fp32"
    return "i64" if name in LONG else "i32"


def decode_case(arch: int, rows: str, cache: str, head_dim: int, group: int = 4, **constants: Any) -> Case:
    """Build the split kernel as the launcher does."""
    itemsize = getattr(torch, cache).itemsize
    tile = decode_tile((arch // 10, arch % 10), itemsize)
    heads = constants.pop("HEADS", 1)
    width = padded(heads * head_dim)
    tokens = min(256, max(16, tile.tile_bytes // (width * itemsize)))
    shape = {"GROUP": group, "Q_LEN": 1, "HEADS": heads, "HEAD_DIM": head_dim, "NUM_HEADS": 32}
    blocks = {"BLOCK_M": 16, "BLOCK_N": tokens, "BLOCK_W": width, "ROW_TILES": 1, "SPLIT": True, "BLOCK_L": 0}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Case(decode._decode_kernel, rows, cache, shape | blocks | constants, options)


def join_case(rows: str, head_dim: int, *, lanes: int = 0) -> Case:
    """Build the kernel that joins the parts."""
    shape = {
        "Q_LEN": 1,
        "HEAD_DIM": head_dim,
        "NUM_HEADS": 32,
        "BLOCK_D": padded(head_dim),
        "BLOCK_N": 64,
        "BLOCK_S": 64,
        "BLOCK_L": lanes,
    }
    return Case(decode_parts.join_kernel, rows, rows, shape)


def prefill_case(arch: int, rows: str, cache: str, head_dim: int, group: int = 4, **constants: Any) -> Case:
    """Build the prefill kernel as the launcher does."""
    tile = prefill_tile((arch // 10, arch % 10), getattr(torch, rows).itemsize, head_dim)
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "NUM_HEADS": 32, "CAUSAL": True}
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.tokens, "BLOCK_D": padded(head_dim)}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Case(prefill._prefill_kernel, rows, cache, shape | blocks | constants, options)


def append_case(rows: str, cache: str, head_dim: int, *, rotary: bool) -> Case:
    """Build the append kernel as the launcher does."""
    shape = {"HEAD_DIM": head_dim, "BLOCK_T": 16, "BLOCK_H": padded(head_dim // 2, 8)}
    limit = append._limit(getattr(torch, cache))
    options = {"ROTARY": rotary, "HAS_POSITIONS": rotary, "HAS_Q": rotary, "ONE_EACH": not rotary, "LIMIT": limit}
    return Case(append._append_kernel, rows, cache, shape | options, {"num_warps": 4})


def representative() -> Iterator[tuple[Case, int]]:
    """Every kernel on every architecture, with the dtypes and options that change the code most."""
    for arch in (80, 90, 100):
        yield decode_case(arch, "bfloat16", "bfloat16", 128), arch
        yield prefill_case(arch, "bfloat16", "bfloat16", 128), arch
        yield append_case("bfloat16", "bfloat16", 128, rotary=True), arch
        float8 = "float8_e5m2" if arch == 80 else "float8_e4m3fn"
        yield decode_case(arch, "bfloat16", float8, 80, group=1), arch
        yield append_case("bfloat16", float8, 80, rotary=False), arch
    yield join_case("bfloat16", 192), 90
    yield join_case("bfloat16", 128, lanes=64), 90
    yield decode_case(90, "bfloat16", "bfloat16", 128, BLOCK_L=64), 90
    yield prefill_case(90, "float16", "float8_e4m3fn", 256, WINDOW=1000, SOFT_CAP=30.0), 90
    yield decode_case(90, "bfloat16", "bfloat16", 128, HEADS=4), 90
    yield decode_case(90, "float16", "float16", 96, Q_LEN=4, WINDOW=500, SOFT_CAP=30.0), 90


def everything() -> Iterator[tuple[Case, int]]:
    """Every table entry with every dtype and head dimension: takes many minutes."""
    for arch in SHARED_BYTES:
        for rows, cache in (*((name, name) for name in list(TYPES)[:3]), *(("bfloat16", n) for n in list(TYPES)[3:])):
            if arch < 89 and cache == "float8_e4m3fn":
                continue
            for head_dim in (64, 80, 96, 128, 192, 256):
                yield decode_case(arch, rows, cache, head_dim), arch
                yield prefill_case(arch, rows, cache, head_dim), arch


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every table entry, dtype and head dimension")
    parser.add_argument("--arch", type=int, help="this architecture only")
    options = parser.parse_args()
    for case, arch in everything() if options.all else representative():
        if options.arch in (None, arch):
            row = compile_case(case, arch)
            row.pop("ptx")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
