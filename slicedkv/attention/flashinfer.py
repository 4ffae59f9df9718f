"""Attention through FlashInfer, which reads slices in place: as pages of a table, or as one strided request.

Decode and batches of short prompts use the kernels for paged caches over a `PagedView`. Long prompts and chunks use
`single_prefill`, which needs no table and is faster there.

A step with prompts uses FlashInfer's kernels for everything. Such a step is never captured in a CUDA graph. If it has
few tokens the GPU waits for the host, and launching Triton's kernels costs the host several times as much. In other
steps the Triton kernel appends. FlashInfer compiles the kernels of a dtype and head dimension at their first use, half
a minute or so, and keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import flashinfer
import torch
from torch import Tensor

from ..errors import ConfigError
from ..triton_kernels.checks import ceil_div
from .base import KV, KVSource, LayerKind, missing_for_half
from .batch import PADDED, Batch, Lane
from .long_lanes import LaneKernel, LongLaneBackend, open_lane_kernel
from .paged_view import PagedView, PageTable, ramps

__all__ = ["FlashInferBackend", "WrapperPlans"]

_PAGE_TOKENS = 64
_WORKSPACE_BYTES = 256 << 20
_HEAD_DIMS = (64, 128, 256)
# From here on `single_prefill` is faster than the kernel for pages, measured on H200 (bench/results/prefill-h200.json,
# columns single_sliced and view_sliced). Beside other lanes, a lane must fill the GPU by itself, with 4 tiles of 128
# queries and 32 heads. Alone, it must read enough to gain by doing without a table.
_SINGLE_Q_LEN, _SINGLE_SEQ_LEN = 512, 8192
_ALONE_SEQ_LEN, _ALONE_PAIRS = 4096, 1 << 20
# Of lanes with more queries, neighbouring ones then share what they read in the GPU's cache: a gain for these kernels,
# none for FlashAttention's.
_QUERIES_A_CALL = 16384
_UINT32 = 2**32


class WrapperPlans:
    """Plans FlashInfer's wrappers, and waits where their pinned memory is still in use.

    Each wrapper has one piece of pinned memory. The device copies a plan from there in the stream's order. A plan made
    too early would overwrite the one before, and kernels would read wherever the mixture says. So planning a wrapper
    again waits until the device has copied its last plan, and thus has done the work queued before.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: dict[int, torch.cuda.Event] = {}  # by the wrapper's id; it lives as long as its owner

    def plan(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``wrapper.plan`` on the current stream."""
        left = self._left.pop(id(wrapper), None)
        if left is not None:
            left.synchronize()
        wrapper.plan(*args, **kwargs)
        if self._device.type == "cuda":
            self._left[id(wrapper)] = torch.cuda.current_stream(self._device).record_event()


class FlashInferBackend(LongLaneBackend):
    """FlashInfer backend; see `AttentionBackend`. float16 and bfloat16; a head dimension of 64, 128 or 256.

    `plan` copies the page table to the device. It waits until the device has copied the plan before, see
    `WrapperPlans`.

    Parameters
    ----------
    decode : {"flashinfer", "triton"}
        Whose kernel decodes in steps without prompts.
    prompts : {"flashinfer", "fa3", "fa4"}
        Whose kernel computes long lanes. That backend must run here, too.
    """

    name: ClassVar[str] = "flashinfer"
    features: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        cache: KVSource,
        *,
        num_qo_heads: int,
        scale: float | None = None,
        causal: bool = True,
        decode: Literal["flashinfer", "triton"] = "flashinfer",
        prompts: Literal["flashinfer", "fa3", "fa4"] = "flashinfer",
    ) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        if decode not in ("flashinfer", "triton"):
            raise ConfigError(f"decode is {decode!r}; use 'flashinfer' or 'triton'")
        self.decode = decode
        if prompts not in ("flashinfer", "fa3", "fa4"):
            raise ConfigError(f"prompts is {prompts!r}; use 'flashinfer', 'fa3' or 'fa4'")
        self.prompts = prompts
        self._lane_kernel: LaneKernel = self._attend_itself
        if prompts == "flashinfer":
            self.queries_a_call = _QUERIES_A_CALL
        else:
            self._lane_kernel = open_lane_kernel(prompts, scale=self.scale, causal=self.causal)
        page_tokens = _PAGE_TOKENS
        while page_tokens > self.max_seq_len:
            page_tokens //= 2
        self._view = PagedView.of(cache.k(0), page_tokens)
        self._kernel = _kernel(self.device)
        # fa2's single_prefill computes one product in 32 bits.
        self._single_limit = self.max_seq_len if self._kernel == "fa3" else (_UINT32 - 1) // cache.k(0).stride(1)
        self._workspace_bytes = self._kept(_WORKSPACE_BYTES, torch.uint8).zero_()
        self._numbers: Tensor | None = None
        self._plans = WrapperPlans(self.device)
        self._decoders: dict[int, Any] = {}
        self._prefillers: dict[int, Any] = {}
        self._decoder: Any = None
        self._decodes_itself = self.decode == "flashinfer"
        self._places: tuple[Tensor, ...] | None = None
        self._table = PageTable(self._view, [])
        self._paged: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no GPU or one before Ampere, or a dtype or head dimension without kernels."""
        if head_dim not in _HEAD_DIMS:
            return f"head_dim is {head_dim}; this adapter takes {_HEAD_DIMS}"
        return missing_for_half(device, dtype)

    def _plan_rest(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        prompts = not graph and max(batch.q_lens, default=0) > 1
        self._table = PageTable(self._view, lanes)
        self._places = self._find_places(lanes) if prompts and PADDED not in batch.reqids else None
        self._decodes_itself = self.decode == "flashinfer" or prompts
        if self._decodes_itself:
            if self._decode_q_len > 1:  # FlashInfer's decode takes one token of each lane
                self._decode_lanes = 0
            self._plan_decode(batch, graph=graph)

    def _find_places(self, lanes: Sequence[Lane]) -> tuple[Tensor, ...]:
        """What `append_paged_kv_cache` needs of a step without padded lanes, on the device.

        These are the lane and the position of each row, then the page table of all lanes.
        """
        index, q_lens, past_lens = torch.tensor(
            [(index, lane.q_len, lane.past_len) for index, lane in enumerate(lanes)], dtype=torch.int64, device="cpu"
        ).unbind(dim=1)
        owners, positions = ramps(index, q_lens, 0).int(), ramps(past_lens, q_lens, 1).int()
        indptr, numbers, last = self._table.of(lanes)
        parts = (owners, positions, numbers, indptr, last)
        packed = torch.cat(parts)
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        return torch.split(packed.to(self.device, non_blocking=True), [len(part) for part in parts])

    def _plan_decode(self, batch: Batch, *, graph: bool) -> None:
        reqids, seq_lens = batch.reqids[: self._decode_lanes], batch.seq_lens[: self._decode_lanes]
        real = next((reqid for reqid in reqids if reqid != PADDED), None)
        self._decoder = None
        if real is None:
            return
        if PADDED in reqids:
            # FlashInfer knows no padded lanes: they read a request's first row, and nobody reads what they write.
            lanes = [(real, 1) if reqid == PADDED else (reqid, n) for reqid, n in zip(reqids, seq_lens, strict=True)]
            table = self._view.table(*zip(*lanes, strict=True))
        else:
            table = self._table.of(self._table.lanes[: self._decode_lanes])
        self._decoder = self._open_decoder(self._decode_lanes if graph else 0)
        self._plans.plan(
            self._decoder, *table,
            self.num_qo_heads, self.num_kv_heads, self.head_dim, self._view.page_tokens,
            q_data_type=self.dtype, kv_data_type=self.dtype, sm_scale=self.scale,
        )  # fmt: skip

    def _open_decoder(self, captured_lanes: int) -> Any:
        """Return the wrapper for captured steps of so many lanes; with 0, for steps that are not captured."""
        if captured_lanes not in self._decoders:
            options: dict[str, Any] = {}
            if captured_lanes:
                if self._numbers is None:
                    most = self.max_batch_size * ceil_div(self.max_seq_len, self._view.page_tokens)
                    self._numbers = self._new(most)
                options = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": self._new(captured_lanes + 1),
                    "paged_kv_indices_buffer": self._numbers,
                    "paged_kv_last_page_len_buffer": self._new(captured_lanes),
                }
            # Tensor cores gain as soon as several query heads share what was read.
            options["use_tensor_cores"] = self.group_size > 1
            self._decoders[captured_lanes] = self._open(flashinfer.BatchDecodeWithPagedKVCacheWrapper, options)
        return self._decoders[captured_lanes]

    def _open(self, wrapper: Any, options: dict[str, Any]) -> Any:
        with torch.inference_mode(False):  # the wrapper keeps buffers, as `_kept` does
            return wrapper(self._workspace_bytes, "NHD", **options)

    def _new(self, length: int) -> Tensor:
        return self._kept(length, torch.int32).zero_()

    def _is_long(self, lane: Lane, *, alone: bool) -> bool:
        if self.prompts != "flashinfer":
            return super()._is_long(lane, alone=alone)
        if lane.seq_len > self._single_limit:
            return False
        if alone:
            return lane.seq_len >= _ALONE_SEQ_LEN and lane.q_len * lane.seq_len >= _ALONE_PAIRS
        return lane.seq_len >= _SINGLE_SEQ_LEN and lane.q_len >= _SINGLE_Q_LEN

    def _plan_short(self, lanes: Sequence[Lane], index: int) -> Any:
        """Plan the wrapper that is kept for the span of this index."""
        if index not in self._prefillers:
            options = {"backend": self._kernel}
            self._prefillers[index] = self._open(flashinfer.BatchPrefillWithPagedKVCacheWrapper, options)
        begin = lanes[0].begin
        q_ends = torch.tensor([0, *(lane.end - begin for lane in lanes)], dtype=torch.int32, device="cpu")
        self._plans.plan(
            self._prefillers[index], q_ends, *self._table.of(lanes),
            self.num_qo_heads, self.num_kv_heads, self.head_dim, self._view.page_tokens,
            causal=self.causal, sm_scale=self.scale, q_data_type=self.dtype, kv_data_type=self.dtype,
        )  # fmt: skip
        return self._prefillers[index]

    def _pages(self, layer: int, cached: KV) -> KV:
        if layer not in self._paged:
            k, v = cached
            self._paged[layer] = self._view.pages(k), self._view.pages(v)
        return self._paged[layer]

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._places is None or not (_can_be_appended(k) and _can_be_appended(v)):
            super()._append(layer, k, v)
        else:
            owners, positions, *table = self._places
            pages = self._pages(layer, self._look_up(layer))
            flashinfer.append_paged_kv_cache(k, v, owners, positions, pages, *table)

    def _run_decode(self, layer: int, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        if not self._decodes_itself:
            super()._run_decode(layer, q, cached, out, kind)
        elif self._decoder is None:
            out.zero_()
        else:
            self._decoder.run(q, self._pages(layer, cached), out=out)
            for begin, end in self._padding:
                out[begin:end].zero_()

    def _run_short(self, layer: int, short: Any, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        short.run(q, self._pages(layer, cached), out=out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kind: LayerKind) -> None:
        self._lane_kernel(q, k, v, out)

    def _attend_itself(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        found = flashinfer.single_prefill_with_kv_cache(
            q[0], k[0], v[0], causal=self.causal, sm_scale=self.scale, backend=self._kernel
        )
        out[0].copy_(found)


def _can_be_appended(rows: Tensor) -> bool:
    """Whether FlashInfer's kernel can load rows, which it does 16 bytes at a time."""
    token, head, inner = rows.stride()
    return inner == 1 and not (rows.data_ptr() | token * rows.element_size() | head * rows.element_size()) % 16


def _kernel(device: torch.device) -> str:
    """Return the generation of kernels that is fastest there: the third is written for Hopper alone."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
