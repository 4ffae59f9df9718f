"""A stand-in for the flashinfer package: its calls with their shapes and checks, computed in torch from raw pages.

A page is read as the real kernels do: at ``number * stride(0)`` from the view's first element, whatever its shape says.
"""

from __future__ import annotations

import math

import torch


def attend(q, k, v, *, causal, sm_scale, window=None, soft_cap=0.0):
    """Attention of the last rows of one request; ``[q_len, Hq, D]`` over ``[len, H, D]``."""
    group, past = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (rows.repeat_interleave(group, dim=1).double() for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * sm_scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    unseen = torch.zeros(scores.shape[1:], dtype=torch.bool, device=q.device)
    if causal:
        unseen |= torch.ones_like(unseen).triu(past + 1)
    if window is not None:
        unseen |= torch.ones_like(unseen).tril(past - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v).to(q.dtype)


def single_prefill_with_kv_cache(q, k, v, *, causal, sm_scale, backend):
    assert backend in ("fa2", "fa3")
    SINGLE.append((len(q), len(k)))
    return attend(q, k, v, causal=causal, sm_scale=sm_scale)


SINGLE: list[tuple[int, int]] = []
"""Query and cache lengths that `single_prefill_with_kv_cache` was called with."""


def append_paged_kv_cache(k, v, lanes, positions, paged_kv_cache, numbers, indptr, last):
    for values in (lanes, positions, numbers, indptr, last):
        assert values.dtype == torch.int32
        assert values.is_contiguous()
    assert len(lanes) == len(positions) == len(k) == len(v)
    assert len(indptr) == len(last) + 1
    assert k.stride(-1) == v.stride(-1) == 1
    APPENDED.append(len(k))
    for row, (lane, position) in enumerate(zip(lanes.tolist(), positions.tolist(), strict=True)):
        page, offset = divmod(position, paged_kv_cache[0].shape[1])
        assert page < indptr[lane + 1] - indptr[lane]
        number = int(numbers[indptr[lane] + page])
        for side, rows in zip(paged_kv_cache, (k, v), strict=True):
            place = side.storage_offset() + number * side.stride(0) + offset * side.stride(1)
            side.as_strided(rows.shape[1:], side.stride()[2:], place)[:] = rows[row]


APPENDED: list[int] = []
"""Rows that `append_paged_kv_cache` was called with."""


class _Wrapper:
    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        self.options = options
        self.kept = torch.empty(64, dtype=torch.int32, device=workspace.device)  # from one plan to the next

    def _plan(self, q_indptr, kv_indptr, numbers, last, heads, kv_heads, head_dim, page, causal, sm_scale, dtypes):
        for values in (q_indptr, kv_indptr, numbers, last):
            assert values.dtype == torch.int32
        assert len(q_indptr) == len(kv_indptr) == len(last) + 1
        assert kv_indptr[-1] == len(numbers)
        assert bool((last >= 1).all() & (last <= page).all())
        self.kept[: len(last)].copy_(last)
        self.table = q_indptr.tolist(), kv_indptr.tolist(), numbers.tolist(), last.tolist()
        self.page, self.causal, self.sm_scale, self.heads, self.dtypes = page, causal, sm_scale, heads, dtypes

    def run(self, q, paged_kv_cache, *, out):
        q_indptr, kv_indptr, numbers, last = self.table
        assert q.shape[:2] == (q_indptr[-1], self.heads)
        assert q.dtype == out.dtype == self.dtypes[0]
        for lane, tokens in enumerate(last):
            pages = numbers[kv_indptr[lane] : kv_indptr[lane + 1]]
            lens = [self.page] * (len(pages) - 1) + [tokens]
            k, v = (
                torch.cat([self._rows(view, number, n) for number, n in zip(pages, lens, strict=True)])
                for view in paged_kv_cache
            )
            rows = slice(q_indptr[lane], q_indptr[lane + 1])
            out[rows] = attend(q[rows], k, v, causal=self.causal, sm_scale=self.sm_scale)
        return out

    def _rows(self, view, number, tokens):
        assert view.shape[1] == self.page
        shape, offset = (tokens, *view.shape[2:]), view.storage_offset() + number * view.stride(0)
        return view.as_strided(shape, view.stride()[1:], offset)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, q_indptr, *table_and_shape, causal, sm_scale, q_data_type, kv_data_type):
        self._plan(q_indptr, *table_and_shape, causal, sm_scale, (q_data_type, kv_data_type))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, *table_and_shape, sm_scale, q_data_type, kv_data_type):
        if self.options.get("use_cuda_graph"):
            assert len(indptr) == len(self.options["paged_kv_indptr_buffer"])
            assert indptr[-1] <= len(self.options["paged_kv_indices_buffer"])
        each = torch.arange(len(indptr), dtype=torch.int32, device=indptr.device)
        self._plan(each, indptr, *table_and_shape, True, sm_scale, (q_data_type, kv_data_type))
