"""Lengths of all slots as vectors: what `step` is told, compared with what is mapped, without a Python loop over B.

Knows torch (CPU vectors only) and token counts; neither pages, drivers nor states of slots. Not thread-safe: the cache
calls it with its gate's lock held.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from .checks import check_int
from .errors import ConfigError

__all__ = ["LengthTable", "SeqLens", "parse_seq_lens"]

SeqLens: TypeAlias = "Mapping[int, int] | Sequence[int] | torch.Tensor"
"""``{reqid: len}``, or `max_batch_size` lengths (list, numpy array or CPU tensor of integers; 0 = idle)."""

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def parse_seq_lens(seq_lens: SeqLens, num_slots: int) -> torch.Tensor:
    """Return lengths as an int64 CPU tensor ``[B]``; it may share memory with the argument, so only read it.

    Raises
    ------
    ConfigError
        Not one of the accepted forms, not `num_slots` long, or a reqid that does not exist.
    """
    if isinstance(seq_lens, torch.Tensor):
        vector = seq_lens
    elif isinstance(seq_lens, Mapping):
        vector = torch.zeros(num_slots, dtype=torch.int64)
        for reqid, length in seq_lens.items():
            vector[check_int("reqid", reqid, 0, num_slots - 1)] = check_int(f"seq_lens[{reqid}]", length, 0)
    elif type(seq_lens).__module__ == "numpy":
        vector = torch.as_tensor(seq_lens)
    else:
        vector = _from_sequence(seq_lens)
    if not vector.is_cpu:
        raise ConfigError(f"seq_lens is on {vector.device}; pass it on the CPU, reading it would wait for the GPU")
    if vector.dtype is not torch.int64 and vector.dtype not in _INTEGERS:
        raise ConfigError(f"seq_lens has dtype {vector.dtype}; it must hold integers")
    if vector.shape != (num_slots,):
        raise ConfigError(f"seq_lens has shape {tuple(vector.shape)}; it must have max_batch_size = {num_slots} items")
    return vector if vector.dtype is torch.int64 else vector.to(torch.int64)


def _from_sequence(seq_lens: Sequence[int]) -> torch.Tensor:
    """Convert a sequence of ints; through `array`, several times faster than `torch.tensor` on a list."""
    try:
        if bool in set(map(type, seq_lens)):
            raise TypeError("bools are not lengths")
        packed = array("q", seq_lens)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"seq_lens is {seq_lens!r:.200}; it must be integers or a {{reqid: len}} dict") from error
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)


class LengthTable:
    """Per-slot token counts.

    Attributes
    ----------
    touched : torch.Tensor
        ``[B]`` int64: the longest length of the slot's request so far; 0 for idle slots.
    backed : torch.Tensor
        ``[B]`` int64: the longest length that is mapped; 0 for idle slots, so that any length there stands out.
    trigger : torch.Tensor
        ``[B]`` int64, at most `backed`: a length above it wants the next page soon. Equal to `backed` for a slot that
        is mapped to the end: it wants nothing more, and a length above that stands out too.
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._zeros = torch.zeros(num_slots, dtype=torch.int64)
        self.touched = torch.zeros(num_slots, dtype=torch.int64)
        self.backed = torch.zeros(num_slots, dtype=torch.int64)
        self.trigger = torch.zeros(num_slots, dtype=torch.int64)

    def is_quiet(self, lens: torch.Tensor) -> bool:
        """True when every length is in ``[0, trigger]``: nothing to do, nothing to refuse."""
        return torch.equal(lens.clamp(self._zeros, self.trigger), lens)  # half the time of comparing and reducing

    def advance(self, lens: torch.Tensor) -> None:
        """Note that requests now have these lengths."""
        torch.maximum(self.touched, lens, out=self.touched)

    def beyond_backed(self, lens: torch.Tensor) -> list[int]:
        """Slots whose length is not mapped."""
        return _indices(lens > self.backed)

    def beyond_trigger(self) -> list[int]:
        """Slots that want their next page soon."""
        return _indices(self.touched > self.trigger)

    def beyond_touched(self, lens: torch.Tensor) -> list[int]:
        """Slots whose request is longer than ever before."""
        return _indices(lens > self.touched)

    def reset_all(self) -> None:
        """Forget all requests, so that no length counts as mapped."""
        for vector in (self.touched, self.backed, self.trigger):
            vector.zero_()

    def started(self) -> torch.Tensor:
        """Indices of the slots whose request has a length."""
        return self.touched.nonzero().flatten()

    def check_range(self, lens: torch.Tensor) -> None:
        """Raise `ConfigError` that names the first length outside ``[0, max_seq_len]``."""
        limit = self._max_seq_len
        for slot in _indices((lens < 0) | (lens > limit))[:1]:
            raise ConfigError(f"seq_lens[{slot}] is {int(lens[slot])}; it must be in [0, max_seq_len = {limit}]")

    def set_backed(self, slot: int, backed: int) -> None:
        """Note what is mapped for an active slot; its next page is wanted at the last moment until scheduled."""
        self.backed[slot] = backed
        self.trigger[slot] = backed

    def reset(self, slot: int) -> None:
        """Forget a slot's request."""
        self.touched[slot] = 0
        self.backed[slot] = 0
        self.trigger[slot] = 0

    def schedule(self, slots: torch.Tensor, distance: torch.Tensor | int) -> None:
        """Set the triggers of `slots` (indices) `distance` tokens before the end of what is mapped."""
        backed = self.backed[slots]
        self.trigger[slots] = torch.where(backed < self._max_seq_len, (backed - distance).clamp_(min=0), backed)


def _indices(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()
