"""torch's modes, which change what its functions do for a while on one thread, and attention that meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from slicedkv import SlicedKVCache
from slicedkv.attention import Batch, open_backend

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Set torch's default device, for a while."""
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before == torch.device("cpu") else before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Mode] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "on meta": lambda: torch.device("meta"),
    "float64 by default": lambda: default_dtype(torch.float64),
}
"""On a machine without a GPU "meta" is the other device: what lands there by mistake has no values."""

STEPS = [
    ([0, 1], [9, 3]),  # prompts
    ([0, 1, 2], [1, 4, 2]),  # decode, a chunk, a prompt
    ([2, -1, 0], [1, 1, 1]),  # decode with a padded lane
    ([0, 1, 2], [1, 1, 1]),
]


def attend(
    make_cache: Callable[..., SlicedKVCache],
    name: str,
    opened_in: Mode = nullcontext,
    served_in: Mode = nullcontext,
    planned_in: Mode | None = None,
    *,
    num_layers: int = 1,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> list[torch.Tensor]:
    """Open a cache and a backend in one mode, serve in another, plan in a third; return what each step computes."""
    random = torch.Generator(device="cpu").manual_seed(3)
    with opened_in():
        cache = make_cache(num_layers=num_layers, dtype=dtype)
        heads = cache.layout.num_kv_heads
        backend = open_backend(name, cache, num_qo_heads=2 * heads, **options)
        reqids = [cache.alloc_reqid() for _ in range(3)]
    lens, found = dict.fromkeys(reqids, 0), []
    for lanes, q_lens in STEPS:
        shapes = [(sum(q_lens), each, cache.layout.head_dim) for each in (heads, heads, 2 * heads)]
        k, v, q = (torch.randn(s, generator=random, dtype=torch.float32).to(cache.device, dtype) for s in shapes)
        lens |= {lane: lens[lane] + q_len for lane, q_len in zip(lanes, q_lens, strict=True) if lane >= 0}
        with served_in():
            assert cache.step(lens)
        with (planned_in or served_in)():
            backend.plan(Batch(lanes, q_lens, [lens.get(lane, 0) for lane in lanes]))
        with served_in():
            for layer in range(num_layers):
                backend.append(layer, k, v)
                found.append(backend.run(layer, q))
    return found
