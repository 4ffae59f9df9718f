"""`append` over a cache with `debug`: rows that may not be written are refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slicedkv import SlicedKVCache
from slicedkv.attention import AttentionBackend, Batch, open_backend
from slicedkv.attention.triton import TritonBackend
from slicedkv.errors import ConfigError, StateError

BACKENDS = ["sdpa", "reference", "triton"]
Open = Callable[..., AttentionBackend]
Setup = Callable[[SlicedKVCache], None]


@pytest.fixture
def opened(make_cache: Callable[..., SlicedKVCache]) -> Open:
    """A backend over a cache whose reqids 0 and 1 share 200 tokens, and whose reqid 2 has 200 of its own."""

    def open_(name: str, **options: Any) -> AttentionBackend:
        shape = {"page_bytes": 4096, "extent_pages": 1, "lookahead_tokens": 60, "mapper": "sync", "guard_tokens": 40}
        cache = make_cache(**shape | {"debug": True} | options)
        assert (cache.alloc_reqid(), cache.step({0: 200}), cache.fork(0)) == (0, True, [1])
        assert (cache.alloc_reqid(), cache.step({2: 200})) == (2, True)
        for layer in range(3):
            cache.k(layer)[2, :200] = cache.v(layer)[2, :200] = 0
        return open_backend(name, cache, num_qo_heads=4)

    return open_


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, 2, 16)


def nothing(cache: SlicedKVCache) -> None:
    pass


def rewind(cache: SlicedKVCache) -> None:
    assert cache.step({2: 100})


def end(cache: SlicedKVCache) -> None:
    cache.free_reqid(2)


def pause(cache: SlicedKVCache) -> None:
    cache.pause()


REFUSED: dict[str, tuple[Setup, tuple[list[int], list[int], list[int]], str]] = {
    "beyond the last step": (
        nothing,
        ([2], [1], [201]),
        r"rows \[200, 201\) of reqid 2 .* last step was to 200 tokens",
    ),
    "beyond a rewind": (rewind, ([2], [1], [101]), r"rows \[100, 101\) of reqid 2 .* last step was to 100 tokens"),
    "into what two share": (nothing, ([2, 1], [1, 150], [200, 200]), r"rows \[50, 200\) of reqid 1 .* others have"),
    "by who was there first": (nothing, ([0], [1], [3]), r"rows \[2, 3\) of reqid 0 .* lie in pages \[0, 1\)"),
    "of a request that ended": (end, ([2], [1], [200]), "reqid 2 is not active"),
    "while the cache is paused": (pause, ([2], [1], [200]), "the cache is paused"),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_may_not_be_written_are_refused(opened: Open, name: str, case: str) -> None:
    backend = opened(name)
    setup, columns, message = REFUSED[case]
    cache: SlicedKVCache = backend.cache  # type: ignore[assignment]
    before = cache.k(0)[2, :200].clone()
    setup(cache)
    batch = Batch(*columns)
    backend.plan(batch)
    for _ in range(2):
        with pytest.raises(StateError, match=message):
            backend.append(0, ones(batch.total_q), ones(batch.total_q))
    if case != "of a request that ended":
        assert torch.equal(cache.k(0)[2, :200], before)
    if case == "while the cache is paused":
        cache.resume()


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_a_step_backed_are_written(opened: Open, name: str) -> None:
    backend = opened(name)
    cache: SlicedKVCache = backend.cache  # type: ignore[assignment]
    assert cache.step({0: 201, 1: 205, 2: 240})
    batch = Batch([1, -1, 0, 2], [5, 3, 1, 0], [205, 0, 201, 240])
    backend.plan(batch)
    for layer in range(3):
        backend.append(layer, ones(9), ones(9))
        assert bool((cache.k(layer)[1, 200:205] == 1).all())
    assert cache.step({1: 10})
    assert cache.step({1: 205})
    backend.plan(Batch([1], [195], [205]))
    backend.append(2, 2 * ones(195), ones(195))
    assert bool((cache.k(2)[1, 10:205] == 2).all())


def test_the_cache_is_asked_once_a_plan(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened("sdpa")
    asked: list[Any] = []
    monkeypatch.setattr(backend.cache, "check_writable", lambda *columns: asked.append(columns))
    for _ in range(2):
        backend.plan(Batch([2, -1, 0], [2, 1, 0], [200, 0, 200]))
        for layer in range(3):
            backend.append(layer, ones(3), ones(3))
    assert asked == [([2], [198], [200])] * 2
    backend.plan(Batch([2], [1], [200]))
    backend.run(0, torch.ones(1, 4, 16))
    assert len(asked) == 2, "who only reads is not asked"


def test_without_debug_it_is_not_asked(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened("sdpa", debug=False)
    monkeypatch.setattr(backend.cache, "check_writable", None)
    backend.plan(Batch([2], [1], [201]))
    backend.append(0, ones(1), ones(1))


def test_a_plan_for_a_graph_asks_since_a_replay_does_not_append(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "captures", True)
    backend = opened("triton")
    backend.plan(Batch([2], [1], [200]))
    with pytest.raises(StateError, match=r"rows \[200, 201\) of reqid 2"):
        backend.plan(Batch([-1, 2], [1, 1], [0, 201]), graph=True)
    backend.append(0, ones(1), ones(1))
    assert bool((backend.cache.k(0)[2, 199] == 1).all()), "the former plan stays"


@pytest.mark.parametrize(
    ("columns", "named"),
    [(([9], [0], [1]), "reqid is 9"), (([2], [5], [4]), "start of reqid 2"), (([2], [0], [401]), "end of reqid 2")],
)
def test_arguments_are_checked(opened: Open, columns: tuple[list[int], list[int], list[int]], named: str) -> None:
    cache: SlicedKVCache = opened("sdpa", debug=False).cache  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=named):
        cache.check_writable(*columns)
    cache.check_writable([], [], [])
    cache.check_writable([2, 1], [0, 200], [200, 200])
    cache.close()
    with pytest.raises(StateError, match="closed"):
        cache.check_writable([2], [0], [1])
