"""Two calls of one cache, the second run by another thread at one release of the lock inside the first.

`World` is a cache on the host's memory with requests of every kind in it, each known by a name. `outcomes` runs a pair
of calls at every release, and one after the other in both orders; what two threads see must be one of the two.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import combinations, groupby, islice
from typing import Any
from unittest import mock

import torch
from inside import generation, zeroes_on_reuse

from slicedkv import PagePool, SlicedKVCache, SlicedKVError, SwapHandle
from slicedkv.memory.gate import Gate, _Condition
from slicedkv.vmm import MemoryInfo, procfs
from slicedkv.vmm.host import HostDriver

PAGE = 4096
TOKENS = 32
"""Tokens in one page."""
SHAPE: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
SHAPE |= {
    "max_batch_size": 8,
    "max_seq_len": 320,
    "lookahead_tokens": 0,
    "reclaim_watermark": 0.0,
    "swap_limit": "1MiB",
}
LENGTHS = {"source": 100, "lone": 90, "rewound": 90, "child": 90, "swapped": 70, "old": 300}
"""Tokens of the requests at first."""
MOST_PAGES = 400
PATIENCE_S = 10.0


class TracedLock:
    """A lock that says when the thread `traced` has given it back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.traced: int | None = None
        self.released: Callable[[], None] = lambda: None
        self._is_owned = self._lock._is_owned  # type: ignore[attr-defined]
        self._release_save = self._lock._release_save  # type: ignore[attr-defined]
        self._acquire_restore = self._lock._acquire_restore  # type: ignore[attr-defined]
        self.acquire = self._lock.acquire

    def release(self) -> None:
        self._lock.release()
        if self.traced == threading.get_ident() and not self._is_owned():
            self.released()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class TracedGate(Gate):
    """A gate with such a lock."""

    def __init__(self) -> None:
        super().__init__(timeout_s=PATIENCE_S)
        self.mutex = TracedLock()  # type: ignore[assignment]
        self.lock = _Condition(self.mutex)  # type: ignore[arg-type]
        self.is_inside = self.mutex._is_owned


def ample() -> MemoryInfo:
    """What the machine has, so that thousands of worlds do not look in its files."""
    return MemoryInfo(1 << 30, 1 << 30)


