"""Every constructor argument out of range or of the wrong kind is refused by name, before a driver is opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slicedkv.opening
from slicedkv import CacheConfig, ConfigError, SlicedKVCache
from slicedkv.config import parse_memory_limit

GOOD: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 64,
    "dtype": torch.float16,
    "max_batch_size": 4,
    "max_seq_len": 128,
    "device": "cpu",
}
BAD = [
    *[
        (name, value)
        for name in [*list(GOOD)[:3], "max_batch_size", "max_seq_len"]
        for value in (0, -1, 1.5, "2", None, True)
    ],
    *[("dtype", value) for value in (torch.int8, "float12", None, 16)],
    *[("device", value) for value in ("tpu:x", "mps", 1.5)],
    *[("memory_limit", value) for value in (0, -5, 0.0, 1.5, "40 gallons", "GiB", "0.5", "1e9", True, [], 1 << 70)],
    *[("page_bytes", value) for value in (0, -4096, 4096.0, "2MiB", 4097)],
    *[("extent_pages", value) for value in (0, 1.5)],
    *[("layout", value) for value in ("paged", None)],
    *[("mapper", value) for value in ("async", None)],
    *[("lookahead_tokens", value) for value in (-1, 129, 1.5)],
    *[("eager_tokens", value) for value in (-1, 129, "all", None)],
    *[("reclaim_watermark", value) for value in (-0.1, 1.1, "10%", None)],
    *[("guard_tokens", value) for value in (-1, 0.5)],
    *[("zero_on_reuse", value) for value in (1, "yes", None)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_argument_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SlicedKVCache(**{**GOOD, name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_bad_arguments_open_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicedkv.opening, "open_driver", lambda device: pytest.fail("a driver was opened"))
    for name, value in BAD:
        if (name, value) != ("page_bytes", 4097):  # only the driver knows its granularity
            with pytest.raises(ConfigError):
                SlicedKVCache(**{**GOOD, name: value})


@pytest.mark.parametrize("limit", ["1" + "0" * 30, "1" + "0" * 400, "9" * 5000 + "GiB"])
@pytest.mark.parametrize("name", ["memory_limit", "swap_limit", "min_share"])
def test_sizes_no_machine_has_are_refused(name: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CacheConfig(**{**GOOD, name: limit})


def test_the_other_form_of_eager_tokens_is_named() -> None:
    with pytest.raises(ConfigError, match="a number of tokens or 'auto'"):
        CacheConfig(**GOOD, eager_tokens="some")


@pytest.mark.parametrize("slots", [1 << 40, 1 << 62])
def test_more_addresses_than_there_are_is_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"max_batch_size {1 << 20} and max_seq_len {slots} need"):
        SlicedKVCache(**{**GOOD, "max_seq_len": slots, "max_batch_size": 1 << 20})


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="block_size"):
        SlicedKVCache(**GOOD, block_size=16)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 500), (0.25, 250), (123, 123), ("1KiB", 1024), ("1.5 KB", 1500), ("2GiB", 2 << 30), ("7", 7), (1.0, 1000)],
)
def test_memory_limit_forms(limit: Any, expected: int) -> None:
    assert parse_memory_limit(limit, free_bytes=1000, default_fraction=0.5) == expected


def test_dtype_by_name_and_device_forms() -> None:
    assert CacheConfig(**{**GOOD, "dtype": "bfloat16"}).dtype is torch.bfloat16
    assert CacheConfig(**{**GOOD, "device": "host"}).device == torch.device("cpu")
    assert CacheConfig(**{**GOOD, "device": torch.device("cuda", 1)}).device.index == 1
