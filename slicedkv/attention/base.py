"""What every attention backend shares: the `Batch` of one step, the `AttentionBackend` contract and its checks.

A backend reads and writes layer slices through `KVSource` and knows nothing of pages, drivers, slots' states or the
scheduler. It trusts its caller that `step` has backed every row a batch names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import check_int
from ..errors import ConfigError, StateError

__all__ = ["FLOAT8_DTYPES", "PADDED", "AttentionBackend", "Batch", "KVSource", "Lane"]

PADDED = -1
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVSource(Protocol):
    """Anything with layer slices; `SlicedKVCache` is one."""

    def k(self, layer: int) -> Tensor:
        """Return K of `layer` as a ``[B, L, H, D]`` view."""
        ...

    def v(self, layer: int) -> Tensor:
        """Return V of `layer` as a ``[B, L, H, D]`` view."""
        ...


class Lane(NamedTuple):
    """One request of a batch: its slot, the packed rows ``[begin, end)`` it owns, and its length with them."""

    reqid: int
    begin: int
    end: int
    seq_len: int

    @property
    def q_len(self) -> int:
        """Number of new tokens."""
        return self.end - self.begin

    @property
    def past_len(self) -> int:
        """Number of tokens before the new ones: the position of the first new one."""
        return self.seq_len - self.q_len


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: prefill, chunks of prefill and decode mixed, packed in request order.

    Attributes
    ----------
    reqids : tuple of int
        Slot of each lane; -1 is a padded lane, which reads and writes nothing and whose output is zeros.
    q_lens : tuple of int
        New tokens of each lane, possibly 0. They are the last `q_lens[i]` tokens of the request.
    seq_lens : tuple of int
        Length of each request, the new tokens included; ignored for a padded lane.

    Raises
    ------
    ConfigError
        The three differ in length, a value is out of range, or a reqid occurs twice.
    """

    reqids: tuple[int, ...]
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def __init__(self, reqids: Sequence[int], q_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        if not len(reqids) == len(q_lens) == len(seq_lens):
            raise ConfigError(
                f"reqids, q_lens and seq_lens have lengths {len(reqids)}, {len(q_lens)} and {len(seq_lens)}; "
                "they must be equal"
            )
        object.__setattr__(self, "reqids", tuple(check_int("reqid", reqid, PADDED) for reqid in reqids))
        object.__setattr__(self, "q_lens", tuple(check_int("q_len", q_len, 0) for q_len in q_lens))
        object.__setattr__(self, "seq_lens", tuple(check_int("seq_len", seq_len, 0) for seq_len in seq_lens))
        seen: set[int] = set()
        for reqid, q_len, seq_len in zip(self.reqids, self.q_lens, self.seq_lens, strict=True):
            if reqid == PADDED:
                continue
            if reqid in seen:
                raise ConfigError(f"reqid {reqid} occurs twice in a batch; give each request one lane")
            if q_len > seq_len:
                raise ConfigError(f"q_len is {q_len} and seq_len {seq_len} for reqid {reqid}; q_len must be <= seq_len")
            seen.add(reqid)

    @property
    def total_q(self) -> int:
        """Number of packed rows."""
        return sum(self.q_lens)

    @property
    def cu_q_lens(self) -> tuple[int, ...]:
        """First packed row of each lane and, last, `total_q`."""
        return tuple(accumulate(self.q_lens, initial=0))

    def lanes(self) -> list[Lane]:
        """Return the lanes that have something to do: a real request and at least one new token."""
        ends = accumulate(self.q_lens)
        return [
            Lane(reqid, end - q_len, end, seq_len)
            for reqid, q_len, seq_len, end in zip(self.reqids, self.q_lens, self.seq_lens, ends, strict=True)
            if reqid != PADDED and q_len
        ]

    def positions(self) -> list[int]:
        """Return each packed row's position in its request; 0 in padded lanes."""
        positions: list[int] = []
        for reqid, q_len, seq_len in zip(self.reqids, self.q_lens, self.seq_lens, strict=True):
            positions += [0] * q_len if reqid == PADDED else range(seq_len - q_len, seq_len)
        return positions


class AttentionBackend(ABC):
    """Appends K and V to a cache and attends over it. `plan` once a step, then `append` and `run` for every layer.

    Calls belong to one thread. Nothing here synchronises with the GPU unless a backend says so. Every argument is
    checked before the first write.

    Parameters
    ----------
    cache : KVSource
        Where K and V live.
    num_qo_heads : int
        Query heads, a multiple of the cache's KV heads.
    scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` by default.
    causal : bool
        Whether a token sees only itself and what is before it. The last new token always is the last of its request
        ("lower right").

    Raises
    ------
    ConfigError
        An argument does not fit the cache.
    BackendUnavailableError
        See `open_backend`; constructors themselves do not probe the machine.
    """

    name: ClassVar[str]

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

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None when this backend can run there, else the reason why not."""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def plan(self, batch: Batch) -> None:
        """Prepare for one step; serves all layers until the next `plan`.

        Raises
        ------
        ConfigError
            A reqid or length does not fit the cache; the former plan stays.
        """
        for lane in batch.lanes():
            check_int("reqid", lane.reqid, PADDED, self.max_batch_size - 1)
            check_int(f"seq_len of reqid {lane.reqid}", lane.seq_len, 0, self.max_seq_len)
        self._plan(batch)
        self._batch, self._lanes, self._total_q = batch, batch.lanes(), batch.total_q
        spans = zip(batch.reqids, batch.cu_q_lens, batch.cu_q_lens[1:], strict=False)
        self._padding = [(begin, end) for reqid, begin, end in spans if reqid == PADDED]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the new tokens' K and V into `layer`.

        Parameters
        ----------
        layer : int
        k, v : Tensor
            ``[total_q, H, D]`` of the cache's dtype (any floating dtype for a float8 cache: rounded by a torch cast)
            on its device, in any strides.

        Raises
        ------
        ConfigError
            Shape, dtype or device do not fit. Nothing was written.
        StateError
            `plan` was never called.
        """
        for name, tensor in (("k", k), ("v", v)):
            self._check(name, tensor, self.num_kv_heads)
        self._append(layer, k, v)

    def run(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Attend from the new tokens to all tokens of their requests in `layer`.

        Parameters
        ----------
        layer : int
        q : Tensor
            ``[total_q, num_qo_heads, D]``, dtype and device as for `append`.
        out : Tensor, optional
            Where to write; same shape, dtype and device as `q`. Rows of padded lanes become zeros.

        Returns
        -------
        Tensor
            `out`, or a new tensor like `q`.

        Raises
        ------
        ConfigError, StateError
            As `append`.
        """
        self._check("q", q, self.num_qo_heads)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        else:
            self._check("out", out, self.num_qo_heads)
            if out.dtype != q.dtype:
                raise ConfigError(f"out is {out.dtype} and q {q.dtype}; they must have one dtype")
        for begin, end in self._padding:
            out[begin:end].zero_()
        self._run(layer, q, out)
        return out

    def _check(self, name: str, tensor: Tensor, num_heads: int) -> None:
        if self._batch is None:
            raise StateError(f"backend {self.name!r} has no plan; call plan(batch) once before the layers of a step")
        expected = (self._total_q, num_heads, self.head_dim)
        if tuple(tensor.shape) != expected:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; the planned batch needs {expected}")
        if self.dtype in FLOAT8_DTYPES:
            fits = tensor.dtype.is_floating_point and (name != "q" or tensor.dtype.itemsize > 1)
        else:
            fits = tensor.dtype == self.dtype
        if not fits:
            raise ConfigError(f"{name} is {tensor.dtype}; it does not go with a cache of {self.dtype}")
        if tensor.device != self.device:
            raise ConfigError(f"{name} is on {tensor.device}; the cache is on {self.device}")

    def _plan(self, batch: Batch) -> None:  # noqa: B027
        """Prepare more than the lanes, for backends that need to; on failure `plan` keeps the former batch."""

    @abstractmethod
    def _append(self, layer: int, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def _run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Fill the rows of real lanes of `out`; `run` has zeroed the others."""
