"""`Preemptor`: how a running request gives its slot away, by swapping its rows out or by computing them again.

The scheduler decides who is preempted, and when.
"""

from __future__ import annotations

from typing import Literal, get_args

from ..errors import CapacityError, ConfigError
from ..requests.swap import SwapHandle
from .request import Request
from .served_cache import ServedCache

__all__ = ["PreemptionKind", "Preemptor"]

PreemptionKind = Literal["recompute", "swap", "auto"]
_SMOOTHING = 0.3


class Preemptor:
    """Take slots from requests and give them back.

    Parameters
    ----------
    cache : ServedCache
    kind : {"recompute", "swap", "auto"}
        "auto" does what takes less time, by the measured speeds of copies and of computing prompts. Until both are
        measured, requests compute again. With any kind they do so whenever host memory is short.

    Attributes
    ----------
    num_swaps : int
        Preemptions that swapped rows out.

    Raises
    ------
    ConfigError
        There is no such kind.
    """

    def __init__(self, cache: ServedCache, kind: PreemptionKind) -> None:
        if kind not in get_args(PreemptionKind):
            raise ConfigError(f"preemption is {kind!r}; use one of {', '.join(get_args(PreemptionKind))}")
        self.kind = kind
        self.num_swaps = 0
        self._cache = cache
        self._prefill = _PrefillMeter()

    def take_slot(self, request: Request, reqid: int) -> None:
        """Free a request's slot: swap its rows out, or have them computed again."""
        request.swapped = self._free_slot(request, reqid)
        if request.swapped is None:
            request.num_computed = 0
        else:
            self.num_swaps += 1

    def _free_slot(self, request: Request, reqid: int) -> SwapHandle | None:
        """Free a request's slot; return its rows in host memory, or None if it computes them again."""
        bytes_per_s = self._cache.stats().copy_bytes_per_s if self.kind == "auto" else 0.0
        worthwhile = self.kind == "swap" or self._is_faster(request, bytes_per_s)
        to_be_measured = self.kind == "auto" and not bytes_per_s
        if request.num_computed and (worthwhile or to_be_measured):
            try:
                handle = self._cache.swap_out(reqid)
            except CapacityError:  # of host memory
                pass
            else:
                if worthwhile:
                    return handle
                handle.release()
                return None
        self._cache.free_reqid(reqid)
        return None

    def _is_faster(self, request: Request, bytes_per_s: float) -> bool:
        """True when copying a request's rows out and in is known to take less time than computing them."""
        if not bytes_per_s or not self._prefill.tokens_per_s:
            return False
        copying = 2 * request.num_computed * self._cache.layout.token_bytes / bytes_per_s
        return copying < request.num_computed / self._prefill.tokens_per_s

    def bring_back(self, request: Request) -> int | None:
        """Swap a request's rows in and return its reqid. None: it has no rows in host memory, or memory is short."""
        if request.swapped is None:
            return None
        reqid = self._cache.swap_in(request.swapped)
        if reqid is not None:
            request.swapped = None
        return reqid

    def drop(self, request: Request) -> None:
        """Give up the rows that a request has in host memory, if any: it is over, or computes them again."""
        if request.swapped is not None:
            request.swapped.release()
            request.swapped = None
            request.num_computed = 0

    def note_step(self, q_lens: tuple[int, ...], seconds: float, *, waited: bool) -> None:
        """Note what a step computed and how long it took. `waited` is False if the device was then still at work."""
        self._prefill.note(sum(q_lens), sum(q_len for q_len in q_lens if q_len > 1), seconds, waited=waited)


class _PrefillMeter:
    """Tokens a second of steps that compute prompts, measured from one wait for the device to the next."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._tokens = self._prompt_tokens = 0
        self._seconds = 0.0

    def note(self, tokens: int, prompt_tokens: int, seconds: float, *, waited: bool) -> None:
        self._tokens += tokens
        self._prompt_tokens += prompt_tokens
        self._seconds += seconds
        if not waited:
            return
        if self._seconds > 0 and 2 * self._prompt_tokens > self._tokens:
            sample = self._tokens / self._seconds
            share = _SMOOTHING if self.tokens_per_s else 1.0
            self.tokens_per_s += share * (sample - self.tokens_per_s)
        self._tokens = self._prompt_tokens = 0
        self._seconds = 0.0
