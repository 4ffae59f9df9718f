"""What every attention backend shares: the `AttentionBackend` contract and its checks.

A backend reads and writes layer slices through `KVSource` and knows nothing of pages, drivers, slots' states or the
scheduler. It trusts its caller that `step` has backed every row a batch names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import check_int
from ..errors import ConfigError, StateError
from .batch import PADDED, Batch, Lane
from .gradients import refuse_backward, wants_gradient

__all__ = [
    "FLOAT8_DTYPES",
    "FLOAT_DTYPES",
    "KV",
    "PLAIN",
    "AttentionBackend",
    "KVSource",
    "LayerKind",
    "is_hopper",
    "missing_for_half",
]

KV = tuple[Tensor, Tensor]
"""K and V of one layer, each ``[B, L, H, D]``."""


class LayerKind(NamedTuple):
    """What a layer's attention has beside causal attention over all tokens.

    Attributes
    ----------
    window : int or None
        How many tokens a token sees, itself included.
    soft_cap : float or None
        Scores s become ``soft_cap * tanh(s / soft_cap)``.
    sinks : Tensor or None
        ``[num_qo_heads]``: a score for each head that takes part in the softmax and adds nothing to the result.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


PLAIN = LayerKind()

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVSource(Protocol):
    """Anything with layer slices; `SlicedKVCache` is one.

    A source may be closed: its `closed` is true then, and both calls raise. One whose `debug` is true also has
    `check_writable(reqids, starts, ends)`, which raises `StateError` when one of the requests must not be written in
    its rows ``[start, end)`` now.
    """

    def k(self, layer: int) -> Tensor:
        """Return K of `layer` as a ``[B, L, H, D]`` view."""
        ...

    def v(self, layer: int) -> Tensor:
        """Return V of `layer` as a ``[B, L, H, D]`` view."""
        ...


