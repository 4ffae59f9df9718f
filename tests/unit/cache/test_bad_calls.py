"""Every call with an argument out of range, of the wrong kind or at the wrong time: named, and nothing changes (E2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slicedkv import ConfigError, OutOfSlotsError, SlicedKVCache, StateError

MakeCache = Callable[..., SlicedKVCache]

BAD_CALLS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("alloc_reqid", (-1,), ConfigError, "seq_len is -1"),
    ("alloc_reqid", (401,), ConfigError, "seq_len is 401"),
    ("alloc_reqid", (1.0,), ConfigError, "seq_len is 1.0"),
    ("free_reqid", (1,), StateError, "reqid 1 is not active"),
    ("free_reqid", (6,), ConfigError, "reqid is 6"),
    ("free_reqid", (None,), ConfigError, "reqid is None"),
    ("prefetch", (1, 5), StateError, "reqid 1 is not active"),
    ("prefetch", (0, 500), ConfigError, "seq_len is 500"),
    ("step", ({1: 5},), StateError, "reqid 1 is not active"),
    ("step", ({0: 401},), ConfigError, r"seq_lens\[0\] is 401"),
    ("step", ([1, 2],), ConfigError, "6 items"),
    ("step", ([0, 0, 0, 0, 0, 5],), StateError, "reqid 5 is not active"),
    ("step", ([-1, 0, 0, 0, 0, 0],), ConfigError, r"seq_lens\[0\] is -1"),
    ("step", (None,), ConfigError, "None"),
    ("pages_needed", ({0: 401},), ConfigError, "401"),
    ("can_admit", (401,), ConfigError, "401"),
    ("shareable_pages", (6, 1), ConfigError, "reqid is 6"),
    ("shareable_pages", (0, 401), ConfigError, "num_tokens is 401"),
    ("freeable_pages", ([0, 6],), ConfigError, "reqid is 6"),
    ("is_active", (-1,), ConfigError, "reqid is -1"),
    ("set_memory_limit", (0,), ConfigError, "0"),
    ("set_memory_limit", (1,), ConfigError, "less than one page"),
    ("set_memory_limit", (1.5,), ConfigError, r"memory_limit is 1.5; with a point it is a fraction .* in \(0, 1\]"),
    ("set_memory_limit", ("0.5",), ConfigError, "memory_limit is '0.5'; write it like '40GiB'"),
    ("set_memory_limit", (True,), ConfigError, "memory_limit is True"),
    ("k", (3,), ConfigError, "layer is 3"),
    ("v", (-1,), ConfigError, "layer is -1"),
]


@pytest.mark.parametrize(("method", "arguments", "error", "named"), BAD_CALLS, ids=str)
def test_bad_calls_change_nothing(
    make_cache: MakeCache, method: str, arguments: tuple[Any, ...], error: type[Exception], named: str
) -> None:
    cache = make_cache(mapper="sync")
    assert cache.step({cache.alloc_reqid(): 100})
    before = cache.stats()
    with pytest.raises(error, match=named):
        getattr(cache, method)(*arguments)
    after = cache.stats()
    assert (after.mapped_bytes, after.created_bytes, after.used_bytes, after.active_slots) == (
        before.mapped_bytes,
        before.created_bytes,
        before.used_bytes,
        before.active_slots,
    )
    assert cache.step({0: 101})


def test_slots_run_out(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert sorted(cache.alloc_reqid() for _ in range(6)) == list(range(6))
    assert not cache.can_admit(1)
    with pytest.raises(OutOfSlotsError, match="max_batch_size"):
        cache.alloc_reqid()
