"""What the launchers refuse before they launch anything, and that they say what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_reference import index

from slicedkv.triton_kernels import append_kv, decode_attention, decode_workspace_numel, prefill_attention

BFLOAT16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


def decode_arguments() -> dict[str, Any]:
    """Arguments that fit."""
    cache = torch.zeros(2, 8, 2, 16)
    lanes = {"reqids": index([0, 1]), "seq_lens": index([1, 1])}
    return {"q": torch.zeros(2, 4, 16), "k_cache": cache, "v_cache": cache.clone(), **lanes}


CACHE_CASES = [
    ({"k_cache": torch.zeros(2, 8, 2, 16).double()}, TypeError, "k_cache is torch.float64; it must be one of float32"),
    ({"v_cache": torch.zeros(2, 8, 2, 16).half()}, TypeError, "k_cache is torch.float32 and v_cache torch.float16"),
    ({"v_cache": torch.zeros(2, 9, 2, 16)}, ValueError, r"v_cache \(2, 9, 2, 16\)"),
    ({"k_cache": torch.zeros(2, 8, 32)}, ValueError, r"k_cache has shape \(2, 8, 32\); it must be \[B, L, H, D\]"),
    ({"k_cache": torch.zeros(0, 8, 2, 16)}, ValueError, "none of them 0"),
    ({"v_cache": torch.zeros(2, 8, 2, 32)[..., ::2]}, ValueError, "v_cache has strides .* must be contiguous"),
    ({"v_cache": torch.zeros(2, 8, 2, 16, device="meta")}, ValueError, "v_cache is on meta; the cache is on cpu"),
    ({"reqids": torch.zeros(2)}, TypeError, "reqids is torch.float32; it must be one of int32, int64"),
    ({"seq_lens": index([1])}, ValueError, r"seq_lens has shape \(1,\); it must be \(2,\)"),
    ({"seq_lens": index([1, 1, 1, 1])[::2]}, ValueError, "seq_lens has strides"),
    ({"reqids": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "reqids is on meta"),
    ({"k_scale": 2.0}, ValueError, "k_scale is 2.0; scales go with float8 caches only"),
]
ATTENTION_CASES = [
    ({"q": torch.zeros(2, 4, 32)}, ValueError, r"q has shape \(2, 4, 32\); it must be \[rows, heads, 16\]"),
    ({"q": torch.zeros(2, 5, 16)}, ValueError, "q has 5 heads; they must be a multiple of the cache's 2"),
    ({"q": torch.zeros(2, 4, 16).half()}, TypeError, "q is torch.float16 and the cache torch.float32"),
    ({"q": torch.zeros(2, 4, 16).to(FLOAT8)}, TypeError, "q is torch.float8_e4m3fn; it must be one of"),
    ({"q": torch.zeros(2, 4, 32)[..., ::2]}, ValueError, "q has strides"),
    ({"q": torch.zeros(2, 4, 16, device="meta")}, ValueError, "q is on meta"),
    ({"out": torch.zeros(2, 4, 16).half()}, TypeError, "out is torch.float16; it must be torch.float32"),
    ({"out": torch.zeros(2, 2, 16)}, ValueError, r"out has shape \(2, 2, 16\)"),
    ({"lse": torch.zeros(2, 4).double()}, TypeError, "lse is torch.float64"),
    ({"lse": torch.zeros(4, 2).t()}, ValueError, "contiguous"),
    ({"window": 0}, ValueError, "window is 0; it must be at least 1"),
    ({"soft_cap": -1.0}, ValueError, "soft_cap is -1.0; it must be positive"),
    ({"soft_cap": float("inf")}, ValueError, "soft_cap is inf"),
]


@pytest.mark.parametrize(("change", "kind", "message"), CACHE_CASES + ATTENTION_CASES)
@pytest.mark.parametrize("prefill", [False, True])
def test_attention(change: dict[str, Any], kind: type[Exception], message: str, prefill: bool) -> None:
    arguments = decode_arguments() | change | ({"cu_q_lens": index([0, 1, 2])} if prefill else {})
    with pytest.raises(kind, match=message):
        (prefill_attention if prefill else decode_attention)(**arguments)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"q_len": 3}, ValueError, "q has 2 rows; they must be a multiple of q_len, 3"),
        ({"q_len": 0}, ValueError, "q_len is 0"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len is 0"),
        ({"num_splits": 2, "workspace": torch.zeros(10)}, ValueError, "workspace has 10 elements; 4 parts need 272"),
        ({"num_splits": 2, "workspace": torch.zeros(999).half()}, TypeError, "workspace is torch.float16"),
    ],
)
def test_decode(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        decode_attention(**(decode_arguments() | change))


def test_prefill() -> None:
    with pytest.raises(ValueError, match="window is 3 without causal"):
        prefill_attention(cu_q_lens=index([0, 1, 2]), causal=False, window=3, **decode_arguments())
    with pytest.raises(ValueError, match=r"cu_q_lens has shape \(2,\); it must be \(3,\)"):
        prefill_attention(cu_q_lens=index([0, 2]), **decode_arguments())
    with pytest.raises(ValueError, match="max_q_len is 0"):
        prefill_attention(cu_q_lens=index([0, 1, 2]), max_q_len=0, **decode_arguments())


def append_arguments() -> dict[str, Any]:
    """Arguments that fit."""
    arguments = decode_arguments()
    del arguments["q"]
    rows = torch.zeros(3, 2, 16)
    return {"k_new": rows, "v_new": rows.clone(), "cu_q_lens": index([0, 1, 3]), **arguments}


TABLES = {"rotary_cos": torch.zeros(9, 8), "rotary_sin": torch.zeros(9, 8)}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *CACHE_CASES,
        ({"k_new": torch.zeros(3, 4, 16)}, ValueError, r"k_new has shape \(3, 4, 16\); it must be \[rows, 2, 16\]"),
        ({"v_new": torch.zeros(3, 2, 16).half()}, TypeError, "v_new is torch.float16; it does not go with a cache"),
        ({"v_new": torch.zeros(4, 2, 16)}, ValueError, "k_new has 3 rows and v_new 4"),
        ({"v_new": torch.zeros(3, 2, 16, device="meta")}, ValueError, "v_new is on meta"),
        ({"k_new": torch.zeros(3, 16, 2).transpose(1, 2)}, ValueError, "k_new has strides"),
        ({"rotary_cos": torch.zeros(9, 8)}, ValueError, "rotary_cos and rotary_sin go together"),
        ({"positions": index([0, 1, 2])}, ValueError, "positions go with them"),
        (TABLES | {"rotary_sin": torch.zeros(9, 16)}, ValueError, r"rotary_sin has shape \(9, 16\)"),
        (TABLES | {"rotary_sin": torch.zeros(8, 8)}, ValueError, "rotary_cos has 9 rows and rotary_sin 8"),
        (TABLES | {"rotary_cos": torch.zeros(9, 8).double()}, TypeError, "rotary_cos is torch.float64"),
        (TABLES | {"positions": index([0, 1])}, ValueError, r"positions has shape \(2,\); it must be \(3,\)"),
        ({"q": torch.zeros(3, 4, 16)}, ValueError, "q is given without rotary_cos"),
        ({"q_out": torch.zeros(3, 4, 16)}, ValueError, "q_out is given without q"),
        (TABLES | {"q": torch.zeros(2, 4, 16)}, ValueError, "q has 2 rows and k_new 3"),
        (TABLES | {"q": torch.zeros(3, 4, 16), "q_out": torch.zeros(3, 2, 16)}, ValueError, "q_out has shape"),
    ],
)
def test_append(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        append_kv(**(append_arguments() | change))


@pytest.mark.parametrize("head_dim", [8, 72, 272])
def test_head_dims(head_dim: int) -> None:
    cache = torch.zeros(1, 1, 1, head_dim)
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}; it must be a multiple of 16, at most 256"):
        decode_workspace_numel(torch.zeros(1, 1, head_dim), cache, cache)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_float8_scales(scale: float) -> None:
    arguments = decode_arguments()
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].to(FLOAT8)
    with pytest.raises(ValueError, match=r"v_scale is .*; it must be positive and finite"):
        decode_attention(**arguments, v_scale=scale)
