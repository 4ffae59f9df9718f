"""`SlicedTransformersCache`: a transformers Cache for `model.generate` whose layers are slices of a `SlicedKVCache`.

Knows transformers' cache protocol and the public interface of `SlicedKVCache`; nothing of engines or backends.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ..cache import SlicedKVCache
from ..errors import BackendUnavailableError, ConfigError, OutOfPagesError, OutOfSlotsError, StateError

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise BackendUnavailableError("transformers is missing; pip install slicedkv[transformers]") from error

__all__ = ["SlicedTransformersCache"]


class SlicedTransformersCache(Cache):
    """Drop-in for `DynamicCache` over a `SlicedKVCache`.

    Row `i` of the model's batch is slot ``first + i``, so K and V go to attention as views ``[B, H, len, D]``, without
    a copy. Slots are taken at the first forward and given back by `reset` and `close`. Batches may be left-padded, as
    with `DynamicCache`. Beam search works and copies rows; the `batch_*` operations are refused.

    Parameters
    ----------
    cache : SlicedKVCache
        Stays the caller's: `close` here gives slots back and leaves it open.

    Notes
    -----
    Not thread-safe; waits for the GPU only where `SlicedKVCache.step` does.
    """

    def __init__(self, cache: SlicedKVCache) -> None:
        self.sliced = cache
        self._slots = range(0)
        self._unused: list[int] = []  # slots to be given back
        self._backed_len = 0
        self._closed = False
        super().__init__(layers=[_SliceLayer(self, index) for index in range(cache.layout.num_layers)])

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"slots [{self._slots.start}, {self._slots.stop})"
        return f"SlicedTransformersCache({state}, seq_len={self._backed_len})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise ConfigError("a SlicedTransformersCache cannot be copied; make a new one and run the shared prompt again")

    @property
    def batch_size(self) -> int:
        """Rows of the model's batch, -1 before the first forward."""
        return len(self._slots) or -1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append a layer's new K and V; return views of all."""
        if layer_idx >= len(self.layers):
            raise ConfigError(
                f"the model has a layer {layer_idx} and the cache {len(self.layers)} layers; open it with "
                "cache_for_model(model, ...)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def rows(self, tensor: Tensor, seq_len: int) -> Tensor:
        """Return this batch's rows ``[B, seq_len, H, D]`` of a layer slice, a view."""
        return tensor[self._slots.start : self._slots.stop, :seq_len]

    def back(self, batch_size: int, seq_len: int) -> None:
        """Make `seq_len` tokens of `batch_size` rows writable in every layer. The first layer of a forward pays.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError
            Memory or slots are short; what is cached stays valid.
        ConfigError
            The batch changed its size, or `seq_len` exceeds the cache's `max_seq_len`.
        StateError
            This object was closed.
        """
        if self._closed:
            raise StateError("this SlicedTransformersCache is closed; make a new one")
        if not batch_size:
            raise ConfigError("the batch has 0 rows; it needs at least one")
        if not self._slots:
            self._free_unused()
            try:
                self._slots = self._alloc_neighbours(batch_size)
            finally:
                self._free_unused()
        if batch_size != len(self._slots):
            raise ConfigError(
                f"the batch has {batch_size} rows, the cache holds {len(self._slots)}; call reset() first"
            )
        if seq_len > self._backed_len:
            self._step(seq_len)

    def _step(self, seq_len: int) -> None:
        seq_lens = dict.fromkeys(self._slots, seq_len)
        if not self.sliced.step(seq_lens):
            needed, available = self.sliced.pages_needed(seq_lens), self.sliced.pages_available()
            raise OutOfPagesError(
                f"{len(self._slots)} rows of {seq_len} tokens need {needed} more pages and {available} can be had; "
                "raise memory_limit, or use a smaller batch",
                requested=needed,
                available=available,
            )
        self._backed_len = seq_len

    def _step_back(self, seq_len: int) -> None:
        """Let the cache know that rows from `seq_len` on are written again: not where other requests share them.

        A row is the least it can be told.
        """
        if self._slots:
            self.sliced.step(dict.fromkeys(self._slots, max(1, seq_len)))

    def _alloc_neighbours(self, count: int) -> range:
        """Take `count` neighbouring slots; what was taken on the way there is given back."""
        held: set[int] = set()
        found = range(0)
        try:
            while not found:
                held.add(low := self.sliced.alloc_reqid())
                high = low + 1
                while low - 1 in held:
                    low -= 1
                while high in held:
                    high += 1
                if high - low >= count:
                    found = range(low, low + count)
        except OutOfSlotsError as error:
            message = f"a batch of {count} rows needs {count} neighbouring slots; raise max_batch_size or free requests"
            raise OutOfSlotsError(message, requested=count, available=len(held)) from error
        finally:
            self._unused += held.difference(found)
        return found

    def reset(self) -> None:
        """Forget all tokens and give the slots back. If that fails, another call gives back the rest."""
        self._unused += self._slots
        self._slots, self._backed_len = range(0), 0
        for layer in self.layers:
            layer.reset()
        self._free_unused()

    def _free_unused(self) -> None:
        while self._unused:
            self.sliced.free_reqid(self._unused[-1])
            self._unused.pop()

    def close(self) -> None:
        """Give the slots back for good. Another call does nothing, or gives back what could not be the first time."""
        self._closed = True
        self.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens; a positive value is the length to keep, as it once was.

        Pages stay mapped for the tokens to come.
        """
        super().crop(tokens_to_remove)
        self._backed_len = self.get_seq_length()
        self._step_back(self._backed_len)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row of the batch the tokens of row ``beam_idx[i]``.

        Raises
        ------
        OutOfPagesError
            Other requests share rows of these, and there is no memory for copies. Nothing was moved.
        """
        self._step_back(0)
        if self._backed_len:
            self._step(self._backed_len)
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: rows are slots, and their neighbours may be taken."""
        raise ConfigError(f"batch_repeat_interleave({repeats}): repeat the prompts before the first forward instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused: the kept rows would have to be neighbouring slots."""
        raise ConfigError("batch_select_indices: reset() this cache and run the kept prompts again instead")


class _SliceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `SlicedTransformersCache`: a length and two views."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: SlicedTransformersCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._index = index
        self._seq_len = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner, sliced = self._owner, self._owner.sliced
        batch_size, num_heads, q_len, head_dim = key_states.shape
        layout = sliced.layout
        if (num_heads, head_dim) != (layout.num_kv_heads, layout.head_dim):
            raise ConfigError(
                f"the model has {num_heads} KV heads of {head_dim}, the cache {layout.num_kv_heads} of "
                f"{layout.head_dim}; open it with cache_for_model(model, ...)"
            )
        if key_states.dtype != sliced.dtype:
            raise ConfigError(
                f"the model computes in {key_states.dtype}, the cache holds {sliced.dtype}; use one dtype"
            )
        seq_len = self._seq_len + q_len
        owner.back(batch_size, seq_len)
        views = []
        for tensor, new in ((sliced.k(self._index), key_states), (sliced.v(self._index), value_states)):
            view = owner.rows(tensor, seq_len).transpose(1, 2)
            view[:, :, self._seq_len :] = new
            views.append(view)
        self._seq_len = seq_len
        self.lazy_initialization(key_states, value_states)
        return views[0], views[1]

    def get_seq_length(self) -> int:
        return self._seq_len

    def get_max_length(self) -> int:
        return self._owner.sliced.layout.max_seq_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seq_len + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        keep = tokens_to_remove if tokens_to_remove > 0 else self._seq_len + tokens_to_remove
        self._seq_len = max(0, min(self._seq_len, keep))

    def reset(self) -> None:
        self._seq_len = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        sliced = self._owner.sliced
        for tensor in (sliced.k(self._index), sliced.v(self._index)):
            rows = self._owner.rows(tensor, self._seq_len)
            rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))
