"""A paged KV cache with real tables, the baseline of `serving`: 16 tokens a page, FlashInfer's append and attention.

`PagedCache` offers what the engine's scheduler asks of `SlicedKVCache`. `PagedBackend` offers what the engine's runner
asks of an attention backend, CUDA graphs included. Page 0 belongs to no request: padded lanes read and write there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slicedkv.attention import AttentionBackend, Batch
from slicedkv.attention.batch import PADDED, Lane
from slicedkv.attention.flashinfer import WrapperPlans
from slicedkv.layout import KVLayout, ceil_div

PAGE_TOKENS = 16
_WORKSPACE_BYTES = 256 << 20
_NOBODYS = np.zeros(1, np.int32)
_Row = tuple[NDArray[np.int32], int, int]  # a lane's pages, new tokens and length


class PagedStats(NamedTuple):
    """The part of `CacheStats` that the benchmark reports."""

    mapped_bytes: int
    stalls: int = 0
    stall_us: float = 0.0


class PagedCache:
    """K and V of each layer in pages of 16 tokens, all allocated at the start; the page freed last goes out first."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: str, memory_bytes: int) -> None:
        self.layout = layout  # of pages of 16 tokens, so that the scheduler's arithmetic holds
        self.dtype, self.device = dtype, torch.device(device)
        self.num_pages = memory_bytes // layout.page_bytes // layout.num_planes
        shape = (self.num_pages + 1, PAGE_TOKENS, layout.num_kv_heads, layout.head_dim)
        self.pages = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(layout.num_layers)
        ]
        self._tables = np.zeros((layout.max_batch_size, _pages(layout.max_seq_len)), np.int32)
        self._counts = [0] * layout.max_batch_size
        self._free = list(range(self.num_pages, 0, -1))
        self._idle = list(range(layout.max_batch_size - 1, -1, -1))

    def alloc_reqid(self, seq_len: int = 0) -> int:
        """Hand out a slot."""
        return self._idle.pop()

    def free_reqid(self, reqid: int) -> None:
        """Take a slot and its pages back. Kernels run in the order of the stream, so none reads a page too late."""
        self._free += self._tables[reqid, : self._counts[reqid]][::-1].tolist()
        self._counts[reqid] = 0
        self._idle.append(reqid)

    def step(self, seq_lens: dict[int, int]) -> bool:
        """Give every request the pages of its length, or give no request any and return False."""
        if self.pages_needed(seq_lens) > self.pages_available():
            return False
        for reqid, length in seq_lens.items():
            count = self._counts[reqid]
            if missing := _pages(length) - count:
                self._tables[reqid, count : count + missing] = self._free[: -missing - 1 : -1]
                del self._free[-missing:]
                self._counts[reqid] += missing
        return True

    def table(self, reqid: int, seq_len: int) -> NDArray[np.int32]:
        """Pages of a request's first tokens."""
        return self._tables[reqid, : _pages(seq_len)]

    def pages_needed(self, seq_lens: dict[int, int]) -> int:
        """Pages of all planes that a step would take."""
        missing = (max(0, _pages(n) - self._counts[reqid]) for reqid, n in seq_lens.items())
        return sum(missing) * self.layout.num_planes

    def pages_available(self) -> int:
        """Free pages of all planes."""
        return len(self._free) * self.layout.num_planes

    def can_admit(self, seq_len: int) -> bool:
        """True when a slot and pages for `seq_len` tokens are free."""
        return bool(self._idle) and _pages(seq_len) <= len(self._free)

    def stats(self) -> PagedStats:
        """Bytes of the pages handed out."""
        return PagedStats((self.num_pages - len(self._free)) * self.layout.page_bytes * self.layout.num_planes)

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


def paged_layout(layers: int, heads: int, dim: int, itemsize: int, slots: int, max_seq_len: int) -> KVLayout:
    """Arithmetic of a paged cache: slices whose pages hold 16 tokens have the same."""
    page_bytes = PAGE_TOKENS * layers * heads * dim * itemsize
    return KVLayout("sliced", layers, heads, dim, itemsize, slots, max_seq_len, page_bytes, 0)


class PagedBackend(AttentionBackend):
    """FlashInfer over the tables of a `PagedCache`."""

    name = "paged"
    cache: PagedCache  # type: ignore[assignment]

    def __init__(self, cache: PagedCache, *, num_qo_heads: int, scale: float | None = None) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale)
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
            self._plans.plan(self._decoder, *_table(rows[:decoding]), *self._heads, PAGE_TOKENS, **self._dtypes)
        if decoding < len(rows):
            rest = [row for row in rows[decoding:] if row[1]]
            ends = torch.tensor([0, *(q for _, q, _ in rest)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._plans.plan(
                self._prefiller, ends, *_table(rest), *self._heads, PAGE_TOKENS, causal=True, **self._dtypes
            )

    def _plan_append(self, lanes: list[_Row], *, graph: bool) -> None:
        owners = np.repeat(np.arange(len(lanes), dtype=np.int32), [q for _, q, _ in lanes])
        positions = np.concatenate([np.arange(n - q, n, dtype=np.int32) for _, q, n in lanes])
        indptr, numbers, last = _table(lanes)
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

    def _run(self, layer: int, q: Tensor, out: Tensor) -> None:
        rows = self._decode_rows
        if rows:
            self._decoder.run(q[:rows], self.cache.pages[layer], out=out[:rows])
        if rows < len(q):
            self._prefiller.run(q[rows:], self.cache.pages[layer], out=out[rows:])


def _pages(seq_len: int) -> int:
    return ceil_div(seq_len, PAGE_TOKENS)


def _table(lanes: list[_Row]) -> tuple[Tensor, Tensor, Tensor]:
    """First entry of each lane, page numbers, and tokens on each last page."""
    counts = torch.tensor([0, *(len(pages) for pages, *_ in lanes)], dtype=torch.int32)
    numbers = torch.from_numpy(np.concatenate([pages for pages, *_ in lanes]))
    last = torch.tensor([n - (len(pages) - 1) * PAGE_TOKENS for pages, _, n in lanes], dtype=torch.int32)
    return counts.cumsum(0, dtype=torch.int32), numbers, last
