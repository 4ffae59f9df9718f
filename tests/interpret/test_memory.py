"""Strides whose products pass 2**31, and memory with nothing behind it. Cases A1, A2, B16."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_reference import attend_all, error, index
from reserved_memory import ReservedMemory

from slicedkv.triton_kernels import append_kv, decode_attention, prefill_attention

HEADS, HEAD_DIM, TOKEN = 8, 128, 32 * 8 * 128


@pytest.fixture
def reserved() -> Iterator[tuple[ReservedMemory, ReservedMemory]]:
    """Addresses for K and for V of three requests of 131,072 tokens of 32 layers in float16, with nothing there."""
    pair = ReservedMemory(3 * 131072 * TOKEN * 2), ReservedMemory(3 * 131072 * TOKEN * 2)
    yield pair
    for memory in pair:
        memory.close()


@pytest.mark.parametrize(
    ("slot_stride", "reqid", "length"),
    [
        (2**32, 1, 40),  # A1: a slot of 2**32 elements; narrowed to 32 bits, every slot is slot 0
        (2**30, 2, 40),  # A2: a stride that fits 31 bits, a product that does not
        (2**32, 0, 65540),  # A2: token 65,536 of this shape lies 2**31 elements in
        (2**32, 2, 131072),
    ],
)
@pytest.mark.parametrize("num_splits", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_far_rows(
    reserved: tuple[ReservedMemory, ReservedMemory], slot_stride: int, reqid: int, length: int, num_splits: int
) -> None:
    k, v = (m.tensor((3, 131072, HEADS, HEAD_DIM), (slot_stride, TOKEN, HEAD_DIM, 1), torch.float16) for m in reserved)
    near = 0 if reqid else 1
    for memory, cache in zip(reserved, (k, v), strict=True):
        memory.map_rows(cache[near, :40])
        memory.map_rows(cache[reqid, length - 40 : length])
        cache[near, :40] = 1
    k_new, v_new = torch.randn(33, HEADS, HEAD_DIM).half(), torch.randn(33, HEADS, HEAD_DIM).half()
    lanes = {"reqids": index([reqid]), "seq_lens": index([length])}
    append_kv(k_new, v_new, k, v, cu_q_lens=index([0, 33]), **lanes)
    assert torch.equal(k[reqid, length - 33 : length], k_new)
    assert torch.equal(v[reqid, length - 33 : length], v_new)
    assert (k[near, :40] == 1).all()
    assert (v[near, :40] == 1).all()

    q = torch.randn(2, HEADS, HEAD_DIM).half()
    shown = k[reqid, length - 33 : length][None], v[reqid, length - 33 : length][None]
    expected, _ = attend_all(q, *shown, [0], [2], [33], window=32)
    out = decode_attention(q, k, v, **lanes, q_len=2, window=32, num_splits=num_splits)
    assert error(out, expected) < 2e-3
    if num_splits == 1:
        assert error(prefill_attention(q, k, v, cu_q_lens=index([0, 2]), **lanes, window=32), expected) < 2e-3


@pytest.mark.parametrize("extra_tokens", [0, 1])
def test_nothing_is_read_past_the_last_mapped_page(extra_tokens: int) -> None:
    """In a child process; one token more than is mapped must kill it, or the test would prove nothing."""
    child = Path(__file__).with_name("unmapped_tail.py")
    paths = os.pathsep.join(str(path) for path in (child.parents[1] / "support", *sys.path) if str(path))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(child), str(extra_tokens)], env=environment, capture_output=True, text=True, check=False
    )
    if extra_tokens:
        assert done.returncode == -signal.SIGSEGV
    else:
        assert done.returncode == 0, done.stderr
        assert "right" in done.stdout
