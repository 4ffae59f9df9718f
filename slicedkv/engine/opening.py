"""How an engine opens its parts: the cache, admission, the runner; and what it reads from a model's config."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedModel

from ..attention import AttentionBackend, open_backend
from ..attention.base import FLOAT8_DTYPES
from ..cache import SlicedKVCache
from ..checks import check_int
from ..config import MemoryLimit, parse_memory_limit
from ..errors import ConfigError
from ..integrations.servable import (
    attention_features,
    attention_scale,
    check_cache,
    check_config,
    check_layers,
    check_model,
    decoder_config,
)
from ..integrations.transformers import cache_for_model
from .admission import Admission
from .model_attention import ModelAttention
from .prefix_cache import PrefixCache
from .probe import probe
from .runner import ModelRunner
from .served_cache import SharingCache

__all__ = ["check_prefix_cache", "eos_ids", "open_admission", "open_cache", "open_runner", "warn_of_ignored"]

# Fields of a generation config that change which tokens are chosen, and that `SamplingParams` lacks.
_GREEDY_FIELDS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "watermarking_config",
)
_SAMPLING_FIELDS = ("top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NEUTRAL = dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "penalty_alpha"), 0)
_NEUTRAL |= dict.fromkeys(("guidance_scale", "num_beams", "repetition_penalty", "typical_p"), 1)
_NEUTRAL |= dict.fromkeys(("top_k", "min_p", "top_h", "epsilon_cutoff", "eta_cutoff"), 0)


def open_cache(model: PreTrainedModel, cache: SlicedKVCache | None, options: dict[str, Any]) -> SlicedKVCache:
    """Return the cache that the caller gave, or open one from options. The caller gives one of the two.

    Raises
    ------
    ConfigError
        Both or neither were given; an option does not fit the model; the model cannot be served.
    """
    given = sorted(name for name, value in options.items() if value is not None)
    if cache is not None:
        if given:
            raise ConfigError(f"a cache came with {', '.join(given)}; the cache has its own, leave them out")
        _check_served(model, cache.layout.max_seq_len)
        _check_fits(model, cache)
        return cache
    missing = [name for name in ("max_batch_size", "max_seq_len") if name not in given]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing; give both, or a cache")
    _check_served(model, check_int("max_seq_len", options["max_seq_len"], 1))
    opened = cache_for_model(model, **options)
    try:
        _check_fits(model, opened)
    except ConfigError:
        opened.close()
        raise
    return opened


def _check_served(model: PreTrainedModel, max_seq_len: int) -> None:
    """Refuse a model that cannot be served with texts of this length."""
    check_model(model)
    check_config(decoder_config(model), max_seq_len)
    check_layers(model, max_seq_len)


def _check_fits(model: PreTrainedModel, cache: SlicedKVCache) -> None:
    """Refuse a cache that a model's K and V do not fit."""
    check_cache(decoder_config(model), cache)
    if cache.dtype not in (model.dtype, *FLOAT8_DTYPES) or cache.device.type != model.device.type:
        raise ConfigError(
            f"the cache holds {cache.dtype} on {cache.device}, the model computes in {model.dtype} on {model.device}; "
            "open the cache with cache_for_model(model, ...)"
        )


def check_prefix_cache(limit: MemoryLimit, cache: SlicedKVCache | None) -> None:
    """Check the limit of held prefixes, before anything is opened.

    Raises
    ------
    ConfigError
        It is not written as a limit, or the cache cannot share prefixes.
    """
    if limit is None:
        return
    _limit_bytes(limit, 1 << 40)
    if cache is not None and not isinstance(cache, SharingCache):
        raise ConfigError(f"prefix_cache is {limit!r}, but {type(cache).__name__} cannot share prefixes; leave it out")


def open_admission(cache: SlicedKVCache, limit: MemoryLimit) -> Admission:
    """Return what gives slots to requests: with a limit, a `PrefixCache`."""
    if limit is None:
        return Admission(cache)
    return PrefixCache(cache, _limit_bytes(limit, cache.stats().memory_limit_bytes))


def _limit_bytes(limit: MemoryLimit, memory_bytes: int) -> int:
    return parse_memory_limit(limit, free_bytes=memory_bytes, default_fraction=1.0, name="prefix_cache")


def open_runner(
    model: PreTrainedModel,
    cache: SlicedKVCache,
    backend: str | AttentionBackend,
    *,
    cuda_graphs: bool | None,
    probing: bool,
) -> ModelRunner:
    """Set a model's attention, with `probing` probe the model, and return what runs it over a cache.

    Raises
    ------
    ConfigError, StateError, BackendUnavailableError, CapacityError, DriverError
        The model cannot be served, another engine uses it, or the machine cannot do it. Its attention is as it was.
    """
    attention = ModelAttention(model)
    try:
        if isinstance(backend, str):
            heads, scale = decoder_config(model).num_attention_heads, attention_scale(model)
            needs = attention_features(model, cache.layout.max_seq_len)
            backend = open_backend(backend, cache, num_qo_heads=heads, needs=needs, scale=scale)
        runner = ModelRunner(model, backend, attention, cuda_graphs=cuda_graphs)
        if probing:
            probe(runner, cache)
    except BaseException:
        attention.restore()
        raise
    return runner


def warn_of_ignored(model: PreTrainedModel) -> None:
    """Warn of what a model's generation config asks for and the engine ignores."""
    config = getattr(model, "generation_config", None)
    fields = _GREEDY_FIELDS + (_SAMPLING_FIELDS if getattr(config, "do_sample", False) else ())
    found = [(name, getattr(config, name, None)) for name in fields]
    ignored = [f"{name}={value!r}" for name, value in found if value not in (None, [], (), {}, _NEUTRAL.get(name))]
    if ignored:
        warnings.warn(
            f"the model's generation_config has {', '.join(ignored)}, which the engine ignores: `model.generate` may "
            "give other tokens",
            stacklevel=3,
        )


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The model's end-of-text tokens. Configs have a number, a list or nothing."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
