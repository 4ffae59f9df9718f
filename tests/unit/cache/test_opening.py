"""Opening a cache: what cannot be opened leaves nothing behind, and two caches know nothing of each other (case E7)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rig import SMALL, Rig, memory_files

from slicedkv import ConfigError, DriverError, SlicedKVCache


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"page_bytes": 5000}, "page_bytes is 5000"),
    ({"memory_limit": 4096}, "less than one page"),
    ({"max_batch_size": 1 << 40, "max_seq_len": 1 << 20}, "max_batch_size 1099511627776"),
    ({"max_batch_size": 1 << 28, "max_seq_len": 1 << 19}, "reserve.*ENOMEM.*bytes of addresses.*lower max_batch_size"),
    ({"dtype": "int8"}, "dtype"),
    ({"pool": "a pool"}, "must be a PagePool"),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS, ids=str)
def test_a_cache_that_cannot_be_opened_leaves_nothing_behind(options: dict[str, Any], named: str) -> None:
    before = memory_files(), threading.active_count()
    with pytest.raises((ConfigError, DriverError), match=named):
        SlicedKVCache(**SMALL | options)
    assert (memory_files(), threading.active_count()) == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda:3"}, "device is cuda:3, but the shared pool is on cpu"),
        ({"device": "meta"}, "device is meta, but the shared pool is on cpu"),
        ({"extent_pages": 1}, "extent_pages is 1, but that of the shared pool is 16"),
        ({"page_bytes": 4096}, "page_bytes is 4096, but that of the shared pool is 65536"),
        ({"memory_limit": "1MiB"}, "memory_limit is '1MiB'"),
    ],
    ids=str,
)
def test_what_contradicts_a_shared_pool_is_refused(options: dict[str, Any], named: str) -> None:
    shape = {name: value for name, value in SMALL.items() if name not in {"device", "page_bytes", "memory_limit"}}
    with SlicedKVCache(**SMALL) as one:
        with pytest.raises(ConfigError, match=named):
            SlicedKVCache(**(shape | options), pool=one.pool)
        same = {"device": "cpu", "page_bytes": 65536, "extent_pages": 16}
        with SlicedKVCache(**(shape | same), pool=one.pool) as two:
            assert two.step({two.alloc_reqid(): 9})


@pytest.mark.parametrize("plane", [1, 2, 6])
def test_a_failed_reservation_gives_the_others_back(rig: Rig, plane: int) -> None:
    rig.driver.fail("reserve", at=plane)
    with pytest.raises(DriverError, match="reserve"):
        rig.open(layout="per_layer", num_layers=3)
    gc.collect()
    assert rig.fake.reserved == 0
    rig.open(layout="per_layer", num_layers=3).close()


def test_two_caches_honour_their_own_options() -> None:
    wide = SlicedKVCache(**SMALL | {"layout": "per_layer", "guard_tokens": 100, "page_bytes": 4096, "mapper": "sync"})
    plain = SlicedKVCache(**SMALL)
    for cache in (wide, plain):
        assert cache.step({cache.alloc_reqid(): 10})
        cache.check_integrity()
    assert wide.stats().active_bytes == 4 * -(-110 * 128 // 4096) * 4096
    assert plain.stats().page_bytes == 65536
    assert (wide.layout.kind, plain.layout.kind) == ("per_layer", "sliced")
    wide.set_memory_limit(1 << 20)
    assert plain.stats().memory_limit_bytes == 8 << 20
    wide.close()
    assert plain.step({0: 400})
    plain.close()