class World:
    """A cache with a prefix shared by three, two that share and are rewound, one alone, an empty one, one swapped out.

    An idle slot is full of the rows of a former request. `defined` says how many of a request's first tokens were
    written, `most` how many ever.
    """

    def __init__(self, limit_pages: int = MOST_PAGES, **options: Any) -> None:
        with mock.patch("slicedkv.memory.page_pool.Gate", TracedGate):
            self.pool = PagePool(HostDriver(), page_bytes=PAGE, memory_limit=MOST_PAGES * PAGE, extent_pages=1)
        self.cache = SlicedKVCache(**(SHAPE | options), pool=self.pool)
        self.other = SlicedKVCache(**(SHAPE | {"max_batch_size": 1, "mapper": "sync"}), pool=self.pool)
        self.lock: TracedLock = self.pool.gate.mutex  # type: ignore[assignment]
        self.names: dict[str, tuple[int, int]] = {}
        self.defined: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.turn = threading.RLock()
        """Held by who writes rows, and by the second thread: what nobody may do to a request under its own writes."""
        self.begin("swapped", "source", "lone", "rewound")
        for parent, children in (("source", ("sharer", "third")), ("rewound", ("child",))):
            for name, reqid in zip(children, self.cache.fork(self[parent], len(children)), strict=True):
                self.name(name, reqid, self.defined[parent])
        self.handle: SwapHandle = self.cache.swap_out(self["swapped"])
        self.name("empty", self.cache.alloc_reqid(), 0)
        assert self.cache.step({self["sharer"]: 1, self["rewound"]: 1})
        self.cache.trim()
        mapped_pages = self.pool.references.mapped_pages
        self.begin("old")
        self.cache.free_reqid(self["old"])
        self.used_bytes = self.cache.stats().used_bytes
        self.cache.set_memory_limit(min(MOST_PAGES, mapped_pages + limit_pages) * PAGE)

    def __getitem__(self, name: str) -> int:
        return self.names[name][0]

    def name(self, name: str, reqid: int, defined: int) -> None:
        self.names[name] = (reqid, generation(self.cache, reqid))
        self.defined[name] = self.most[name] = defined

    def begin(self, *names: str) -> None:
        """New requests with rows of their own."""
        for name in names:
            self.name(name, self.cache.alloc_reqid(), 0)
        assert self.cache.step({self[name]: LENGTHS[name] for name in names})
        for name in names:
            self.write(name, 0, LENGTHS[name])

    def write(self, name: str, start: int, end: int) -> None:
        """Rows that no other request has, unless the request was ended, cut short or not stepped that far."""
        if not self.lives(name) or self.cache.seq_len(self[name]) < end:
            return
        rows = torch.arange(start, end).view(-1, 1, 1, 1) + 1000.0 * (1 + zlib.crc32(f"{name} {end}".encode()) % 1000)
        keys, values = self.cache.kv_tensors
        keys[self[name], start:end], values[self[name], start:end] = rows, -rows
        self.defined[name] = max(self.defined[name], end)
        self.most[name] = max(self.most[name], end)

    def lives(self, name: str) -> bool:
        reqid, nth = self.names[name]
        return self.cache.is_active(reqid) and generation(self.cache, reqid) == nth

    def rows(self, name: str) -> tuple[int, torch.Tensor]:
        """Length of a request, and its rows of K and V as far as they were written."""
        reqid = self[name]
        seq_len = self.cache.seq_len(reqid)
        if zeroes_on_reuse(self.cache):
            assert not self.cache.k(1)[reqid, self.most[name] : seq_len].any(), f"{name} sees rows of another request"
        end = min(seq_len, self.defined[name])
        return seq_len, torch.stack((self.cache.k(0)[reqid, :end, 0, 0], -self.cache.v(1)[reqid, :end, 0, 0]))

    def story(self, name: str) -> tuple[int, list[str]]:
        """The same in words."""
        seq_len, rows = self.rows(name)
        return seq_len, [runs(written) for written in rows.tolist()]

    def outcome(self) -> dict[str, Any]:
        """What can be seen of all requests when everything is over."""
        with suppress(SlicedKVError):
            self.cache.resume()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert min(stats.used_bytes, stats.waste_bytes, stats.lookahead_bytes, stats.saved_bytes) >= 0
        seen = {name: self.story(name) if self.lives(name) else None for name in sorted(self.names)}
        assert stats.active_slots == sum(found is not None for found in seen.values())
        return seen | {"handle": self.handle.released}

    def use(self) -> None:
        """Every request goes on, one after another, and no other one sees it.

        Rows are compared before their request goes on, for who went before, and at the end, for who came after.
        """
        self.cache.set_memory_limit(MOST_PAGES * PAGE)
        before = {name: self.rows(name) for name in self.names if self.lives(name)}
        for name in list(before):
            reqid, seq_len = self[name], before[name][0]
            self.compare(name, before[name])
            for length in (max(1, seq_len // 2), seq_len + 1):
                assert self.cache.step({reqid: length})
            self.write(name, max(1, seq_len // 2), seq_len + 1)
            before[name] = self.rows(name)
        for name, rows in before.items():
            self.compare(name, rows)

    def compare(self, name: str, expected: tuple[int, torch.Tensor]) -> None:
        """A request is as long as it was, and its rows are the same."""
        seq_len, rows = self.rows(name)
        assert seq_len == expected[0], f"another request changed the length of {name}"
        assert torch.equal(rows, expected[1]), f"another request wrote into {name}"

    def close(self) -> None:
        """All memory comes back."""
        with suppress(SlicedKVError):
            self.cache.resume()
        for name in [name for name in self.names if self.lives(name)]:
            self.cache.free_reqid(self[name])
        self.handle.release()
        self.cache.trim()
        self.other.trim()
        assert (self.cache.stats().mapped_bytes, self.cache.stats().swapped_bytes) == (0, 0)
        self.cache.close()
        self.other.close()
        self.pool.trim()
        assert self.pool.created_pages == 0
        self.pool.driver.close()


def runs(rows: list[float]) -> str:
    """Stretches of rows that were written together, each with the place it was written for and who wrote it."""
    found = []
    for offset, group in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        places = [place for place, _ in group]
        found.append(f"[{places[0]}, {places[-1] + 1}): {offset:g}")
    return ", ".join(found)


Call = list[Callable[[World], object]]
"""What one thread does, call after call, up to the first that fails."""


def answer(call: Callable[[World], object], world: World) -> object:
    """What a call returned, without numbers of slots and pages, or the kind of error that it raised."""
    try:
        found = call(world)
    except SlicedKVError as error:
        return type(error)
    return found if isinstance(found, int | None) else type(found)


def perform(call: Call, world: World, turn: AbstractContextManager[Any] | None = None) -> Iterator[object]:
    """The answers of a thread, one at a time."""
    for part in call:
        with turn or nullcontext():
            found = answer(part, world)
        yield found
        if isinstance(found, type) and issubclass(found, SlicedKVError):
            return


@contextmanager
def open_world(options: dict[str, Any]) -> Iterator[World]:
    world = World(**options)
    yield world
    world.close()


def in_order(first: Call, second: Call, order: Sequence[bool], options: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one thread's calls after the other's; `order` says for each whether it is the second's."""
    with open_world(options) as world:
        threads = (perform(first, world), perform(second, world))
        answers: tuple[list[object], list[object]] = ([], [])
        for which in order:
            answers[which].extend(islice(threads[which], 1))
        return {"first": answers[0], "second": answers[1]} | world.outcome()


def orders(first: Call, second: Call) -> Iterator[tuple[bool, ...]]:
    """All orders in which two threads can come to make their calls."""
    count = len(first) + len(second)
    for places in combinations(range(count), len(second)):
        yield tuple(nth in places for nth in range(count))


def at_release(first: Call, second: Call, nth: int, options: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome with `second` run by another thread at the n-th release of the lock inside `first`.

    None when there are not that many.
    """
    with open_world(options) as world:
        answers: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: answers.update(second=list(perform(second, world, world.turn))))
        count = 0

        def released() -> None:
            nonlocal count
            count += 1
            if count == nth:
                thread.start()
                wait_for(thread, world)

        world.lock.released, world.lock.traced = released, threading.get_ident()
        answers["first"] = list(perform(first, world))
        world.lock.traced = None
        if count < nth:
            return None
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the second call hangs"
        seen = answers | world.outcome()
        world.use()
        return seen


def wait_for(thread: threading.Thread, world: World) -> None:
    """Until a thread is done, or waits for the work token, which it cannot get."""
    end = time.monotonic() + PATIENCE_S
    while thread.is_alive() and not world.pool.gate._foreground_waiting:
        assert time.monotonic() < end, "the second call hangs"
        time.sleep(0.0001)


@mock.patch.object(procfs, "memory_info", ample)
def check_pair(first: Call, second: Call, releases: Iterable[int], **options: Any) -> int:
    """Compare interleavings of two threads with what they may see; return the last release there was, of these."""
    allowed = [in_order(first, second, order, options) for order in orders(first, second)]
    last = 0
    for nth in releases:
        if (seen := at_release(first, second, nth, options)) is None:
            break
        last = nth
        assert seen in allowed, f"at release {nth}: {differences(seen, allowed)}"
    return last


def differences(seen: dict[str, Any], allowed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of an outcome differs from each that is allowed, as seen and as it should be."""
    return [
        {key: (seen.get(key), other.get(key)) for key in seen | other if seen.get(key) != other.get(key)}
        for other in allowed
    ]
