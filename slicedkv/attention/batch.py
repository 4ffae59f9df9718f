"""`Batch`: what one step computes, request by request, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..checks import check_int
from ..errors import ConfigError

__all__ = ["PADDED", "Batch", "Lane"]

PADDED = -1


class Lane(NamedTuple):
    """One request of a batch: its slot, its packed rows ``[begin, end)``, and its length with them."""

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

    def first_seen(self, window: int | None) -> int:
        """Return the first token that any of the new ones sees: none of those before takes part in anything."""
        return 0 if window is None else max(0, self.past_len + 1 - window)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: prefill, chunks of prefill and decode mixed, packed in request order.

    Attributes
    ----------
    reqids : tuple of int
        Slot of each lane. -1 is a padded lane: it reads and writes nothing, and its output is zeros.
    q_lens : tuple of int
        New tokens of each lane, 0 or more: the last tokens of its request.
    seq_lens : tuple of int
        Length of each request, with its new tokens. 0 for a padded lane, whatever was given.

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
        object.__setattr__(self, "reqids", _ints("reqid", reqids, PADDED))
        object.__setattr__(self, "q_lens", _ints("q_len", q_lens, 0))
        object.__setattr__(self, "seq_lens", _ints("seq_len", seq_lens, 0))
        seen: set[int] = set()
        for reqid, q_len, seq_len in zip(self.reqids, self.q_lens, self.seq_lens, strict=True):
            if reqid == PADDED:
                continue
            if reqid in seen:
                raise ConfigError(f"reqid {reqid} occurs twice in a batch; give each request one lane")
            if q_len > seq_len:
                raise ConfigError(f"q_len is {q_len} and seq_len {seq_len} for reqid {reqid}; q_len must be <= seq_len")
            seen.add(reqid)
        if PADDED in self.reqids:
            lens = (0 if reqid == PADDED else n for reqid, n in zip(self.reqids, self.seq_lens, strict=True))
            object.__setattr__(self, "seq_lens", tuple(lens))

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


def _ints(name: str, values: Sequence[int], low: int) -> tuple[int, ...]:
    """Return the values as ints, each at least `low`. A sequence of plain ints costs no call for each."""
    if set(map(type, values)) == {int} and min(values) >= low:
        return tuple(values)
    return tuple(check_int(name, value, low) for value in values)
