"""`SlicedTransformersCache`: a transformers Cache for `model.generate` whose layers are slices of a `SlicedKVCache`.

Knows transformers' cache protocol and `BatchRows`, the slots of a batch; nothing of engines or backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor

from ..attention.gradients import refuse_backward, wants_gradient
from ..cache import SlicedKVCache
from ..checks import check_int
from ..errors import BackendUnavailableError, ConfigError
from .batch_rows import BatchRows

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise BackendUnavailableError("transformers is missing; pip install slicedkv[transformers]") from error

__all__ = ["SlicedTransformersCache"]


class SlicedTransformersCache(Cache):
    """Drop-in for `DynamicCache` over a `SlicedKVCache`.

    Row `i` of the model's batch is slot ``first + i``, so attention gets K and V as views ``[B, H, len, D]``, without a
    copy. The first forward takes the slots; `reset` and `close` give them back. If the object is dropped instead, the
    next one that needs slots gives them back. Batches may be left-padded, as with `DynamicCache`.

    Beam search copies rows. `copy.deepcopy` and a larger batch share pages, in slots of their own. No row is part of
    torch's graph: `backward` through what `update` returns raises `StateError`.

    Parameters
    ----------
    cache : SlicedKVCache
        It stays the caller's: `close` gives slots back and leaves it open.

    Notes
    -----
    Not thread-safe. It waits for the GPU where `SlicedKVCache.step` does, and to read which rows to select.
    """

    def __init__(self, cache: SlicedKVCache) -> None:
        self.sliced = cache
        self._rows = BatchRows(cache)
        super().__init__(layers=[_SliceLayer(self._rows, index) for index in range(cache.layout.num_layers)])

    def __repr__(self) -> str:
        rows = self._rows
        state = "closed" if rows.closed else f"slots [{rows.slots.start}, {rows.slots.stop})"
        return f"SlicedTransformersCache({state}, seq_len={rows.backed_len})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Yield K, V and None for each layer, as `DynamicCache` does."""
        for layer in self._slices:
            yield layer.keys, layer.values, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another cache over the same `SlicedKVCache`, with slots of its own that share this one's pages."""
        twin = memo[id(self)] = type(self)(self.sliced)
        twin._rows = self._rows.fork()
        twin.layers = [layer.over(twin._rows) for layer in self._slices]
        return twin

    @property
    def _slices(self) -> list[_SliceLayer]:
        return cast("list[_SliceLayer]", self.layers)

    @property
    def batch_size(self) -> int:
        """Rows of the model's batch, -1 before the first forward."""
        return len(self._rows.slots) or -1

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
        return self._rows.view(tensor, seq_len)

    def back(self, batch_size: int, seq_len: int) -> None:
        """Make `seq_len` tokens of `batch_size` rows writable in every layer. Only a forward's first layer has work.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError
            Memory or slots are short; what is cached stays valid.
        ConfigError
            The batch changed its size, or `seq_len` exceeds the cache's `max_seq_len`.
        StateError
            This object was closed.
        """
        self._rows.back(batch_size, seq_len)

    def reset(self) -> None:
        """Forget all tokens and give the slots back. After a failure, another call gives back the rest."""
        for layer in self.layers:
            layer.reset()
        self._rows.free()

    def close(self) -> None:
        """Give the slots back for good. A second call does nothing, or gives back what the first could not."""
        self._rows.closed = True
        self.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens. A positive value is the length to keep, as in older versions.

        Pages stay mapped for later tokens.
        """
        self._rows.crop(_kept(self.get_seq_length(), tokens_to_remove))
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row `i` of the batch the tokens of row ``beam_idx[i]``; there may be more or fewer rows than before.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError
            Other requests share these rows and there is no memory for copies, or slots are short. Nothing was moved.
        """
        if len(beam_idx) != self.batch_size or not self._rows.in_place:
            self._select(lambda rows: rows.index_select(0, beam_idx.cpu()))
        elif self._rows.backed_len:
            self._rows.rewrite(self._rows.slots)
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch. The new rows share the old ones' pages.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError
            Memory or slots are short. Nothing was changed.
        ConfigError
            `repeats` is less than 1.
        """
        check_int("repeats", repeats, 1)
        self._select(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order. `indices` are numbers, or a mask.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError, ConfigError
            As `reorder_cache`; no row is to be kept.
        """
        self._select(lambda rows: rows[indices.cpu()])

    def _select(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Keep the rows that `choose` picks, in its order. It gets the numbers of the present rows."""
        rows = self._rows
        if rows.backed_len:
            rows.select(choose(torch.arange(len(rows.slots), device="cpu")).tolist())
        else:  # none has tokens: the next forward says how many there are
            self.reset()


class _SliceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `SlicedTransformersCache`: a length, and views of the batch's rows."""

    is_croppable = True
    is_sliding = False

    def __init__(self, rows: BatchRows, index: int, seq_len: int = 0) -> None:
        # Does not call the base's, which sets `keys` and `values`.
        self._rows = rows
        self._index = index
        self._seq_len = seq_len
        self.is_initialized = seq_len > 0

    def over(self, rows: BatchRows) -> _SliceLayer:
        """Return the same layer of a copy."""
        return _SliceLayer(rows, self._index, self._seq_len)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K of all tokens, ``[B, H, len, D]``, a view; None before the first forward."""
        return self._seen(self._rows.sliced.k(self._index)) if self._rows.slots else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """V of all tokens, as `keys`."""
        return self._seen(self._rows.sliced.v(self._index)) if self._rows.slots else None

    def _seen(self, tensor: Tensor) -> Tensor:
        return self._rows.view(tensor, self._seq_len).transpose(1, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sliced, begin = self._rows.sliced, self._seq_len
        self._check(key_states, value_states)
        self._rows.back(len(key_states), begin + key_states.shape[2])
        self._seq_len += key_states.shape[2]
        self.lazy_initialization(key_states, value_states)
        views = []
        for tensor, new in ((sliced.k(self._index), key_states), (sliced.v(self._index), value_states)):
            view = self._seen(tensor)
            view[:, :, begin:] = new.detach()
            views.append(refuse_backward(view.detach(), new) if wants_gradient(new) else view)
        return views[0], views[1]

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse what does not fit before anything changes: writing would broadcast it in silence."""
        sliced, layout = self._rows.sliced, self._rows.sliced.layout
        for name, states in (("K", key_states), ("V", value_states)):
            if states.dim() != 4 or (states.shape[1], states.shape[3]) != (layout.num_kv_heads, layout.head_dim):
                raise ConfigError(
                    f"the model's {name} is {list(states.shape)}, and the cache has rows of {layout.num_kv_heads} KV "
                    f"heads of {layout.head_dim}; open it with cache_for_model(model, ...)"
                )
            if states.dtype != sliced.dtype or states.device != sliced.device:
                raise ConfigError(
                    f"the model computes {name} in {states.dtype} on {states.device}, the cache holds {sliced.dtype} "
                    f"on {sliced.device}; they must be the same"
                )
        if key_states.shape != value_states.shape:
            raise ConfigError(f"K is {list(key_states.shape)} and V {list(value_states.shape)}; they must be alike")

    def get_seq_length(self) -> int:
        return self._seq_len

    def get_max_length(self) -> int:
        return self._rows.sliced.layout.max_seq_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seq_len + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        self._seq_len = _kept(self._seq_len, tokens_to_remove)

    def reset(self) -> None:
        self._seq_len = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self.keys, self.values):
            if states is not None:
                states.copy_(states.index_select(0, beam_idx.to(states.device)))


def _kept(seq_len: int, tokens_to_remove: int) -> int:
    """Return the tokens that a crop leaves of `seq_len`."""
    keep = tokens_to_remove if tokens_to_remove > 0 else seq_len + tokens_to_remove
    return max(0, min(seq_len, keep))
