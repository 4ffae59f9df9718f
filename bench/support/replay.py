"""Requests through a real `SlicedKVCache`, to see what it maps for them.

The driver without memory maps any number of bytes: this measures the cache's books alone. A request gets more pages
only where its length crosses a page boundary, or the lookahead distance before. So this asks the cache there, and
counts the lengths in between without asking. It knows no traces and no results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

from slicedkv import PagePool, SlicedKVCache
from slicedkv.errors import OutOfPagesError
from slicedkv.layout import KVLayout
from slicedkv.state.lengths import SeqLens
from slicedkv.vmm.fake import FakeDriver

GROUP = 32
"""Requests that `largest_batch` takes in one step."""

_ALL_MEMORY = 1 << 50


class Books:
    """A cache of one layout over the driver without memory, with a fixed lookahead distance.

    Parameters
    ----------
    layout : KVLayout
        Of bfloat16.
    lookahead_tokens : int
        Tokens before the end of what is mapped at which the cache maps the next page.
    memory_limit : int
        In bytes.
    """

    def __init__(self, layout: KVLayout, *, lookahead_tokens: int = 0, memory_limit: int = _ALL_MEMORY) -> None:
        driver = FakeDriver(layout.page_bytes, total_bytes=memory_limit)
        self.lookahead_tokens = lookahead_tokens
        self.layout = layout
        self.cache = SlicedKVCache(
            **shape_options(layout),
            layout=layout.kind,
            mapper="sync",
            lookahead_tokens=lookahead_tokens,
            pool=PagePool(driver, page_bytes=layout.page_bytes, memory_limit=memory_limit),
        )

    def __enter__(self) -> Books:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()

    def grow(self, reqid: int, seq_len: int) -> int:
        """Let the only request grow to `seq_len` tokens; return the bytes mapped for it."""
        if not self.cache.step({reqid: seq_len}):
            raise out_of_pages(self.cache, {reqid: seq_len})
        return self.cache.stats().active_bytes

    def next_change(self, seq_len: int, mapped_bytes: int) -> int:
        """The next length at which more is mapped for a request that has `mapped_bytes` at `seq_len`."""
        backed = self.layout.tokens_backed(mapped_bytes // (self.layout.num_planes * self.layout.page_bytes))
        return max(seq_len, backed - self.lookahead_tokens) + 1


def shape_options(layout: KVLayout) -> dict[str, Any]:
    """The arguments of `SlicedKVCache` that a layout tells, but for `page_bytes` and its kind."""
    names = ("num_layers", "num_kv_heads", "head_dim", "max_batch_size", "max_seq_len")
    return {name: getattr(layout, name) for name in names} | {"dtype": torch.bfloat16}


def out_of_pages(cache: SlicedKVCache, seq_lens: SeqLens) -> OutOfPagesError:
    """The error for a step that returned False."""
    needed, available = cache.pages_needed(seq_lens), cache.pages_available()
    message = f"a step needs {needed} pages of {cache.layout.page_bytes} bytes, {available} can be had; use fewer slots"
    return OutOfPagesError(message, requested=needed, available=available)


class Profile:
    """Bytes held for one request as a function of its length, which is constant between some lengths.

    Parameters
    ----------
    lengths : sequence of int
        Ascending, the first is 1.
    held_bytes : sequence of int
        Bytes held from each of these lengths to the next.
    """

    def __init__(self, lengths: Sequence[int], held_bytes: Sequence[int]) -> None:
        self._lengths, self._held = torch.tensor(lengths), torch.tensor(held_bytes)
        spans = torch.tensor([end - start for start, end in pairwise(lengths)], dtype=torch.int64)
        self._before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(spans * self._held[:-1], 0)])

    @classmethod
    def modelled(cls, held_bytes: Callable[[int], int], step_tokens: int, longest: int) -> Profile:
        """A profile by arithmetic: `held_bytes` of a length, constant over groups of `step_tokens`."""
        lengths = range(1, longest + 1, step_tokens)
        return cls(lengths, [held_bytes(length) for length in lengths])

    def total(self, lengths: torch.Tensor) -> torch.Tensor:
        """For each given length the sum of the bytes held at all lengths from 1 to it; exact."""
        last = torch.searchsorted(self._lengths, lengths, right=True).sub_(1).clamp_(min=0)
        return self._before[last] + (lengths - self._lengths[last] + 1) * self._held[last]

    def held(self, lengths: torch.Tensor) -> torch.Tensor:
        """The bytes held at each of these lengths, which are at least 1."""
        return self.total(lengths) - self.total(lengths - 1)


def measure_profile(books: Books, longest: int) -> Profile:
    """Let one request grow from 1 to `longest` tokens, asking the cache wherever more may be mapped."""
    reqid = books.cache.alloc_reqid()
    lengths, held = [], []
    length = 1
    while length <= longest:
        held.append(books.grow(reqid, length))
        lengths.append(length)
        length = books.next_change(length, held[-1])
    books.cache.free_reqid(reqid)
    return Profile(lengths, held)


def replay(books: Books, prompt_tokens: int, decode_tokens: int, *, every_token: bool = False) -> float:
    """Serve one request in a slot with nothing mapped; return the mean bytes mapped in its decode steps.

    Decode step k, of 1 to `decode_tokens`, has `prompt_tokens + k` tokens.
    """
    books.cache.trim()
    reqid = books.cache.alloc_reqid()
    books.grow(reqid, prompt_tokens)
    total, length, last = 0, prompt_tokens + 1, prompt_tokens + decode_tokens
    while length <= last:
        mapped = books.grow(reqid, length)
        following = length + 1 if every_token else min(books.next_change(length, mapped), last + 1)
        total += mapped * (following - length)
        length = following
    books.cache.free_reqid(reqid)
    return total / decode_tokens


def largest_batch(books: Books, lengths: Iterable[int]) -> int:
    """Count the requests, each at its full length, that fit side by side, in order, until one does not fit.

    It takes `GROUP` of them a step, which is quicker, and the last group one by one. The cache must have `GROUP` slots
    more than requests fit.
    """
    count, coming = 0, iter(lengths)
    while True:
        group = {books.cache.alloc_reqid(): length for length in islice(coming, GROUP)}
        if not group:
            return count
        if books.cache.step(group):
            count += len(group)
            continue
        for reqid, length in group.items():
            if not books.cache.step({reqid: length}):
                return count
            count += 1


class Moment(NamedTuple):
    """One step of a batch.

    Attributes
    ----------
    seq_lens : tuple of int
        Tokens of each request.
    used_bytes : int
        Of those tokens.
    own_bytes : int
        Behind active requests, without their margin.
    margin_bytes : int
        Behind active requests, and free for others: mapped ahead, or left by a longer request in the same slot.
    """

    seq_lens: tuple[int, ...]
    used_bytes: int
    own_bytes: int
    margin_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """Behind all slots; every slot has a request."""
        return self.own_bytes + self.margin_bytes


def serve(
    cache: SlicedKVCache, requests: Iterable[tuple[int, int]], run_step: Callable[[], None] | None = None
) -> list[Moment]:
    """Serve requests (prompt and decode tokens) by continuous batching, all slots full, and watch every step.

    It ends when a slot is free and no request is left, so the batch never gets smaller. `run_step` stands for the
    model's step.

    Raises
    ------
    OutOfPagesError
        The batch does not fit in memory.
    """
    queue, ends = deque(requests), {}
    lens, moments = torch.zeros(cache.layout.max_batch_size, dtype=torch.int64), []
    while True:
        for reqid in [reqid for reqid, end in ends.items() if lens[reqid] == end]:
            cache.free_reqid(reqid)
            del ends[reqid]
        while len(ends) < len(lens):
            if not queue:
                return moments
            prompt, decode = queue.popleft()
            reqid = cache.alloc_reqid(prompt)
            ends[reqid], lens[reqid] = prompt + decode, prompt
        lens += 1
        if not cache.step(lens):
            raise out_of_pages(cache, lens)
        if run_step is not None:
            run_step()
        stats = cache.stats()
        own_bytes = stats.active_bytes - stats.lookahead_bytes
        moments.append(Moment(tuple(lens.tolist()), stats.used_bytes, own_bytes, stats.lookahead_bytes))
