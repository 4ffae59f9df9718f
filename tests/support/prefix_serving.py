"""A prefix cache served without a model: rows that name the tokens they stand behind, over a cache of small pages."""

from __future__ import annotations

import torch

from slicedkv.engine.prefix_cache import PrefixCache
from slicedkv.engine.request import Request, SamplingParams
from slicedkv.engine.scheduler import Scheduler

PAGE = 4096
RUN = 8
"""Tokens of a page in the sliced layout."""
SYSTEM = list(range(100, 121))
"""Two runs and five tokens."""


def options(pages, slots=4, **more):
    """`pages` pages for K and as many for V, of eight tokens each."""
    shape = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
    shape |= {"max_batch_size": slots, "max_seq_len": 160, "page_bytes": PAGE, "memory_limit": 2 * pages * PAGE}
    return shape | {"mapper": "sync", "extent_pages": 1} | more


class Served:
    """A scheduler whose "model" writes rows that depend on all tokens before them, and always says 7."""

    def __init__(self, cache, limit_pages=1000, budget=64):
        self.cache = cache
        self.prefixes = PrefixCache(cache, 2 * limit_pages * PAGE)
        self.scheduler = Scheduler(cache, max_tokens_per_step=budget, admission=self.prefixes)
        self.requests = []

    def add(self, prompt, max_tokens=4):
        self.requests.append(Request(len(self.requests), prompt, SamplingParams(max_tokens=max_tokens)))
        self.scheduler.add(self.requests[-1])
        return self.requests[-1]

    def step(self):
        """Run one step; return it as {request id: tokens computed}."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            start, end = request.num_computed, request.num_computed + q_len
            self.check(request, start)
            for keys, values in self.rows(request, start, end):
                expected = marks(request.token_ids(0, end))[start:, None, None]
                keys.copy_(expected.expand_as(keys))
                values.copy_(-expected.expand_as(values))
        computed = self.scheduler.complete(plan)
        self.scheduler.admit_ahead()
        for request in computed:
            self.check(request, request.num_computed)
            request.accept(7)
        self.scheduler.retire()
        return {request.request_id: q_len for request, q_len in zip(plan.requests, plan.q_lens, strict=True)}

    def run(self):
        for _ in range(3000):
            if self.step() is None:
                return
        raise AssertionError("requests do not get on")

    def serve(self, prompt, max_tokens=4):
        request = self.add(prompt, max_tokens)
        self.run()
        return request

    def rows(self, request, start, end):
        layers = range(self.cache.layout.num_layers)
        return [tuple(view[request.reqid, start:end] for view in (self.cache.k(n), self.cache.v(n))) for n in layers]

    def check(self, request, length):
        """Every row of a request below a length is its own."""
        expected = marks(request.token_ids(0, length))[:, None, None]
        for keys, values in self.rows(request, 0, length):
            assert torch.equal(keys, expected.expand_as(keys)), request
            assert torch.equal(values, -expected.expand_as(values)), request

    def has(self, prompt):
        """Whether something could share a prefix of this prompt."""
        return self.prefixes._index.match(prompt).length > 0

    def check_books(self):
        """Slots are running or held, and held memory is what freeing it would give."""
        running = [request.reqid for request in self.scheduler.running]
        held = self.prefixes.held_slots
        assert self.cache.stats().active_slots == len(running) + len(held)
        assert not set(running) & set(held)
        assert self.prefixes.held_bytes <= self.prefixes._limit_pages * PAGE
        self.cache.check_integrity()


def marks(tokens):
    """A number for each token that depends on all before it, exact in float32."""
    found, mark = [], 1
    for token in tokens:
        mark = (mark * 31 + token) % 1_000_003
        found.append(float(mark))
    return torch.tensor(found)
