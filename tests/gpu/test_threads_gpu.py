"""Threads and streams over CUDA: copies are done before their source is written, freed or handed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_life import SLOTS, TOKENS, run_threads

from slicedkv import SlicedKVCache

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
MakeCache = Callable[..., SlicedKVCache]
LONG = 100_000_000
"""Cycles of a GPU, some 50 ms: whoever does not wait for a copy behind them comes before it."""
ROWS = 2 * 1024 + 50
"""Tokens of whole pages in every layout, and of a part of one, which is copied."""


def fill(cache: SlicedKVCache, reqid: int, start: int, end: int, value: float) -> None:
    for layer in range(cache.layout.num_layers):
        cache.k(layer)[reqid, start:end] = value
        cache.v(layer)[reqid, start:end] = -value


def holds(cache: SlicedKVCache, reqid: int, start: int, end: int, value: float) -> bool:
    torch.cuda.synchronize()
    return all(
        bool((cache.k(layer)[reqid, start:end] == value).all() and (cache.v(layer)[reqid, start:end] == -value).all())
        for layer in range(cache.layout.num_layers)
    )


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets every copy between slots wait behind a long kernel; the list says from which slots."""
    from slicedkv.requests.copier import Copier

    copy, sources = Copier.copy, []

    def late(self: Copier, source: int, *rest: int) -> None:
        torch.cuda._sleep(LONG)
        sources.append(source)
        copy(self, source, *rest)

    monkeypatch.setattr(Copier, "copy", late)
    return sources


def overwrite(cache: SlicedKVCache, reqid: int, stream: torch.cuda.Stream) -> None:
    """A request goes back to its first token and writes all rows again, on a stream of its own."""
    with torch.cuda.stream(stream):
        assert cache.step({reqid: 1})
        assert cache.step({reqid: ROWS})
        fill(cache, reqid, 1, ROWS, 7.0)


def replace(cache: SlicedKVCache, reqid: int, stream: torch.cuda.Stream) -> None:
    """A request ends, and the next one in its slot writes other rows, on a stream of its own."""
    with torch.cuda.stream(stream):
        cache.free_reqid(reqid)
        assert cache.alloc_reqid(ROWS) == reqid
        assert cache.step({reqid: ROWS})
        fill(cache, reqid, 0, ROWS, 7.0)


def in_a_thread(call: Callable[..., None], *arguments: Any) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call(*arguments)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert not failures, failures


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("act", [overwrite, replace])
def test_a_shared_prefix_is_copied_before_its_source_is_written(
    make_cache: MakeCache, late_copies: list[int], layout: str, act: Callable[..., None]
) -> None:
    cache = make_cache(layout=layout, max_batch_size=2, extent_pages=16)
    source = cache.alloc_reqid()
    assert cache.step({source: ROWS})
    fill(cache, source, 0, ROWS, 3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        (child,) = cache.fork(source)
    in_a_thread(act, cache, source, torch.cuda.Stream())
    assert source in late_copies
    assert holds(cache, child, 0, ROWS, 3.0)
    assert holds(cache, source, 1, ROWS, 7.0)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("act", [overwrite, replace])
def test_a_page_is_copied_before_its_source_is_written(
    make_cache: MakeCache, late_copies: list[int], layout: str, act: Callable[..., None]
) -> None:
    """A step gives its request a page of its own; the other sharer, alone with the old one now, writes it in place."""
    cache = make_cache(layout=layout, max_batch_size=2, extent_pages=1)
    source = cache.alloc_reqid()
    assert cache.step({source: ROWS})
    fill(cache, source, 0, ROWS, 3.0)
    (child,) = cache.fork(source)
    torch.cuda.synchronize()
    late_copies.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert cache.step({child: 1})
        assert cache.step({child: ROWS})
    assert set(late_copies) == {source}
    in_a_thread(act, cache, source, torch.cuda.Stream())
    assert holds(cache, child, 0, ROWS, 3.0)
    assert holds(cache, source, 1, ROWS, 7.0)


@pytest.mark.parametrize("zero_on_reuse", [False, True])
@pytest.mark.parametrize("limit_pages", [40, 200])
def test_rows_are_those_of_their_request(cuda_device: str, limit_pages: int, zero_on_reuse: bool) -> None:
    """Four threads, each with a stream of its own; a page holds 64 tokens."""
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 16, "head_dim": 256, "dtype": torch.float64}
    shape |= {"max_batch_size": SLOTS, "max_seq_len": TOKENS, "extent_pages": 1, "device": cuda_device}
    with SlicedKVCache(**shape, memory_limit=limit_pages * 2**21, zero_on_reuse=zero_on_reuse) as cache:
        run_threads(cache)


def test_truncated_rows_are_unmapped_behind_the_work_that_reads_them(make_cache: MakeCache) -> None:
    cache = make_cache(lookahead_tokens=0, extent_pages=1)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 16000})
    fill(cache, reqid, 0, 16000, 3.0)
    mapped = cache.stats().mapped_bytes
    torch.cuda._sleep(LONG)
    total = cache.k(0)[reqid, :16000].double().sum()
    cache.truncate(reqid, 100)
    assert cache.stats().mapped_bytes == mapped, "the kernel that reads them may run still"
    assert total.item() == 3.0 * 16000 * 8 * 128
    torch.cuda.synchronize()
    cache.trim()
    assert cache.stats().mapped_bytes == cache.layout.bytes_for(100)
    assert holds(cache, reqid, 0, 100, 3.0)
