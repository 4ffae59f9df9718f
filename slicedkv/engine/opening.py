"""What an engine is opened with: its cache, how requests are admitted to it, and what ends a text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..attention.base import FLOAT8_DTYPES
from ..cache import SlicedKVCache
from ..config import MemoryLimit, parse_memory_limit
from ..errors import ConfigError
from ..integrations.transformers import cache_for_model, check_cache, check_config, decoder_config
from .admission import Admission
from .prefix_cache import PrefixCache, SharingCache

__all__ = ["check_prefix_cache", "eos_ids", "open_admission", "open_cache"]


def open_cache(model: PreTrainedModel, cache: SlicedKVCache | None, options: dict[str, Any]) -> SlicedKVCache:
    """Return the cache that was given, or open one; one of the two must be described, and only one.

    Raises
    ------
    ConfigError
        Both or neither are there, or an option does not fit the model.
    """
    given = sorted(name for name, value in options.items() if value is not None)
    if cache is not None:
        if given:
            raise ConfigError(f"a cache came with {', '.join(given)}; the cache has its own, leave them out")
        check_config(decoder_config(model), cache.layout.max_seq_len)
        _check_fits(model, cache)
        return cache
    missing = [name for name in ("max_batch_size", "max_seq_len") if name not in given]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing; give both, or a cache")
    opened = cache_for_model(model, **options)
    try:
        _check_fits(model, opened)
    except ConfigError:
        opened.close()
        raise
    return opened


def _check_fits(model: PreTrainedModel, cache: SlicedKVCache) -> None:
    """Refuse a cache that a model's K and V do not fit."""
    check_cache(decoder_config(model), cache)
    if cache.dtype not in (model.dtype, *FLOAT8_DTYPES) or cache.device.type != model.device.type:
        raise ConfigError(
            f"the cache holds {cache.dtype} on {cache.device}, the model computes in {model.dtype} on {model.device}; "
            "open the cache with cache_for_model(model, ...)"
        )


def check_prefix_cache(limit: MemoryLimit, cache: SlicedKVCache | None) -> None:
    """Refuse what cannot be a limit of held prefixes, or a cache that cannot share, before anything is opened.

    Raises
    ------
    ConfigError
        See there.
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


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The model's end-of-text tokens, which configs give as a number, a list or not at all."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
