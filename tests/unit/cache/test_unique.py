"""What owns memory of this process is never copied, and says what to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from slicedkv import SlicedKVCache, StateError

COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps, lambda owner: copy.deepcopy([owner])]


def refuse(owner: object, message: str) -> None:
    for attempt in COPIES:
        with pytest.raises(StateError, match=rf"a {type(owner).__name__} cannot be copied or pickled.*; {message}"):
            attempt(owner)


def test_a_cache(make_cache: Callable[..., SlicedKVCache]) -> None:
    cache = make_cache()
    refuse(cache, r"fork\(\) copies requests, another process opens a cache of its own")
    assert cache.step({cache.alloc_reqid(): 5})


def test_a_pool_and_its_driver(make_cache: Callable[..., SlicedKVCache]) -> None:
    cache = make_cache()
    refuse(cache.pool, "use this one")
    refuse(cache.pool.driver, "use this one")


def test_a_swapped_out_request(make_cache: Callable[..., SlicedKVCache]) -> None:
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 5})
    handle = cache.swap_out(reqid)
    refuse(handle, r"swap_in\(\) brings its request back")
    assert not handle.released
    assert cache.swap_in(handle) is not None


def test_an_engine(make_engine: Callable[..., Any], tiny_model: Callable[..., Any]) -> None:
    refuse(make_engine(tiny_model()), "use this one")