def is_hopper(device: torch.device) -> bool:
    """Return whether this is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


def missing_for_half(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels for 16-bit floats on Ampere and newer cannot run there, or None."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0"
    return None if dtype in (torch.float16, torch.bfloat16) else f"has no kernels for {dtype}"


class AttentionBackend(ABC):
    """Appends K and V to a cache and attends over it. `plan` once a step, then `append` and `run` for every layer.

    Use it from one thread. No call waits for the GPU unless a backend says so. Each call checks its arguments before it
    writes. No gradient is recorded: `backward` through a result raises `StateError`.

    Parameters
    ----------
    cache : KVSource
        Where K and V live.
    num_qo_heads : int
        Query heads, a multiple of the cache's KV heads.
    scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` by default.
    causal : bool
        A token sees only itself and the tokens before it. The last new token is the last of its request ("lower
        right").

    Raises
    ------
    ConfigError
        An argument does not fit the cache.
    BackendUnavailableError
        See `open_backend`. A constructor itself does not probe the machine.
    """

    name: ClassVar[str]
    fills_padding: ClassVar[bool] = False
    """Whether `_run` itself writes the zeros of padded lanes."""
    features: ClassVar[frozenset[str]] = frozenset()
    """The fields of `LayerKind` that `run` can take."""

    def __init__(self, cache: KVSource, *, num_qo_heads: int, scale: float | None = None, causal: bool = True) -> None:
        first = cache.k(0)
        self.cache = cache
        self.max_batch_size, self.max_seq_len, self.num_kv_heads, self.head_dim = first.shape
        self.dtype, self.device = first.dtype, first.device
        self.num_qo_heads = check_int("num_qo_heads", num_qo_heads, 1)
        if self.num_qo_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_qo_heads is {num_qo_heads}; it must be a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else float(scale)
        self.causal = causal
        self._batch: Batch | None = None
        self._lanes: list[Lane] = []
        self._padding: list[tuple[int, int]] = []
        self._total_q = 0
        self._written: dict[int, tuple[Tensor, ...]] = {}  # rows that require gradients, until their layer has run
        self._found: tuple[int, Tensor, Tensor] | None = None  # what `append` looked up, for the `run` that follows
        self._checks_rows = bool(getattr(cache, "debug", False))
        self._unchecked: list[Lane] = []

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None when this backend can run there, else the reason why not."""

    @property
    def captures(self) -> bool:
        """Whether `append` and `run` of a decode step may be captured in a CUDA graph; see `plan`."""
        return False

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def plan(self, batch: Batch, *, graph: bool = False) -> None:
        """Prepare for one step. A plan serves all layers until the next one.

        Parameters
        ----------
        batch : Batch
        graph : bool
            The caller captures the step's `append` and `run` in a CUDA graph on the current stream, or replays a graph
            that it captured after a `plan` of as many lanes. Each lane must have one token. Rows of padded lanes may
            hold anything finite.

        Raises
        ------
        ConfigError
            A reqid or length does not fit the cache, or the batch does not fit a graph. The former plan stays; after
            any other failure there is no plan.
        StateError
            With `graph`, over a cache with `debug`: as `append`, which a replay does not call. The former plan stays.
        """
        self._check_batch(batch)
        if graph:
            self._check_graph(batch)
        lanes = batch.lanes()
        if graph and self._checks_rows:
            self._check_rows(lanes)
        self._batch = None  # from here on, what is prepared is not the former plan's any more
        self._written.clear()
        self._found = None
        self._plan(batch, lanes, graph=graph)
        self._batch, self._lanes, self._total_q = batch, lanes, batch.total_q
        self._unchecked = lanes if self._checks_rows and not graph else []
        spans = () if graph or self.fills_padding else zip(batch.reqids, pairwise(batch.cu_q_lens), strict=True)
        self._padding = [(begin, end) for reqid, (begin, end) in spans if reqid == PADDED]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the new tokens' K and V into `layer`.

        Parameters
        ----------
        layer : int
        k, v : Tensor
            ``[total_q, H, D]`` on the cache's device, of its dtype; for a float8 cache, of any floating dtype, which is
            rounded to nearest. Any strides; rows are copied first if the last dimension is not contiguous.

        Raises
        ------
        ConfigError
            Shape, dtype or device do not fit. Nothing was written.
        StateError
            `plan` was never called, or it failed. Over a cache with `debug`: rows are not backed, or lie in pages that
            other requests share; a plan's first `append` checks this. Nothing was written.
        """
        for name, tensor in (("k", k), ("v", v)):
            self._check(name, tensor, self.num_kv_heads)
        if self._unchecked:
            self._check_rows(self._unchecked)
            self._unchecked = []
        if wants_gradient(k, v):
            self._append(layer, _contiguous(k.detach()), _contiguous(v.detach()))
            self._written[layer] = k, v
        else:
            self._append(layer, _contiguous(k), _contiguous(v))

    def run(
        self,
        layer: int,
        q: Tensor,
        out: Tensor | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the new tokens to all tokens of their requests in `layer`.

        Parameters
        ----------
        layer : int
        q : Tensor
            ``[total_q, num_qo_heads, D]``; device, dtype and strides as for `append`, but float32, float16 or bfloat16
            over a float8 cache.
        out : Tensor, optional
            Where to write: shape, dtype and device of `q`, last dimension contiguous. Rows of padded lanes become
            zeros.
        window, soft_cap, sinks
            See `LayerKind`; for a backend that has them among its `features`.

        Returns
        -------
        Tensor
            `out`, or a new tensor like `q`.

        Raises
        ------
        ConfigError, StateError
            As `append`; the backend lacks a feature. Or `out` is given and an input requires a gradient, which torch's
            own functions refuse, too.
        """
        self._check("q", q, self.num_qo_heads)
        if out is not None:
            self._check_out(out, q)
        is_plain = window is None and soft_cap is None and sinks is None
        kind = PLAIN if is_plain else self._check_kind(LayerKind(window, soft_cap, sinks))
        sources = (q, *self._written.get(layer, ()))
        differentiated = wants_gradient(*sources)
        if differentiated and out is not None:
            raise StateError(
                f"out is given for layer {layer}, and q, or K or V that were appended, require gradients: use "
                "torch.no_grad(), or leave out= away"
            )
        if self._padding:
            self.cache.k(layer)  # refuses a layer that is not there before anything is written
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for begin, end in self._padding:
            out[begin:end].zero_()
        self._run(layer, _contiguous(q.detach() if differentiated else q), out, kind)
        self._written.pop(layer, None)
        return refuse_backward(out, *sources) if differentiated else out

    def _check_kind(self, kind: LayerKind) -> LayerKind:
        for name, value in kind._asdict().items():
            if value is not None and name not in self.features:
                able = "'triton', 'sdpa' and 'reference'"
                raise ConfigError(f"a layer has {name}, and backend {self.name!r} has not; backends {able} have")
        if kind.window is not None:
            check_int("window", kind.window, 1)
            if not self.causal:
                raise ConfigError(f"window is {kind.window} without causal; a window reaches back from a token")
        if kind.soft_cap is not None and not 0 < kind.soft_cap < math.inf:
            raise ConfigError(f"soft_cap is {kind.soft_cap}; it must be positive and finite")
        if kind.sinks is not None and (kind.sinks.shape != (self.num_qo_heads,) or kind.sinks.device != self.device):
            raise ConfigError(
                f"sinks has shape {tuple(kind.sinks.shape)} on {kind.sinks.device}; it must be ({self.num_qo_heads},) "
                f"on {self.device}"
            )
        return kind

    def _check_out(self, out: Tensor, q: Tensor) -> None:
        self._check("out", out, self.num_qo_heads)
        if out.dtype != q.dtype:
            raise ConfigError(f"out is {out.dtype} and q {q.dtype}; they must have one dtype")
        if out.shape[-1] > 1 and out.stride(-1) != 1:
            raise ConfigError(f"out has strides {out.stride()}; its last dimension must be contiguous")

    def _check(self, name: str, tensor: Tensor, num_heads: int) -> None:
        if self._batch is None:
            raise StateError(f"backend {self.name!r} has no plan; call plan(batch) once before the layers of a step")
        expected = (self._total_q, num_heads, self.head_dim)
        if tuple(tensor.shape) != expected:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; the planned batch needs {expected}")
        if self.dtype in FLOAT8_DTYPES:
            fits = tensor.dtype in FLOAT_DTYPES or (name in ("k", "v") and tensor.dtype.is_floating_point)
        else:
            fits = tensor.dtype == self.dtype
        if not fits:
            raise ConfigError(f"{name} is {tensor.dtype}; it does not go with a cache of {self.dtype}")
        if tensor.device != self.device:
            raise ConfigError(f"{name} is on {tensor.device}; the cache is on {self.device}")

    def _check_batch(self, batch: Batch) -> None:
        if max(batch.reqids, default=0) < self.max_batch_size and max(batch.seq_lens, default=0) <= self.max_seq_len:
            return
        for reqid, seq_len in zip(batch.reqids, batch.seq_lens, strict=True):
            check_int("reqid", reqid, PADDED, self.max_batch_size - 1)
            check_int(f"seq_len of reqid {reqid}", seq_len, 0, self.max_seq_len)

    def _check_rows(self, lanes: Sequence[Lane]) -> None:
        """Ask the cache whether the new tokens of these lanes may be written."""
        columns = ([lane.reqid for lane in lanes], [lane.past_len for lane in lanes], [lane.seq_len for lane in lanes])
        self.cache.check_writable(*columns)  # type: ignore[attr-defined]

    def _check_graph(self, batch: Batch) -> None:
        if not self.captures:
            raise ConfigError(f"backend {self.name!r} cannot be captured in a CUDA graph; plan without graph")
        if batch.total_q != len(batch.reqids) or len(batch.reqids) > self.max_batch_size:
            raise ConfigError(
                f"a batch of {len(batch.reqids)} lanes and {batch.total_q} tokens is planned for a graph; it needs one "
                f"token a lane, and at most {self.max_batch_size} lanes"
            )

    def _plan(self, batch: Batch, lanes: list[Lane], *, graph: bool) -> None:  # noqa: B027
        """Prepare more than the lanes, for backends that need to; if it fails there is no plan."""

    def _look_up(self, layer: int) -> KV:
        """K and V of a layer, kept for the `run` that follows: a view costs the host some microseconds."""
        k, v = self.cache.k(layer), self.cache.v(layer)
        self._found = (layer, k, v)
        return k, v

    def _take_rows(self, layer: int) -> KV:
        """K and V of a layer, for `run`."""
        found, self._found = self._found, None
        if found is None or found[0] != layer or getattr(self.cache, "closed", False):
            return self.cache.k(layer), self.cache.v(layer)
        return found[1], found[2]

    @abstractmethod
    def _append(self, layer: int, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def _run(self, layer: int, q: Tensor, out: Tensor, kind: LayerKind) -> None:
        """Fill the rows of real lanes of `out`; `run` has zeroed the others."""


def _contiguous(rows: Tensor) -> Tensor:
    """Return rows whose last dimension is contiguous, as kernels load several of its elements at a time."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
