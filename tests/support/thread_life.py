"""Threads on one set of requests, for a few seconds: rows are those of their request, and all is given back.

Each row is stamped with the request that wrote it, which of the requests of all time it is, and the position. A thread
has a request to itself while it steps, writes, reads, shares or moves it; but others end it in the middle of any of
these calls, as clients that abort do, and what they do to its sharers and to the next request in its slot goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from inside import generation

from slicedkv import CapacityError, SlicedKVCache, StateError

SECONDS = 4.0
THREADS = 4
SLOTS = 8
TOKENS = 300
REFUSALS = ("is not active", "tokens already", "at most those", "makes a request longer")
"""What a thread is told whose request another one ended."""


class Request:
    """A request, what its rows hold as far as they were written, and who has it to himself."""

    def __init__(self, number: int, reqid: int, rows: torch.Tensor) -> None:
        self.number = number
        self.reqid = reqid
        self.rows = rows
        self.mine = threading.Lock()
        self.over = False
        self.calling = False
        self._gap = threading.Lock()

    def stamps(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.float64, device=self.rows.device) + self.number * 1000.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the cache on this request, in which others may end it. `Over` afterwards, if somebody did."""
        with self._gap:
            self.calling = True
        try:
            yield
        finally:
            with self._gap:
                self.calling = False
        if self.over:
            raise Over

    def end(self, cache: SlicedKVCache) -> bool:
        """End it, unless somebody writes or reads its rows right now."""
        with self._gap:
            free = self.mine.acquire(blocking=False)
            try:
                if self.over or not (free or self.calling):
                    return False
                self.over = True
                cache.free_reqid(self.reqid)
            finally:
                if free:
                    self.mine.release()
        return True


class Over(Exception):
    """The request was ended by another thread."""


