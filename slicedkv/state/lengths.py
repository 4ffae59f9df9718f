"""`LengthTable`: lengths of all slots as columns, so that `step` compares them without a Python loop over B.

It knows token counts and CPU vectors of torch; pages and states of slots are others' business. Not thread-safe: the
cache calls it with its gate's lock held.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..checks import check_int
from ..errors import ConfigError

__all__ = ["LengthTable", "SeqLens", "parse_seq_lens"]

SeqLens: TypeAlias = Mapping[int, int] | Sequence[int] | torch.Tensor
"""``{reqid: len}``, or `max_batch_size` lengths (list, numpy array or CPU tensor of integers; 0 = idle)."""

_MOST = 2**63 - 1
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32})


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
        vector = _from_mapping(seq_lens, num_slots)
    elif type(seq_lens).__module__ == "numpy":
        vector = _from_numpy(seq_lens)
    else:
        vector = _from_sequence(seq_lens)
    if not vector.is_cpu:
        raise ConfigError(f"seq_lens is on {vector.device}; pass it on the CPU, reading it would wait for the GPU")
    if vector.layout is not torch.strided or vector.is_nested:
        kind = "nested" if vector.is_nested else f"of layout {vector.layout}"
        raise ConfigError(f"seq_lens is a tensor {kind}; pass an ordinary, dense one")
    if vector.dtype is not torch.int64 and vector.dtype not in _INTEGERS:
        raise ConfigError(f"seq_lens has dtype {vector.dtype}; it must hold integers")
    if vector.shape != (num_slots,):
        raise ConfigError(f"seq_lens has shape {tuple(vector.shape)}; it must have max_batch_size = {num_slots} items")
    return vector if vector.dtype is torch.int64 else vector.to(torch.int64)


def _from_mapping(seq_lens: Mapping[int, int], num_slots: int) -> torch.Tensor:
    packed = array("q", bytes(8 * num_slots))
    for reqid, length in seq_lens.items():
        if not (type(reqid) is type(length) is int and 0 <= reqid < num_slots and 0 <= length <= _MOST):
            reqid = check_int("reqid", reqid, 0, num_slots - 1)
            length = check_int(f"seq_lens[{reqid}]", length, 0, _MOST)
        packed[reqid] = length
    return torch.frombuffer(packed, dtype=torch.int64)


def _from_numpy(seq_lens: Any) -> torch.Tensor:
    """Take an array of any integers, in any byte order and stride, as torch takes only some."""
    if seq_lens.dtype.kind not in "iu":
        raise ConfigError(f"seq_lens has dtype {seq_lens.dtype}; it must hold integers")
    if seq_lens.dtype.kind == "u" and seq_lens.size and seq_lens.max() > _MOST:
        raise ConfigError(f"seq_lens has a length of {seq_lens.max()}; it must be at most {_MOST}")
    return torch.as_tensor(seq_lens.astype("int64", order="C", copy=False), device="cpu")


def _from_sequence(seq_lens: Sequence[int]) -> torch.Tensor:
    """Convert a sequence of ints; through `array`, several times faster than `torch.tensor` on a list."""
    try:
        if isinstance(seq_lens, (bytes, bytearray)):
            raise TypeError("bytes are no lengths")
        if any(kind is bool or issubclass(kind, torch.Tensor) for kind in set(map(type, seq_lens))):
            seq_lens = [check_int(f"seq_lens[{slot}]", length, -_MOST, _MOST) for slot, length in enumerate(seq_lens)]
        packed = array("q", seq_lens)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"seq_lens is {seq_lens!r:.200}; it must be integers or a {{reqid: len}} dict") from error
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64, device="cpu")


class LengthTable:
    """Per-slot token counts, each a column of `num_slots` numbers.

    A column is an `array` and, over the same memory, a tensor. `step` compares whole columns as tensors. Everything
    else reads and writes single numbers of the array. Each torch call lets go of the GIL, and beside a busy main thread
    the mapper would wait a whole switch interval to get it back.

    Attributes
    ----------
    longest : array of int
        The longest length that the slot's request has had; 0 for idle slots.
    backed : array of int
        The longest length that is mapped; 0 for idle slots, so that any length there stands out.
    trigger : array of int
        The length beyond which the mapper should map the next page; never above `backed`. A slot that is mapped to its
        end has `backed` here, so that a length beyond the end stands out.
    shared : array of int
        Rows that lie in pages which the slot shares, or shared not long ago. A row that does in part counts.
    sharers : set of int
        Slots with such rows.
    distance : int
        How many tokens before the end of what is mapped the next page is asked for, in slots not scheduled yet.
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.distance = 0
        self.longest, self.backed, self.trigger = (array("q", bytes(8 * num_slots)) for _ in range(3))
        self.shared, self._last = (array("q", bytes(8 * num_slots)) for _ in range(2))
        self.sharers: set[int] = set()
        self._level = True  # no request is shorter than it was: `longest` holds the last lengths
        with torch.inference_mode(False):  # a table made in that mode is written outside it, too
            self._zeros = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
            self._clamped = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
            self._longest, self._backed, self._trigger, self._shared, self._last_lens = (
                torch.frombuffer(column, dtype=torch.int64)
                for column in (self.longest, self.backed, self.trigger, self.shared, self._last)
            )

    def is_quiet(self, lens: torch.Tensor) -> bool:
        """True when every length is in ``[0, trigger]`` and writes no shared row: nothing to do, nothing to refuse."""
        # Half the time of comparing and reducing; no new tensor.
        quiet = torch.equal(torch.clamp(lens, self._zeros, self._trigger, out=self._clamped), lens)
        return quiet and not self.writers(lens)

    def is_backed(self, lens: torch.Tensor) -> bool:
        """True when every length is in ``[0, backed]``: nothing to map, nothing to refuse."""
        return torch.equal(torch.clamp(lens, self._zeros, self._backed, out=self._clamped), lens)

    def advance(self, lens: torch.Tensor) -> None:
        """Note that requests now have these lengths; 0 leaves a request as it was."""
        torch.maximum(self._longest, lens, out=self._longest)
        if torch.equal(self._longest, lens):
            self._level = True
        else:  # some were left out, or are shorter than before
            torch.where(lens > 0, lens, self._lasts(), out=self._last_lens)
            self._level = False

    def truncate(self, slot: int, seq_len: int) -> None:
        """Note that a request has only its first `seq_len` tokens left."""
        self.longest[slot] = self._last[slot] = seq_len

    def knows(self, slot: int) -> bool:
        """True when a slot has a length of any kind."""
        columns = (self.longest, self.backed, self.trigger, self.shared, self._last)
        return slot in self.sharers or any(column[slot] for column in columns)

    def last(self, slot: int) -> int:
        """The length that a slot's request had in its last step."""
        return self.longest[slot] if self._level else self._last[slot]

    def _lasts(self) -> torch.Tensor:
        return self._longest if self._level else self._last_lens

    def writers(self, lens: torch.Tensor) -> list[int]:
        """Slots that may write rows in shared pages after a step to these lengths."""
        if not self.sharers:
            return []
        return _indices((lens > 0) & (torch.minimum(self._lasts(), lens) < self._shared))

    def start(self, slot: int, seq_len: int, last: int | None = None) -> None:
        """Note that a request without tokens now has `seq_len` tokens that it did not write.

        `last` counts as the length of its last step; by default that is `seq_len`.
        """
        self.longest[slot] = self._last[slot] = seq_len
        if last is not None and last < seq_len:
            self._last_lens.copy_(self._lasts())
            self._level = False
            self._last[slot] = last

    def share(self, slot: int, rows: int) -> None:
        """Note that a slot's first `rows` rows lie in shared pages; 0 when it shares nothing."""
        self.shared[slot] = rows
        (self.sharers.add if rows else self.sharers.discard)(slot)

    def beyond_backed(self, lens: torch.Tensor) -> list[int]:
        """Slots whose length is not mapped."""
        return _indices(lens > self._backed)

    def beyond_longest(self, lens: torch.Tensor) -> list[int]:
        """Slots whose request becomes longer than ever before."""
        return _indices(lens > self._longest)

    def check_range(self, lens: torch.Tensor) -> None:
        """Raise `ConfigError` that names the first length outside ``[0, max_seq_len]``."""
        limit = self._max_seq_len
        least, most = torch.aminmax(lens)
        if least.item() >= 0 and most.item() <= limit:  # a quarter of the time of looking for what stands out
            return
        slot = _indices((lens < 0) | (lens > limit))[0]
        raise ConfigError(f"seq_lens[{slot}] is {int(lens[slot])}; it must be in [0, max_seq_len = {limit}]")

    def slack(self, slot: int) -> int:
        """Tokens mapped behind a slot's request."""
        return self.backed[slot] - self.longest[slot]

    def is_due(self, slot: int) -> bool:
        """True when a slot's next page is asked for."""
        return self.longest[slot] > self.trigger[slot]

    def set_backed(self, slot: int, backed: int) -> None:
        """Note what is mapped for an active slot."""
        self.backed[slot] = backed
        self.schedule(slot, self.distance)

    def schedule(self, slot: int, distance: int) -> None:
        """Ask for a slot's next page `distance` tokens before the end of what is mapped."""
        backed = self.backed[slot]
        self.trigger[slot] = max(0, backed - distance) if backed < self._max_seq_len else backed

    def reset(self, slot: int) -> None:
        """Forget a slot's request."""
        self.longest[slot] = self.backed[slot] = self.trigger[slot] = self._last[slot] = 0
        self.share(slot, 0)

    def reset_all(self) -> None:
        """Forget all requests, so that no length counts as mapped."""
        for slot in range(len(self.longest)):
            self.reset(slot)


def _indices(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()
