"""Four threads on one set of requests, for a few seconds: rows are those of their request, and all is given back.

Each row is stamped with the request that wrote it, which of the requests of all time it is, and the position. A thread
steps, writes and reads a request while it has that request to itself; it shares, forks, frees and moves requests of all
others at any moment, as clients that abort do.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slicedkv import CapacityError, SlicedKVCache, StateError

SECONDS = 4.0
TOKENS, SLOTS, PAGE = 300, 8, 4096
SHAPE: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.float64, "device": "cpu"}
SHAPE |= {"max_batch_size": SLOTS, "max_seq_len": TOKENS, "page_bytes": PAGE, "extent_pages": 1}


class Request:
    """A request, what its rows hold as far as they were written, and who has it to himself."""

    def __init__(self, number: int, reqid: int, rows: torch.Tensor | None = None) -> None:
        self.number = number
        self.reqid = reqid
        self.rows = torch.empty(0, dtype=torch.float64) if rows is None else rows
        self.lock = threading.Lock()
        self.over = False

    def stamps(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.float64) + self.number * 1000.0


class Life:
    """What the threads do to the requests they all know."""

    def __init__(self, cache: SlicedKVCache) -> None:
        self.cache = cache
        self.requests: list[Request] = []
        self.counts: dict[str, int] = {}
        self._numbers = iter(range(1, 10**6))
        self._end = time.monotonic() + SECONDS

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        calls = [self.begin, self.write, self.write, self.write, self.read, self.fork, self.share, self.end, self.move]
        calls += [self.cut, self.look]
        while time.monotonic() < self._end:
            call = draw.choice(calls)
            try:
                done = call(draw)
            except CapacityError:
                continue
            except StateError as error:
                if not any(reason in str(error) for reason in ("is not active", "share at most those")):
                    raise
                continue
            self.counts[call.__name__] = self.counts.get(call.__name__, 0) + bool(done)

    @contextmanager
    def mine(self, draw: random.Random) -> Iterator[Request | None]:
        """Some request that nobody else writes or reads now, or None."""
        known = list(self.requests)
        found = draw.choice(known) if known else None
        if found is None or not found.lock.acquire(blocking=False):
            yield None
            return
        try:
            yield None if found.over else found
        finally:
            found.lock.release()

    def add(self, reqid: int, rows: torch.Tensor | None = None) -> bool:
        self.requests.append(Request(next(self._numbers), reqid, rows))
        return True

    def begin(self, draw: random.Random) -> bool:
        return self.add(self.cache.alloc_reqid(draw.choice((0, 50, 200))))

    def write(self, draw: random.Random) -> bool:
        """Append, or go back and write again."""
        with self.mine(draw) as request:
            if request is None:
                return False
            kept = len(request.rows) if draw.random() < 0.6 else draw.randint(0, len(request.rows))
            length = min(TOKENS, kept + draw.randint(1, 80))
            if kept < len(request.rows) and not (kept and self.cache.step({request.reqid: kept})):
                return False
            if length == kept or not self.cache.step({request.reqid: length}):
                return False
            stamps = request.stamps(kept, length)
            self.cache.k(0)[request.reqid, kept:length] = stamps.view(-1, 1, 1)
            self.cache.v(0)[request.reqid, kept:length] = -stamps.view(-1, 1, 1)
            request.rows = torch.cat((request.rows[:kept], stamps))
        return True

    def read(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            if request is None:
                return False
            self.check(request)
        return True

    def check(self, request: Request) -> None:
        expected = request.rows.view(-1, 1).expand(-1, 32)
        for view, sign in ((self.cache.k(0), 1), (self.cache.v(0), -1)):
            found = view[request.reqid, : len(request.rows), 0] * sign
            assert torch.equal(found, expected), f"request {request.number} in slot {request.reqid} has others' rows"

    def fork(self, draw: random.Random) -> bool:
        """What of the parent the child has is known afterwards only if nobody wrote it meanwhile."""
        with self.mine(draw) as request:
            if request is None:
                return False
            rows = request.rows
            if len(rows) != self.cache.seq_len(request.reqid):
                return False
            request.lock.release()  # others may end the parent, or write it, beside the call
            try:
                (child,) = self.cache.fork(request.reqid)
            finally:
                request.lock.acquire()
            return self.adopt(child, rows, request)

    def share(self, draw: random.Random) -> bool:
        known = list(self.requests)
        parent = draw.choice(known) if known else None
        if parent is None or not len(parent.rows):
            return False
        rows, count = parent.rows, draw.randint(1, len(parent.rows))
        child = self.cache.alloc_reqid(draw.choice((0, 100)))
        try:
            ok = child != parent.reqid and self.cache.share_prefix(parent.reqid, child, count)
        except StateError:  # the parent ended or was cut
            ok = False
        if not ok:
            self.cache.free_reqid(child)
            return False
        return self.adopt(child, rows[:count], parent)

    def adopt(self, child: int, rows: torch.Tensor, parent: Request) -> bool:
        """A child's rows are those of its parent at some moment of the call; which, the rows say themselves."""
        seq_len = self.cache.seq_len(child)
        found = self.cache.k(0)[child, :seq_len, 0, 0].clone()
        same = len(rows) == seq_len and torch.equal(found, rows)
        if (
            not same
        ):  # the parent wrote meanwhile, or its slot has another request: every row is in its place all the same
            places = found % 1000
            assert torch.equal(places, torch.arange(seq_len, dtype=torch.float64)) or not found.any()
        return self.add(child, found)

    def end(self, draw: random.Random) -> bool:
        """Beside whatever others do with the request, but for its own writes."""
        if len(self.requests) < SLOTS - 2 and draw.random() < 0.7:
            return False
        with self.mine(draw) as request:
            if request is None:
                return False
            request.over = True
            self.requests.remove(request)
        self.cache.free_reqid(request.reqid)
        return True

    def move(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            if request is None or len(request.rows) != self.cache.seq_len(request.reqid):
                return False
            handle = self.cache.swap_out(request.reqid)
            self.requests.remove(request)
            request.over = True
        back = self.cache.swap_in(handle) if draw.random() < 0.8 else None
        if back is None:
            handle.release()
            return False
        return self.add(back, request.rows[: handle.seq_len])

    def cut(self, draw: random.Random) -> bool:
        with self.mine(draw) as request:
            if request is None:
                return False
            length = draw.randint(0, min(len(request.rows), self.cache.seq_len(request.reqid)))
            self.cache.truncate(request.reqid, length)
            request.rows = request.rows[:length]
        return True

    def look(self, draw: random.Random) -> bool:
        stats = self.cache.stats()
        assert min(stats.used_bytes, stats.waste_bytes, stats.free_bytes, stats.saved_bytes) >= 0
        self.cache.check_integrity()
        return True


@pytest.mark.parametrize("limit_pages", [60, 400])
@pytest.mark.parametrize("zero_on_reuse", [False, True])
def test_rows_are_those_of_their_request(limit_pages: int, zero_on_reuse: bool) -> None:
    with SlicedKVCache(**SHAPE, memory_limit=limit_pages * PAGE, zero_on_reuse=zero_on_reuse) as cache:
        life, failures = Life(cache), []

        def run(seed: int) -> None:
            try:
                life.run(seed)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
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
