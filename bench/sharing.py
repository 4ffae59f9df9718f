"""What does sharing a prefix cost, and what does it save?

    python -m bench.sharing [--device cuda] [--quick]

It times a lookup in the engine's index, a hit and a fork, and counts the memory of many sharers. On a GPU it also times
the first token of an engine that has the prefix already.

A hit is `share_prefix` into an empty slot; `done` is the end of its copy of the last rows. The pool has handles ready
for these rows, but for the first hit. On the host the model has 4 layers, so that real memory suffices. What requests
would hold without sharing is arithmetic; how many would fit is counted by mapping them. First tokens are those of eight
layers of Llama-3-8B with random weights: the whole model takes about four times as long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from slicedkv import SlicedKVCache
from slicedkv.engine import Engine, SamplingParams
from slicedkv.engine.prefix_index import PrefixIndex

from .support.common import parser, percentiles, progress, record
from .support.spin import SHAPES, Device

Row = dict[str, Any]
SHARERS = 64
LAYERS = 8
HOST_SHAPE = (4, 8, 128)


class Setting:
    """The device, the model's shape on it, and how often to measure."""

    def __init__(self, device: Device, quick: bool) -> None:
        self.device = device
        self.shape = SHAPES["llama-3-8b"] if device.is_cuda else HOST_SHAPE
        self.repeats = 5 if quick else 12
        self.lengths = [1024, 8192] if quick else [1024, 4096, 16384, 32768, 65536]
        self.long = 8192 if quick else 32768

    def open(self, slots: int, max_seq_len: int, extent_pages: int) -> SlicedKVCache:
        """A cache that maps only what a call asks for."""
        return self.device.cache(
            self.shape, slots, max_seq_len, extent_pages=extent_pages, mapper="sync", reclaim_watermark=0.0
        )

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.is_cuda:
            torch.cuda.synchronize()

    def prompt(self, cache: SlicedKVCache, tokens: int) -> int:
        """Begin a request of `tokens` tokens; its last page is not full."""
        reqid = cache.alloc_reqid()
        if not cache.step({reqid: tokens}):
            raise SystemExit(f"there is no memory for {tokens} tokens")
        self.wait()
        return reqid

    def row(self, measure: str, extent_pages: int, tokens: int, **more: Any) -> Row:
        """A row with what every row tells."""
        layers, heads, dim = self.shape
        return {
            "measure": measure,
            "layers": layers,
            "kv_heads": heads,
            "head_dim": dim,
            "extent_pages": extent_pages,
            "tokens": tokens,
            **more,
        }


def hits(setting: Setting, extent_pages: int, tokens: int) -> Row:
    """Time `share_prefix` until it returns, and until its copy is done."""
    with setting.open(2, tokens + 64, extent_pages) as cache:
        source = setting.prompt(cache, tokens + 20)
        returned, done = [], []
        for _ in range(setting.repeats):
            target = cache.alloc_reqid()
            begun = time.perf_counter()
            if not cache.share_prefix(source, target, tokens + 10):
                raise SystemExit("there is no memory for the last rows")
            returned.append((time.perf_counter() - begun) * 1e6)
            setting.wait()
            done.append((time.perf_counter() - begun) * 1e6)
            saved = cache.stats().saved_bytes
            cache.free_reqid(target)
    p50, p99 = percentiles(returned, 0.5, 0.99)
    return setting.row(
        "hit", extent_pages, tokens + 10, us_p50=p50, us_p99=p99, done_us_p50=median(done), saved_bytes=saved
    )