class Life:
    """What the threads do to the requests they all know."""

    def __init__(self, cache: SlicedKVCache) -> None:
        self.cache = cache
        self.requests: list[Request] = []
        self.known: list[Request] = []
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}
        self._numbers = iter(range(1, 10**6))
        self._end = time.monotonic() + SECONDS

    def run(self, seed: int) -> None:
        """One thread's part; on a GPU it has a stream of its own, which is waited for after each call."""
        if self.cache.device.type == "cpu":
            self._run(random.Random(seed), lambda: None)
            return
        stream = torch.cuda.Stream(self.cache.device)
        with torch.cuda.stream(stream):
            self._run(random.Random(seed), stream.synchronize)

    def _run(self, draw: random.Random, synchronize: Callable[[], None]) -> None:
        calls = [self.begin, self.write, self.write, self.write, self.read, self.fork, self.share, self.end, self.move]
        calls += [self.cut, self.look]
        while time.monotonic() < self._end:
            call = draw.choice(calls)
            try:
                done = call(draw)
                synchronize()
            except (CapacityError, Over):
                continue
            except StateError as error:
                if not any(reason in str(error) for reason in REFUSALS):
                    raise
                continue
            self.counts[call.__name__] = self.counts.get(call.__name__, 0) + bool(done)

    @contextmanager
    def mine(self, draw: random.Random) -> Iterator[Request]:
        """Some request that nobody else uses now; `Over` if there is none."""
        known = list(self.requests)
        found = draw.choice(known) if known else None
        if found is None or not found.mine.acquire(blocking=False):
            raise Over
        try:
            if found.over:
                raise Over
            yield found
        finally:
            found.mine.release()

    def add(self, reqid: int, rows: torch.Tensor) -> bool:
        """A new request, unless a call meant for the last one in its slot came so late that it met this one."""
        born = generation(self.cache, reqid)
        self.wait_for_late_calls(reqid)
        if not self.cache.is_active(reqid) or generation(self.cache, reqid) != born:
            return False
        if self.cache.seq_len(reqid) != len(rows):
            self.cache.free_reqid(reqid)
            return False
        request = Request(next(self._numbers), reqid, rows.clone())
        with self._lock:
            self.known.append(request)
        self.requests.append(request)
        return True

    def wait_for_late_calls(self, reqid: int) -> None:
        with self._lock:
            self.known = [request for request in self.known if request.calling or not request.over]
            late = [request for request in self.known if request.reqid == reqid]
        while any(request.calling for request in late):
            time.sleep(0.0001)

    def begin(self, draw: random.Random) -> bool:
        return self.add(
            self.cache.alloc_reqid(draw.choice((0, 50, 200))),
            torch.empty(0, dtype=torch.float64, device=self.cache.device),
        )

    def step(self, request: Request, length: int) -> bool:
        with request.call():
            return self.cache.step({request.reqid: length})

    def write(self, draw: random.Random) -> bool:
        """Append, or go back and write again."""
        with self.mine(draw) as request:
            kept = len(request.rows) if draw.random() < 0.6 else draw.randint(0, len(request.rows))
            length = min(TOKENS, kept + draw.randint(1, 80))
            if kept < len(request.rows) and not (kept and self.step(request, kept)):
                return False
            request.rows = request.rows[:kept]
            if length == kept or not self.step(request, length):
                return False
            stamps = request.stamps(kept, length)
            self.cache.k(0)[request.reqid, kept:length] = stamps.view(-1, 1, 1)
            self.cache.v(0)[request.reqid, kept:length] = -stamps.view(-1, 1, 1)
            request.rows = torch.cat((request.rows, stamps))
        return True

    def read(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            self.check(request)
        return True

    def check(self, request: Request) -> None:
        expected = request.rows.view(-1, 1).expand(-1, self.cache.layout.head_dim)
        for view, sign in ((self.cache.k(0), 1), (self.cache.v(0), -1)):
            found = view[request.reqid, : len(request.rows), 0] * sign
            assert torch.equal(found, expected), f"request {request.number} in slot {request.reqid} has others' rows"

    def fork(self, draw: random.Random) -> bool:
        """The child is there also when its parent ended in the middle."""
        with self.mine(draw) as request:
            rows, children = request.rows, []
            try:
                with request.call():
                    children = self.cache.fork(request.reqid)
            finally:
                for child in children:
                    self.add(child, rows)
        return True

    def share(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            if not len(request.rows):
                return False
            rows = request.rows[: draw.randint(1, len(request.rows))]
            ok = False
            child = self.cache.alloc_reqid(draw.choice((0, 100)))
            born = generation(self.cache, child)
            if child != request.reqid:
                self.wait_for_late_calls(child)
            if not self.cache.is_active(child) or generation(self.cache, child) != born:
                return False
            try:
                with request.call():
                    ok = child != request.reqid and self.cache.share_prefix(request.reqid, child, len(rows))
            finally:
                if ok:
                    self.add(child, rows)
                elif self.cache.is_active(child):
                    self.cache.free_reqid(child)
        return True

    def end(self, draw: random.Random) -> bool:
        """Beside whatever others do with the request, but for its own writes."""
        known = list(self.requests)
        if not known or (len(known) < SLOTS - 2 and draw.random() < 0.7):
            return False
        request = draw.choice(known)
        try:
            return request.end(self.cache)
        finally:
            if request.over and request in self.requests:
                self.requests.remove(request)

    def move(self, draw: random.Random) -> bool:
        """Out, and perhaps in again; whoever wants to end it meanwhile comes too late."""
        with self.mine(draw) as request:
            try:
                with request.call():
                    handle = self.cache.swap_out(request.reqid)
            finally:
                over, request.over = request.over, True
            if not over:
                self.requests.remove(request)
            request.rows = request.rows[: handle.seq_len]
            back = self.cache.swap_in(handle) if draw.random() < 0.8 else None
            if back is None:
                handle.release()
                return False
            return self.add(back, request.rows)

    def cut(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            length = draw.randint(0, min(len(request.rows), self.cache.seq_len(request.reqid)))
            with request.call():
                self.cache.truncate(request.reqid, length)
            request.rows = request.rows[:length]
        return True

    def look(self, draw: random.Random) -> bool:
        stats = self.cache.stats()
        assert min(stats.used_bytes, stats.waste_bytes, stats.free_bytes, stats.saved_bytes) >= 0
        self.cache.check_integrity()
        return True


def run_threads(cache: SlicedKVCache) -> None:
    """Let the threads loose on a cache, look at all rows, and give everything back."""
    life, failures = Life(cache), []

    def run(seed: int) -> None:
        try:
            life.run(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 20)
        assert not thread.is_alive(), "a call hangs"
    assert not failures, failures
    for request in life.requests:
        life.check(request)
        cache.free_reqid(request.reqid)
    assert min(life.counts.get(name, 0) for name in ("begin", "write", "read", "fork", "share", "end", "move")) > 3
    assert cache.stats().active_slots == 0
    cache.trim()
    assert cache.stats().mapped_bytes == 0
    cache.check_integrity()
