"""Caches on a GPU, and what memory it has free."""

from __future__ import annotations

from typing import Any

import torch

from slicedkv import SlicedKVCache

GIB = 1 << 30
SHAPE: dict[str, Any] = {"num_layers": 8, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
SHAPE |= {"max_batch_size": 8, "max_seq_len": 16384}


def open_cache(device: str, **options: Any) -> SlicedKVCache:
    """Open a cache of eight Llama-3-8B layers, or with other options."""
    return SlicedKVCache(**(SHAPE | {"device": device, "memory_limit": 4 * GIB} | options))


def free_bytes() -> int:
    """Free memory of the device, less what torch only keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