def forks(setting: Setting, extent_pages: int, count: int) -> Row:
    """Time the `fork` of a long request."""
    tokens = setting.long + 10
    with setting.open(count + 1, tokens + 64, extent_pages) as cache:
        source, taken = setting.prompt(cache, tokens), []
        for _ in range(max(3, setting.repeats // count)):
            begun = time.perf_counter()
            reqids = cache.fork(source, count)
            taken.append((time.perf_counter() - begun) * 1e6)
            setting.wait()
            for reqid in reqids:
                cache.free_reqid(reqid)
    return setting.row("fork", extent_pages, tokens, forks=count, us_p50=median(taken), us_max=max(taken))


def memory(setting: Setting, extent_pages: int) -> Row:
    """Memory of many requests with one long prefix, as the device counts it, and how many fit without sharing."""
    tokens = setting.long + 10
    with setting.open(SHARERS, tokens + 64, extent_pages) as cache:
        driver, layout = cache.pool.driver, cache.layout
        before = driver.memory_info().free_bytes
        source = setting.prompt(cache, tokens)
        cache.fork(source, SHARERS - 1)
        setting.wait()
        taken, stats = before - driver.memory_info().free_bytes, cache.stats()
    with setting.open(SHARERS, tokens + 64, extent_pages) as cache:
        fitting = 0
        while fitting < SHARERS and cache.step({cache.alloc_reqid(): tokens}):
            fitting += 1
    return setting.row(
        "memory",
        extent_pages,
        tokens,
        requests=SHARERS,
        created_bytes=stats.created_bytes,
        **(
            {"taken_from_device_bytes": taken} if setting.device.is_cuda else {}
        ),  # other processes use the host's memory, too
        saved_bytes=stats.saved_bytes,
        unshared_bytes=SHARERS * layout.bytes_for(tokens),
        memory_limit_bytes=stats.memory_limit_bytes,
        unshared_requests_that_fit=fitting,
    )


def lookup(setting: Setting, tokens: int) -> Row:
    """Time the search for a prompt's prefix in an index of 64 requests that have it."""
    with setting.open(1, 64, 1) as cache:
        run_tokens = cache.layout.tokens_per_page
    source = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(0, 128_000, (tokens,), generator=source).tolist()
    index = PrefixIndex(run_tokens)
    for slot in range(SHARERS):
        index.extend(slot, [*prompt, *[slot] * run_tokens])
    copy, taken = (
        list(map(int, map(str, prompt))),
        [],
    )  # equal numbers, but other objects, as in a prompt from elsewhere
    for _ in range(setting.repeats):
        begun = time.perf_counter()
        match = index.match(copy)
        taken.append((time.perf_counter() - begun) * 1e6)
    if len(match.slots) != SHARERS:
        raise SystemExit("the index did not find what it holds")
    return setting.row("lookup", 1, tokens, requests=SHARERS, run_tokens=run_tokens, us_p50=median(taken))


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Serve one token of a prompt; return the milliseconds since `submit`, and how many tokens were cached."""
    begun = time.perf_counter()
    request = engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    engine.run()
    return (time.perf_counter() - begun) * 1e3, request.num_cached_tokens


def first_tokens(engine: Engine, vocabulary: int, tokens: int, repeats: int) -> Row:
    """Time the first tokens of three prompts, each with two pages more to compute.

    The first `tokens` tokens of the first prompt are unknown ("miss"); the second shares them with it ("hit"); the
    third goes on where the second ended, in its slot ("next_turn").
    """
    source, rest = torch.Generator().manual_seed(tokens), 2 * engine.cache.layout.tokens_per_page + 10

    def more(prompt: list[int], count: int) -> list[int]:
        return prompt + torch.randint(3, vocabulary, (count,), generator=source).tolist()

    taken: dict[str, list[float]] = {"miss": [], "hit": [], "next_turn": []}
    cached: dict[str, int] = {}
    for _ in range(repeats):
        engine.reset_prefix_cache()
        prefix = more([], tokens)
        talk = more(prefix, rest)
        for name, prompt in (("miss", more(prefix, rest)), ("hit", talk), ("next_turn", more(talk, rest))):
            ms, cached[name] = first_token(engine, prompt)
            taken[name].append(ms)
    miss, hit, next_turn = (median(values) for values in taken.values())
    return {
        "tokens": tokens,
        "computed_tokens": rest,
        "hit_cached_tokens": cached["hit"],
        "next_turn_cached_tokens": cached["next_turn"],
        "miss_ms": miss,
        "hit_ms": hit,
        "next_turn_ms": next_turn,
        "miss_over_hit": miss / hit,
    }


def engine_rows(setting: Setting) -> Iterator[Row]:
    """First tokens behind prefixes of all lengths."""
    from .baselines.workloads import model

    longest = setting.lengths[-1] + 2048
    options: dict[str, Any] = {
        "max_batch_size": 8,
        "max_seq_len": longest,
        "memory_limit": 24 << 30,
        "max_tokens_per_step": 8192,
    }
    with Engine(served := model("cuda", LAYERS), prefix_cache=1.0, **options) as engine:
        layout = engine.cache.layout
        shape = {"layers": LAYERS, "kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim}
        about = {"measure": "first_token", **shape, "backend": engine.backend.name}
        first_tokens(engine, served.config.vocab_size, 8192, 2)  # compiles and loads the kernels
        for tokens in setting.lengths:
            progress(f"first token: prefix of {tokens} tokens")
            yield {**about, **first_tokens(engine, served.config.vocab_size, tokens, 3)}


def measure(setting: Setting) -> Iterator[Row]:
    """All rows, with single pages and with extents."""
    for tokens in setting.lengths:
        progress(f"lookup: {tokens} tokens")
        yield lookup(setting, tokens)
    for extent_pages in (1, 16):
        for tokens in setting.lengths:
            progress(f"hits: {tokens} tokens, extents of {extent_pages} pages")
            yield hits(setting, extent_pages, tokens)
        for count in (1, 4, 16):
            progress(f"forks: {count}, extents of {extent_pages} pages")
            yield forks(setting, extent_pages, count)
        progress(f"memory: {SHARERS} requests, extents of {extent_pages} pages")
        yield memory(setting, extent_pages)
    if setting.device.is_cuda:
        yield from engine_rows(setting)


def main() -> None:
    """Measure, print each row as it comes, and write them."""
    options = parser(__doc__ or "").parse_args()
    record("sharing", options, measure(Setting(Device(options.device), options.quick)))


if __name__ == "__main__":
    main()
