"""Stand-ins for the packages of FlashAttention 2, 3 and 4: the calls that adapters make, computed in torch.

Each takes what the package takes and no more. `CALLS` has the query and KV lengths of every call for one request.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_flashinfer import attend
from torch import Tensor

CALLS: list[tuple[str, int, int]] = []
"""Whose function, new tokens, tokens of K."""


def _alone(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    assert len(q) == len(k) == len(v) == 1, "one request a call"
    assert k.stride(-1) == v.stride(-1) == 1
    CALLS.append((name, q.shape[1], k.shape[1]))
    return attend(q[0], k[0], v[0], **options)[None]


def _flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor, cache_batch_idx: Tensor, softmax_scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    assert bool((cache_batch_idx >= 0).all())
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    lanes = zip(q, cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)
    options = {"sm_scale": softmax_scale, "causal": causal}
    return torch.stack([attend(rows, k_cache[slot, :n], v_cache[slot, :n], **options) for rows, slot, n in lanes])


def _flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    return _alone("flash_attn", q, k, v, sm_scale=softmax_scale, causal=causal)


def _flash_attn_4_func(
    q: Tensor, k: Tensor, v: Tensor, *,
    softmax_scale: float, causal: bool, window_size: tuple[int | None, int | None], softcap: float,
) -> tuple[Tensor, None]:  # fmt: skip
    left, right = window_size
    assert (left is None) == (right is None) == causal or (left is right is None)
    options = {"sm_scale": softmax_scale, "causal": causal or right == 0, "soft_cap": softcap}
    return _alone("fa4", q, k, v, **options, window=None if left is None else left + 1), None


_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, Tensor? page_table = None, float? softmax_scale = None, "
    "bool is_causal = False, int num_splits = 0) -> Tensor"
)


def _fa3_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, page_table: Tensor | None = None, softmax_scale: float = 1.0,
    is_causal: bool = False, num_splits: int = 0,
) -> Tensor:  # fmt: skip
    options = {"sm_scale": softmax_scale, "causal": is_causal}
    if page_table is None:
        assert num_splits == 1, "parts need room that the caller does not give"
        assert seqused_k is cu_seqlens_q is None, "a length makes it load whole tiles behind the length"
        return out.copy_(_alone("fa3", q, k, v, **options)).clone()
    assert seqused_k is not None
    if cu_seqlens_q is None:
        lanes = list(zip(q, out, strict=True))
    else:
        ends = cu_seqlens_q.tolist()
        assert max_seqlen_q == max(end - begin for begin, end in pairwise(ends))
        lanes = [(q[begin:end], out[begin:end]) for begin, end in pairwise(ends)]
    for (rows, found), length, pages in zip(lanes, seqused_k.tolist(), page_table, strict=True):
        found.copy_(attend(rows, *(side[pages.long()].flatten(0, 1)[:length] for side in (k, v)), **options))
    return out.clone()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all three in place of the packages, for a test."""
    CALLS.clear()
    two, four = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    two.flash_attn_func, two.flash_attn_with_kvcache = _flash_attn_func, _flash_attn_with_kvcache  # type: ignore[attr-defined]
    four.flash_attn_func = _flash_attn_4_func  # type: ignore[attr-defined]
    two.cute = four  # type: ignore[attr-defined]
    modules = {"flash_attn": two, "flash_attn.cute": four, "fa3_fwd_interface": types.ModuleType("fa3_fwd_interface")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if not hasattr(torch.ops.fa3_fwd, "fwd"):
        library = torch.library.Library("fa3_fwd", "DEF")
        library.define(_FWD)
        library.impl("fwd", _fa3_fwd, "CPU")
        _KEPT.append(library)


_KEPT: list[torch.library.Library] = []
"""torch forgets an operator with its library."""
