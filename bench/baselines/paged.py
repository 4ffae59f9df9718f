"""A paged KV cache with real tables, the baseline of `serving`: FlashInfer's append and attention over its pages.

`PagedCache` offers what the engine's scheduler asks of `SlicedKVCache`. `PagedBackend` offers what the engine's runner
asks of an attention backend, CUDA graphs included; FlashAttention 3 may compute its prompts. Page 0 belongs to no
request: padded lanes read and write there. Pages that hold a known prefix (`paged_prefix`) stay when nobody uses them,
until memory is short.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slicedkv.attention import AttentionBackend, Batch
from slicedkv.attention.base import LayerKind
from slicedkv.attention.batch import PADDED, Lane
from slicedkv.attention.flashinfer import WrapperPlans
from slicedkv.layout import KVLayout, ceil_div

_WORKSPACE_BYTES = 256 << 20
_NOBODYS = np.zeros(1, np.int32)
_Row = tuple[NDArray[np.int32], int, int]  # a lane's pages, new tokens and length


class PagedStats(NamedTuple):
    """The part of `CacheStats` that the benchmark reports."""

    mapped_bytes: int
    stalls: int = 0
    stall_us: float = 0.0


class PagedCache:
    """K and V of each layer in pages, all allocated at the start; the page freed last goes out first."""

    def __init__(
        self, layout: KVLayout, dtype: torch.dtype, device: str, memory_bytes: int, page_tokens: int = 16
    ) -> None:
        self.layout = layout  # of pages of as many tokens, so that the scheduler's arithmetic holds
        self.dtype, self.device, self.page_tokens = dtype, torch.device(device), page_tokens
        self.num_pages = memory_bytes // layout.page_bytes // layout.num_planes
        shape = (self.num_pages + 1, page_tokens, layout.num_kv_heads, layout.head_dim)
        self.pages = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(layout.num_layers)
        ]
        self._tables = np.zeros((layout.max_batch_size, self._count(layout.max_seq_len)), np.int32)
        self._counts = [0] * layout.max_batch_size
        self._users = [0] * (self.num_pages + 1)
        self._free = list(range(self.num_pages, 0, -1))
        self._idle = list(range(layout.max_batch_size - 1, -1, -1))
        self.known: dict[int, int] = {}  # the page of a key
        self._keys: dict[int, int] = {}  # the key of a page
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages that nobody uses, the oldest first

    def alloc_reqid(self, seq_len: int = 0) -> int:
        """Hand out a slot."""
        return self._idle.pop()

    def free_reqid(self, reqid: int) -> None:
        """Take a slot and its pages back. Kernels run in the order of the stream, so none reads a page too late."""
        for page in self._tables[reqid, : self._counts[reqid]][::-1].tolist():
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._unused[page] = None
            else:
                self._free.append(page)
        self._counts[reqid] = 0
        self._idle.append(reqid)

    def step(self, seq_lens: dict[int, int]) -> bool:
        """Give every request the pages of its length, or give no request any and return False."""
        if self.pages_needed(seq_lens) > self.pages_available():
            return False
        for reqid, length in seq_lens.items():
            count = self._counts[reqid]
            if (missing := self._count(length) - count) > 0:
                self._take(reqid, [self._free_page() for _ in range(missing)])
        return True

    def adopt(self, reqid: int, pages: Sequence[int]) -> None:
        """Let an empty slot begin with known pages."""
        for page in pages:
            self._unused.pop(page, None)
        self._take(reqid, pages)

    def remember(self, key: int, page: int) -> None:
        """Note what a full page holds, unless another one holds the same."""
        if key not in self.known and page not in self._keys:
            self.known[key], self._keys[page] = page, key

    def is_used(self, page: int) -> bool:
        """True while a request has the page."""
        return self._users[page] > 0

    def table(self, reqid: int, seq_len: int) -> NDArray[np.int32]:
        """Pages of a request's first tokens."""
        return self._tables[reqid, : self._count(seq_len)]

    def pages_needed(self, seq_lens: dict[int, int]) -> int:
        """Pages of all planes that a step would take."""
        missing = (max(0, self._count(n) - self._counts[reqid]) for reqid, n in seq_lens.items())
        return sum(missing) * self.layout.num_planes

    def pages_available(self) -> int:
        """Pages of all planes that are free, or known and unused."""
        return (len(self._free) + len(self._unused)) * self.layout.num_planes

    def can_admit(self, seq_len: int) -> bool:
        """True when a slot and pages for `seq_len` tokens are free."""
        return bool(self._idle) and self._count(seq_len) * self.layout.num_planes <= self.pages_available()

    def stats(self) -> PagedStats:
        """Bytes of the pages that requests have."""
        pages = self.num_pages * self.layout.num_planes - self.pages_available()
        return PagedStats(pages * self.layout.page_bytes)

    def _take(self, reqid: int, pages: Sequence[int]) -> None:
        begin = self._counts[reqid]
        self._counts[reqid] += len(pages)
        self._tables[reqid, begin : self._counts[reqid]] = pages
        for page in pages:
            self._users[page] += 1

    def _free_page(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._unused.popitem(last=False)
        del self.known[self._keys.pop(page)]
        return page

    def _count(self, seq_len: int) -> int:
        return ceil_div(seq_len, self.page_tokens)

    def close(self) -> None:
        """Give the memory back to torch."""
        self.pages.clear()

    def k(self, layer: int) -> Tensor:
        """A tensor with shape, dtype and device of a layer slice; all its rows are the first row."""
        first = self.pages[layer][0]
        shape = (self.layout.max_batch_size, self.layout.max_seq_len, *first.shape[2:])
        return first.as_strided(shape, (0, 0, *first.stride()[2:]))

    def v(self, layer: int) -> Tensor:
        """As `k`."""
        return self.k(layer)


def paged_layout(
    layers: int, heads: int, dim: int, itemsize: int, slots: int, max_seq_len: int, page_tokens: int = 16
) -> KVLayout:
    """Arithmetic of a paged cache: slices whose pages hold as many tokens have the same."""
    page_bytes = page_tokens * layers * heads * dim * itemsize
    return KVLayout("sliced", layers, heads, dim, itemsize, slots, max_seq_len, page_bytes, 0)


class PagedBackend(AttentionBackend):
    """FlashInfer over the tables of a `PagedCache`; prompts by FlashAttention 3 if wanted."""

    name = "paged"
    cache: PagedCache  # type: ignore[assignment]

    def __init__(
        self,
        cache: PagedCache,
        *,
        num_qo_heads: int,
        scale: float | None = None,
        prompts: Literal["flashinfer", "fa3"] = "flashinfer",
    ) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale)
        if prompts == "fa3":
            importlib.import_module("fa3_fwd_interface")
        self._prompts = prompts
        self._fa3_options: dict[str, Any] = {}
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._decoders: dict[int, Any] = {}
        self._buffers: dict[int, list[Tensor]] = {}
        self._numbers = torch.zeros(cache.num_pages + self.max_batch_size, dtype=torch.int32, device=self.device)
        kernel = "fa3" if self.device.type != "cuda" or torch.cuda.get_device_capability()[0] == 9 else "fa2"
        self._prefiller = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernel)
        self._plans = WrapperPlans(self.device)
        self._decode_rows = 0

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, which means yes: the benchmark chooses what it runs."""
        return None

    @property
    def captures(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        rows = [
            (self.cache.table(reqid, n), q, n) if reqid != PADDED else (_NOBODYS, q, q)
            for reqid, q, n in zip(batch.reqids, batch.q_lens, batch.seq_lens, strict=True)
        ]
        decoding = next((i for i, q in enumerate(batch.q_lens) if q != 1), len(rows))
        self._decode_rows = decoding
        self._plan_append(rows, graph=graph)
        if decoding:
            self._decoder = self._open_decoder(decoding if graph else 0)
            table = self._table(rows[:decoding])
            self._plans.plan(self._decoder, *table, *self._heads, self.cache.page_tokens, **self._dtypes)
        if decoding < len(rows):
            self._plan_prompts([row for row in rows[decoding:] if row[1]])

    def _plan_prompts(self, lanes: list[_Row]) -> None:
        ends = torch.tensor([0, *(q for _, q, _ in lanes)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if self._prompts == "flashinfer":
            self._plans.plan(
                self._prefiller, ends, *self._table(lanes), *self._heads, self.cache.page_tokens, causal=True,
                **self._dtypes,
            )  # fmt: skip
            return
        table = np.zeros((len(lanes), max(len(pages) for pages, *_ in lanes)), np.int32)
        for row, (pages, *_) in zip(table, lanes, strict=True):
            row[: len(pages)] = pages
        lens = torch.tensor([n for *_, n in lanes], dtype=torch.int32)
        self._fa3_options = {
            "cu_seqlens_q": ends.to(self.device), "seqused_k": lens.to(self.device),
            "page_table": torch.from_numpy(table).to(self.device), "max_seqlen_q": max(q for _, q, _ in lanes),
            "softmax_scale": self.scale, "is_causal": True,
        }  # fmt: skip

    def _plan_append(self, lanes: list[_Row], *, graph: bool) -> None:
        owners = np.repeat(np.arange(len(lanes), dtype=np.int32), [q for _, q, _ in lanes])
        positions = np.concatenate([np.arange(n - q, n, dtype=np.int32) for _, q, n in lanes])
        indptr, numbers, last = self._table(lanes)
        parts = [torch.from_numpy(owners), torch.from_numpy(positions), indptr, last]
        kind = len(lanes) if graph else 0
        if not graph or kind not in self._buffers:
            self._buffers[kind] = [part.to(self.device) for part in parts]
        else:
            for buffer, part in zip(self._buffers[kind], parts, strict=True):
                buffer.copy_(part, non_blocking=True)
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
        self._append_lanes = self._buffers[kind]

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.num_qo_heads, self.num_kv_heads, self.head_dim

    @property
    def _dtypes(self) -> dict[str, Any]:
        return {"q_data_type": self.dtype, "kv_data_type": self.dtype, "sm_scale": self.scale}

    def _open_decoder(self, captured: int) -> Any:
        if captured not in self._decoders:
            options: dict[str, Any] = {}
            if captured:
                shapes = (captured + 1, len(self._numbers), captured)
                names = ("indptr", "indices", "last_page_len")
                options = {
                    f"paged_kv_{name}_buffer": torch.zeros(length, dtype=torch.int32, device=self.device)
                    for name, length in zip(names, shapes, strict=True)
                }
                options["use_cuda_graph"] = True
            self._decoders[captured] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=self.group_size > 1, **options
            )
        return self._decoders[captured]

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        owners, positions, indptr, last = self._append_lanes
        flashinfer.append_paged_kv_cache(k, v, owners, positions, self.cache.pages[layer], self._numbers, indptr, last)

    def _run(self, layer: int, q: Tensor, out: Tensor, kind: LayerKind) -> None:
        rows = self._decode_rows
        if rows:
            self._decoder.run(q[:rows], self.cache.pages[layer], out=out[:rows])
        if rows < len(q) and self._prompts == "fa3":
            torch.ops.fa3_fwd.fwd(q[rows:], *self.cache.pages[layer], out=out[rows:], **self._fa3_options)
        elif rows < len(q):
            self._prefiller.run(q[rows:], self.cache.pages[layer], out=out[rows:])

    def _table(self, lanes: list[_Row]) -> tuple[Tensor, Tensor, Tensor]:
        """First entry of each lane, page numbers, and tokens on each last page."""
        counts = torch.tensor([0, *(len(pages) for pages, *_ in lanes)], dtype=torch.int32)
        numbers = torch.from_numpy(np.concatenate([pages for pages, *_ in lanes]))
        tokens = self.cache.page_tokens
        last = torch.tensor([n - (len(pages) - 1) * tokens for pages, _, n in lanes], dtype=torch.int32)
        return counts.cumsum(0, dtype=torch.int32), numbers, last
