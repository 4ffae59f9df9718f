"""Transformers models over a `SlicedKVCache`: geometry from a config, and attention over a packed batch.

Importing this module registers an attention implementation named "slicedkv". With it, a model's forward takes the
tokens of many requests packed as one row, ``input_ids [1, total_q]`` with their ``position_ids``, and an argument
``slicedkv_backend``: an attention backend with the step's plan. Since the backend is an argument, the model has no
state, and two engines or threads never see each other's batch. Transformers has no mask function for this
implementation, so it builds no mask.

`SlicedTransformersCache`, for `model.generate`, can be imported from here, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..cache import SlicedKVCache
from ..errors import BackendUnavailableError, ConfigError, StateError
from .servable import attention_scale, check_config, decoder_config, geometry
from .transformers_cache import SlicedTransformersCache

try:
    from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
except ImportError as error:
    raise BackendUnavailableError("transformers is missing; pip install slicedkv[transformers]") from error

__all__ = ["ATTENTION_NAME", "SlicedTransformersCache", "attention_scale", "cache_for_model", "packed_attention"]

ATTENTION_NAME = "slicedkv"
"""The attention of packed batches, by the name that transformers knows it by."""

_UNSUPPORTED = {
    "position_bias": "a bias on positions",
    "indices": "a choice of tokens",
    "block_indices": "a choice of tokens",
}


class PlannedBackend(Protocol):
    """What a layer uses of a planned `AttentionBackend`, which documents it."""

    @property
    def scale(self) -> float: ...
    @property
    def max_seq_len(self) -> int: ...
    def append(self, layer: int, k: Tensor, v: Tensor) -> None: ...
    def run(
        self,
        layer: int,
        q: Tensor,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def cache_for_model(
    model: PreTrainedModel | PretrainedConfig, max_batch_size: int, max_seq_len: int, **kwargs: Any
) -> SlicedKVCache:
    """Open a `SlicedKVCache` that fits a decoder-only model.

    Parameters
    ----------
    model : PreTrainedModel or PretrainedConfig
        A model gives `dtype` and `device`. With a config pass `device`, and also `dtype` if the config has none.
    max_batch_size, max_seq_len : int
    **kwargs
        Other arguments of `SlicedKVCache`. They take the place of what the model gives.

    Raises
    ------
    ConfigError
        The model needs more than causal attention over all tokens; an argument does not fit.
    """
    config = decoder_config(model)
    check_config(config, max_seq_len)
    like_model: dict[str, Any] = {"dtype": getattr(config, "dtype", None) or torch.get_default_dtype()}
    if isinstance(model, PreTrainedModel):
        like_model = {"dtype": model.dtype, "device": model.device}
    shape = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, **geometry(config)}
    return SlicedKVCache(**(like_model | shape | kwargs))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    slicedkv_backend: PlannedBackend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Append a layer's new K and V to the cache and attend. Transformers calls this as attention "slicedkv".

    Parameters
    ----------
    module : nn.Module
        The attention layer; its `layer_idx` is the layer of the cache.
    query, key, value : Tensor
        ``[1, heads, total_q, D]``: the packed new tokens, positions already applied.
    attention_mask : Tensor or None
        Must be None: the plan says who sees what.
    scaling : float, optional
    slicedkv_backend : PlannedBackend
        An attention backend, planned for this step.

    Returns
    -------
    tuple of Tensor and None
        ``[1, total_q, num_qo_heads, D]``, and no attention weights.

    Raises
    ------
    StateError
        The forward was called without `slicedkv_backend`.
    ConfigError
        The layer needs what a plan cannot say: a mask, another scale, a choice of tokens, attention both ways. Or the
        backend lacks what the layer has: a sliding window, capped scores, sinks.
    """
    backend = slicedkv_backend
    if backend is None:
        raise StateError(
            "attention 'slicedkv' got no slicedkv_backend, a planned attention backend: the model was called without "
            "this argument, or does not hand its arguments on to its attention layers"
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise ConfigError(
            f"attention 'slicedkv' takes one packed row and no mask; got {query.shape[0]} rows"
            + ("" if attention_mask is None else f" and a mask of shape {tuple(attention_mask.shape)}")
        )
    if scaling is not None and abs(scaling - backend.scale) > 1e-9:
        raise ConfigError(
            f"layer {module.layer_idx} scales by {scaling}, the backend by {backend.scale}; pass one that is opened "
            f"with scale={scaling}"
        )
    if kwargs.get("is_causal") is False:
        raise ConfigError(f"layer {module.layer_idx} attends to more than the tokens before (is_causal is False)")
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"layer {module.layer_idx} passes {name} ({meaning}), which attention 'slicedkv' does not support"
            )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    backend.append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return backend.run(layer, query[0].transpose(0, 1), **_kind(kwargs, backend.max_seq_len))[None], None


def _kind(kwargs: dict[str, Any], max_seq_len: int) -> dict[str, Any]:
    """What a layer has beside causal attention over all tokens, by the names of `LayerKind`."""
    window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
    kind = {
        "window": window if window is not None and window < max_seq_len else None,
        "soft_cap": kwargs.get("softcap"),
        "sinks": kwargs.get("sinks") if sinks is None else sinks,
    }
    return {name: value for name, value in kind.items() if value is not None}


AttentionInterface.register(ATTENTION_NAME, packed_attention)
