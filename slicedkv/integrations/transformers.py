"""Transformers models over a `SlicedKVCache`: geometry from a config, and attention over a packed batch.

Importing this module registers an attention implementation named "slicedkv". With it a model takes the tokens of many
requests packed as one row, ``input_ids [1, total_q]`` with their ``position_ids``, and a forward argument
``slicedkv_backend``: an attention backend that has the step's plan. No mask is built, since transformers makes none
for an implementation it has no mask function for. Passing the backend as an argument keeps the model free of state:
two engines, or two threads, never see each other's batch.

`SlicedTransformersCache`, for `model.generate`, is re-exported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionBackend
from ..cache import SlicedKVCache
from ..errors import BackendUnavailableError, ConfigError, StateError
from .transformers_cache import SlicedTransformersCache

try:
    from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
except ImportError as error:
    raise BackendUnavailableError("transformers is missing; pip install slicedkv[transformers]") from error

__all__ = ["ATTENTION_NAME", "SlicedTransformersCache", "attention_scale", "cache_for_model", "packed_attention"]

ATTENTION_NAME = "slicedkv"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def cache_for_model(
    model: PreTrainedModel | PretrainedConfig, max_batch_size: int, max_seq_len: int, **kwargs: Any
) -> SlicedKVCache:
    """Open a `SlicedKVCache` that fits a decoder-only model.

    Parameters
    ----------
    model : PreTrainedModel or PretrainedConfig
        A model also gives `dtype` and `device`; with a config pass `device`, and `dtype` unless the config names it.
    max_batch_size, max_seq_len : int
    **kwargs
        Other arguments of `SlicedKVCache`, or values that replace what the model gives.

    Raises
    ------
    ConfigError
        The model needs more than causal attention over all tokens (see `check_config`), or an argument does not fit.
    """
    config = decoder_config(model)
    check_config(config, max_seq_len)
    like_model: dict[str, Any] = {"dtype": getattr(config, "dtype", None) or torch.get_default_dtype()}
    if isinstance(model, PreTrainedModel):
        like_model = {"dtype": model.dtype, "device": model.device}
    shape = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, **geometry(config)}
    return SlicedKVCache(**(like_model | shape | kwargs))


def geometry(config: PretrainedConfig) -> dict[str, int]:
    """Return layers, KV heads and head dimension of a decoder."""
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon's older models say so and nothing else
    return {
        "num_layers": config.num_hidden_layers,
        "num_kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def check_cache(config: PretrainedConfig, cache: SlicedKVCache) -> None:
    """Refuse a cache of another shape than a model's K and V.

    Raises
    ------
    ConfigError
        It differs in layers, KV heads or head dimension.
    """
    for name, value in geometry(config).items():
        found = getattr(cache.layout, name)
        if found != value:
            raise ConfigError(
                f"the cache has {name} {found} and the model {value}; open the cache with cache_for_model(model, ...)"
            )


def decoder_config(model: PreTrainedModel | PretrainedConfig) -> PretrainedConfig:
    """Return the config of a model's text decoder."""
    config: PretrainedConfig = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config(decoder=True)


def check_config(config: PretrainedConfig, max_seq_len: int) -> None:
    """Refuse models whose attention is not plainly causal over all tokens, up to `max_seq_len`.

    Raises
    ------
    ConfigError
        A sliding window shorter than `max_seq_len`, another kind of layer, compressed KV, capped scores, an
        encoder, or rotary frequencies that depend on the longest request of a batch.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_seq_len and (not kinds or "sliding_attention" in kinds):
        raise ConfigError(
            f"the model attends over a sliding window of {window} tokens, shorter than max_seq_len {max_seq_len}; "
            f"use max_seq_len <= {window}"
        )
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"the model has layers of kind {', '.join(others)}; only causal attention layers are supported"
        )
    for field in ("kv_lora_rank", "attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, field, None):
            raise ConfigError(f"the model's config has {field} {getattr(config, field)}, which is not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("the model is an encoder-decoder; only decoder-only models are supported")
    _check_rope(config, max_seq_len)


def _check_rope(config: PretrainedConfig, max_seq_len: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in {"dynamic", "longrope"}:
        return
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if max_seq_len > limit:
        raise ConfigError(
            f"rope_type {kind!r} changes all positions when one request is longer than {limit} tokens, so requests "
            f"cannot share a batch; use max_seq_len <= {limit}, not {max_seq_len}"
        )


def attention_scale(model: nn.Module) -> float:
    """Return the factor that the model's attention layers put on their scores.

    Raises
    ------
    ConfigError
        The layers have no `scaling`, or differ in it.
    """
    attention = (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling"))
    scales = {float(module.scaling) for module in attention}  # type: ignore[arg-type]
    if len(scales) != 1:
        raise ConfigError(f"the model's attention layers have scalings {sorted(scales)}; they must have one in common")
    return scales.pop()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    slicedkv_backend: AttentionBackend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Append a layer's new K and V to the cache and attend; transformers calls this as attention "slicedkv".

    Parameters
    ----------
    module : nn.Module
        The attention layer; its `layer_idx` is the layer of the cache.
    query, key, value : Tensor
        ``[1, heads, total_q, D]``: the packed new tokens, positions already applied.
    attention_mask : Tensor or None
        Must be None: the plan says who sees what.
    scaling : float, optional
    slicedkv_backend : AttentionBackend
        Planned for this step.

    Returns
    -------
    tuple of Tensor and None
        ``[1, total_q, num_qo_heads, D]``, and no attention weights.

    Raises
    ------
    StateError
        The forward was called without `slicedkv_backend`.
    ConfigError
        The layer asks for what a plan cannot say: a mask, another scale, a sliding window, capped scores, sinks.
    """
    backend = slicedkv_backend
    if backend is None:
        raise StateError(
            "attention 'slicedkv' needs the forward argument slicedkv_backend, a planned attention backend"
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise ConfigError(
            f"attention 'slicedkv' takes one packed row and no mask; got {query.shape[0]} rows"
            + ("" if attention_mask is None else f" and a mask of shape {tuple(attention_mask.shape)}")
        )
    if scaling is not None and abs(scaling - backend.scale) > 1e-9:
        raise ConfigError(
            f"layer {module.layer_idx} scales by {scaling}, the backend by {backend.scale}; open it with scale="
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < backend.max_seq_len:
        raise ConfigError(f"layer {module.layer_idx} has a sliding window of {window} tokens, shorter than max_seq_len")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(f"layer {module.layer_idx} passes {name}, which attention 'slicedkv' does not support")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    backend.append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return backend.run(layer, query[0].transpose(0, 1))[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
