"""Every kernel compiles for GPUs that are not here, within what they have. In a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KERNELS = {"_append_kernel", "_decode_kernel", "_prefill_kernel", "join_kernel"}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """What the compiler says of representative specialisations."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_cubins_for_three_architectures(compiled: list[dict[str, Any]]) -> None:
    assert {row["arch"] for row in compiled} == {80, 90, 100}
    assert {row["kernel"] for row in compiled if row["arch"] == 90} == KERNELS
    assert all(row["cubin_bytes"] > 1000 for row in compiled)


def test_where_a_batch_begins_makes_no_other_kernel(compiled: list[dict[str, Any]]) -> None:
    """Vectors of lanes are slices of one: a kernel for each way they may be aligned was compiled while serving."""
    index = {"reqids", "seq_lens", "cu_q_lens", "positions"}
    assert all(index.isdisjoint(row["aligned"]) and row["aligned"] for row in compiled)


def test_shared_memory_suffices(compiled: list[dict[str, Any]]) -> None:
    assert [row for row in compiled if row["shared_bytes"] > row["shared_limit"]] == []
