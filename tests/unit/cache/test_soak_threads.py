"""Four threads on one set of requests of a cache on the host, for a few seconds, memory short and ample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_life import SLOTS, TOKENS, run_threads

from slicedkv import SlicedKVCache

PAGE = 4096
SHAPE: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.float64, "device": "cpu"}
SHAPE |= {"max_batch_size": SLOTS, "max_seq_len": TOKENS, "page_bytes": PAGE, "extent_pages": 1}


@pytest.mark.parametrize("limit_pages", [60, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("zero_on_reuse", [False, True])
def test_rows_are_those_of_their_request(limit_pages: int, zero_on_reuse: bool) -> None:
    with SlicedKVCache(**SHAPE, memory_limit=limit_pages * PAGE, zero_on_reuse=zero_on_reuse) as cache:
        run_threads(cache)
