"""Attention through `slicedkv.triton_kernels`: append, split-KV decode and prefill over slices of any layout and dtype.

A step's leading lanes decode, the others prefill, with one launch for each kind of work and layer. One small copy a
step tells the device what kernels need to know of a batch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_int
from ..errors import ConfigError
from ..triton_kernels import append_kv, decode_attention, decode_workspace_numel, prefill_attention
from ..triton_kernels.checks import E4M3_CAPABILITY, FLOAT8_DTYPES, FLOAT_DTYPES, MAX_HEAD_DIM, ceil_div, interpreted
from ..triton_kernels.decode_plan import MAX_ROWS
from .base import KV, AttentionBackend, KVSource, LayerKind
from .batch import Batch, Lane

__all__ = ["TritonBackend"]

_EVEN = 1.25
"""Requests count as equally long while the longest has at most this many times their mean length."""


class TritonBackend(AttentionBackend):
    """Triton backend; see `AttentionBackend`.

    Parameters
    ----------
    window : int, optional
        How many tokens a token sees, itself included; needs `causal`.
    soft_cap : float, optional
        Scores s become ``soft_cap * tanh(s / soft_cap)``.
    k_scale, v_scale : float, optional
        For a float8 cache: kernels multiply the cached values by it, and divide new K and V by it.
    """

    name: ClassVar[str] = "triton"
    fills_padding: ClassVar[bool] = True
    features: ClassVar[frozenset[str]] = frozenset(LayerKind._fields)

    def __init__(
        self,
        cache: KVSource,
        *,
        num_qo_heads: int,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        super().__init__(cache, num_qo_heads=num_qo_heads, scale=scale, causal=causal)
        self.window = None if window is None else check_int("window", window, 1)
        if window is not None and not causal:
            raise ConfigError(f"window is {window} without causal; a window reaches back from a token")
        if self.dtype not in FLOAT8_DTYPES and not k_scale is v_scale is None:
            raise ConfigError(f"k_scale is {k_scale} and v_scale {v_scale}; they go with float8 caches only")
        for option, value in (("soft_cap", soft_cap), ("k_scale", k_scale), ("v_scale", v_scale)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{option} is {value}; it must be positive and finite")
        self.soft_cap, self.k_scale, self.v_scale = soft_cap, k_scale, v_scale
        self._graph_index: Tensor | None = None
        self._workspaces: dict[tuple[int, int | None], Tensor] = {}  # by captured lanes and window
        self._planned: dict[int | None, Tensor | None] = {}  # of the plan, by window
        self._decode_lanes = self._decode_q_len = self._max_q_len = self._longest = 0
        self._graph = self._uneven = False
        self._cu_q_lens: Tensor | None = None
        self._reqids = self._seq_lens = self._prefill_cu = torch.empty(0, dtype=torch.int32, device="cpu")

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None, or the reason: no GPU, too old a GPU for the dtype, an odd head dimension."""
        if dtype not in FLOAT_DTYPES + FLOAT8_DTYPES:
            return f"no kernel reads {dtype}"
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            return f"head_dim is {head_dim}; kernels need a multiple of 16, at most {MAX_HEAD_DIM}"
        if device.type != "cuda":
            return None if interpreted() else "needs an NVIDIA GPU"
        if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
            return "float8_e4m3fn needs compute capability 8.9"
        return None

    @property
    def captures(self) -> bool:
        """True on a GPU: launches depend on shapes alone, and buffers stay in place."""
        return self.device.type == "cuda"

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:
        count = len(batch.reqids)
        each = batch.q_lens[0] if count else 0
        # Decode takes the query rows of a KV head in one tile. Lanes with more rows are prefill's.
        fits = each * self.group_size <= MAX_ROWS and (self.causal or each == 1)
        if each and fits and batch.q_lens.count(each) == count:
            self._decode_lanes, self._decode_q_len = count, each
        else:
            self._decode_q_len = 1
            self._decode_lanes = next((lane for lane, q_len in enumerate(batch.q_lens) if q_len != 1), count)
        self._upload(batch, graph=graph)
        decoding = slice(0, self._decode_lanes)
        self._max_q_len = max(batch.q_lens[self._decode_lanes :], default=0)
        # A captured launch must suit every length to come; others get a bound that seldom changes.
        lens = batch.seq_lens[decoding]
        longest = max((1, *lens))
        self._longest = self.max_seq_len if graph else _rounded(longest)
        self._uneven = graph or longest * len(lens) > _EVEN * sum(lens)
        self._graph = graph
        self._planned.clear()

    def _upload(self, batch: Batch, *, graph: bool) -> None:
        """Bring reqids, lengths and ends of lanes to the device, for graphs to the place they were captured with."""
        lanes, ends = len(batch.reqids), batch.cu_q_lens
        first = ends[self._decode_lanes]
        values = [*batch.reqids, *batch.seq_lens, *ends, *(end - first for end in ends[self._decode_lanes :])]
        index = torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        if graph:
            if self._graph_index is None:
                self._graph_index = self._kept(3 * self.max_batch_size + 2, torch.int32)
            index = self._graph_index[: len(values)].copy_(index, non_blocking=True)
        else:
            index = index.to(self.device, non_blocking=True)
        self._reqids, self._seq_lens = index[:lanes], index[lanes : 2 * lanes]
        one_each = batch.q_lens.count(1) == lanes
        self._cu_q_lens = None if one_each else index[2 * lanes : 3 * lanes + 1]
        self._prefill_cu = index[3 * lanes + 1 :]

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self.dtype in FLOAT8_DTYPES:
            k, v = (rows if rows.dtype in (*FLOAT_DTYPES, self.dtype) else rows.float() for rows in (k, v))
        lanes = (self._reqids, self._cu_q_lens, self._seq_lens)
        k_cache, v_cache = self._look_up(layer)
        append_kv(k, v, k_cache, v_cache, *lanes, k_scale=self.k_scale, v_scale=self.v_scale)

    def _run(self, layer: int, q: Tensor, out: Tensor, kind: LayerKind) -> None:
        rows = self._decode_lanes * self._decode_q_len
        cached = self._take_rows(layer)
        kind = LayerKind(kind.window or self.window, kind.soft_cap or self.soft_cap, kind.sinks)
        if rows:
            self._run_decode(layer, q[:rows], cached, out[:rows], kind)
        if rows < len(q):
            self._run_prefill(layer, q[rows:], cached, out[rows:], kind)

    def _run_decode(self, layer: int, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        shape: dict[str, Any] = {
            "q_len": self._decode_q_len, "window": kind.window, "max_seq_len": self._longest, "uneven": self._uneven
        }  # fmt: skip
        if kind.window not in self._planned:  # of one size for all layers with this window
            self._planned[kind.window] = self._find_workspace(q, cached, shape)
        k, v = cached
        found = decode_attention(
            q, k, v, self._reqids[: self._decode_lanes], self._seq_lens[: self._decode_lanes],
            workspace=self._planned[kind.window], out=out, **self._options(kind), **shape,
        )  # fmt: skip
        _sink(found, kind)

    def _run_prefill(self, layer: int, q: Tensor, cached: KV, out: Tensor, kind: LayerKind) -> None:
        lanes = slice(self._decode_lanes, None)
        self._prefill(
            q, cached, (self._reqids[lanes], self._prefill_cu, self._seq_lens[lanes]), self._max_q_len, out, kind
        )

    def _prefill(
        self, q: Tensor, cached: KV, lanes: tuple[Tensor, ...], max_q_len: int, out: Tensor, kind: LayerKind
    ) -> None:
        """One launch of the prefill kernel; `lanes` are reqids, ends of their rows in `q`, and lengths."""
        found = prefill_attention(
            q, *cached, *lanes, causal=self.causal, window=kind.window, max_q_len=max_q_len, out=out,
            **self._options(kind),
        )  # fmt: skip
        _sink(found, kind)

    def _options(self, kind: LayerKind) -> dict[str, Any]:
        return {
            "scale": self.scale, "soft_cap": kind.soft_cap, "k_scale": self.k_scale, "v_scale": self.v_scale,
            "return_lse": kind.sinks is not None,
        }  # fmt: skip

    def _find_workspace(self, q: Tensor, cached: KV, shape: dict[str, Any]) -> Tensor | None:
        """Room for the parts of a split, kept: one for all steps, and one for each captured number of lanes."""
        needed = decode_workspace_numel(q, *cached, **shape)
        if not needed:
            return None
        key = len(q) if self._graph else 0, shape["window"]
        if key not in self._workspaces or self._workspaces[key].numel() < needed:
            self._workspaces[key] = self._kept(needed, torch.float32)
        return self._workspaces[key]

    def _kept(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer that outlives its step, and may be written in and outside inference mode."""
        with torch.inference_mode(False):
            return torch.empty(length, dtype=dtype, device=self.device)


def _sink(found: Tensor | tuple[Tensor, Tensor], kind: LayerKind) -> None:
    """Give the sinks their part of each row's softmax: the result shrinks by what they take."""
    if kind.sinks is None:
        return
    out, lse = found
    out.mul_(torch.sigmoid(lse - kind.sinks.to(lse.dtype))[..., None].to(out.dtype))


def _rounded(length: int) -> int:
    """Return a length rounded up by at most an eighth, so that few lengths lead to choices of their own."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    return ceil_div(length, step) * step
