"""Caches on a GPU, and the model that engines serve there: eight layers of Llama-3-8B with random weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_caches import free_bytes, open_cache

from slicedkv import SlicedKVCache

LAYOUTS = re.compile("sliced|interleaved|per_layer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put last what needs FlashInfer: it waits for a compiler, which runs meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("gpu") is not None and "flashinfer" in item.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run what belongs together, see `group_of`; large groups go first."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


def group_of(nodeid: str) -> str:
    """Name the tests that one worker runs: an engine's, who share a model of 10 GB, or all layouts', who share kernels.

    Those that need much memory are one after the other.
    """
    file, _, test = nodeid.partition("::")
    if "engine" in file:
        return file
    if "long_prompts" in test:  # each takes up to 28 GB to compare with
        return f"long prompts, {'flashinfer' in test}"
    return nodeid if "flashinfer" in test else LAYOUTS.sub("", nodeid)


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """What torch keeps for later the tests in other processes have no use for."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def model(cuda_device):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.03,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(5)
    with torch.device(cuda_device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="session")
def exact(model):
    """The model with the same weights in float32."""
    return copy.deepcopy(model).float()


@pytest.fixture
def make_cache(cuda_device: str) -> Iterator[Callable[..., SlicedKVCache]]:
    """Open caches of eight Llama-3-8B layers; at the end their books must be right."""
    free_bytes()  # nothing of another test is on its way any more
    opened: list[SlicedKVCache] = []

    def make(**options: Any) -> SlicedKVCache:
        opened.append(open_cache(cuda_device, **options))
        return opened[-1]

    yield make
    for cache in opened:
        if not cache.closed:
            cache.check_integrity()
            cache.close()
