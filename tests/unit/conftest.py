"""Fixtures that open caches and engines, and check the books of each one when its test is over."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rig import PAGE, SHAPE, Rig

from slicedkv import PagePool, SlicedKVCache
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from more, and threads that wait for each other are slow on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _heed_interrupts() -> None:
    """A test run in the background of a shell ignores SIGINT, and so would what it starts; tests send it themselves."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def make_cache() -> Iterator[Callable[..., SlicedKVCache]]:
    """Open small host caches; at the end their books must be right."""
    opened: list[SlicedKVCache] = []

    def make(**options: Any) -> SlicedKVCache:
        defaults: dict[str, Any] = {
            "num_layers": 3,
            "num_kv_heads": 2,
            "head_dim": 16,
            "dtype": torch.float32,
            "max_batch_size": 6,
            "max_seq_len": 400,
            "device": "cpu",
            "memory_limit": 64 * MIB,
            "page_bytes": 64 * KIB,
        }
        opened.append(SlicedKVCache(**(defaults | options)))
        return opened[-1]

    yield make
    for cache in opened:
        try:
            if not cache.closed:
                cache.check_integrity()
        finally:
            cache.close()


def _check_and_close(engine: Any) -> None:
    try:
        if engine.closed:
            return
        assert engine.idle
        engine.reset_prefix_cache()
        assert engine.cache.stats().active_slots == 0
        engine.cache.check_integrity()
    finally:
        engine.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """Open engines; at the end all slots must be free and the cache's books right."""
    from slicedkv.engine import Engine

    opened: list[Engine] = []

    def make(model: Any, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 256, "memory_limit": 64 * MIB}
        opened.append(Engine(model, **(defaults | options)))
        return opened[-1]

    yield make
    for engine in opened:
        _check_and_close(engine)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Random models with few parameters, one of each kind a session."""
    import transformers

    families = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }

    @functools.cache
    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            # Weights this large keep the likeliest token apart from the second.
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if family == "qwen2":
            del defaults["head_dim"]
            defaults["hidden_size"] = 64
        if family == "mistral":
            defaults["sliding_window"] = None
        config, model = families[family]
        torch.manual_seed(20)
        return model(config(**(defaults | options))).to(dtype).eval()

    return make


@pytest.fixture
def open_cache() -> Iterator[Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]]:
    """Open caches of Llama-3-8B's shape over a fake driver."""
    opened: list[SlicedKVCache] = []

    def make(
        *, limit_pages: int = 1000, extent_pages: int = 1, **options: Any
    ) -> tuple[SlicedKVCache, FaultyDriver, FakeDriver]:
        fake = FakeDriver(PAGE, total_bytes=1 << 40)
        driver = FaultyDriver(fake)
        pool = PagePool(driver, page_bytes=PAGE, memory_limit=limit_pages * PAGE, extent_pages=extent_pages)
        opened.append(SlicedKVCache(**(SHAPE | {"max_seq_len": 8192} | options), pool=pool))
        return opened[-1], driver, fake

    yield make
    for cache in opened:
        cache.pool.driver.inner.finish_fences()  # type: ignore[attr-defined]
        cache.check_integrity()
        cache.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A pool on a fake device whose work is done when the test is over."""
    with Rig() as opened:
        yield opened
        opened.fake.finish_fences()


@pytest.fixture
def serve(make_cache):
    """Open a cache and serve with a prefix cache over it."""
    from prefix_serving import Served, options

    def make(pages=100, *, slots=4, limit_pages=1000, budget=64, **more):
        return Served(make_cache(**options(pages, slots, **more)), limit_pages, budget)

    return make
