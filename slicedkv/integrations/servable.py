"""Which transformers models can be served from packed batches, and what their K and V look like.

It reads configs and models' code, and computes nothing. What only a forward shows, the engine's probe finds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..cache import SlicedKVCache
from ..errors import BackendUnavailableError, ConfigError

try:
    from transformers import PretrainedConfig, PreTrainedModel
except ImportError as error:
    raise BackendUnavailableError("transformers is missing; pip install slicedkv[transformers]") from error

__all__ = [
    "LayerKinds",
    "attention_features",
    "attention_scale",
    "check_cache",
    "check_config",
    "check_layers",
    "check_model",
    "decoder_config",
    "geometry",
    "layer_kinds",
    "moving_rope",
]

_TUNED = (
    "which counts the tokens of a step instead of using their positions; for texts shorter than floor_scale, load the "
    "model with attn_temperature_tuning=False"
)
_POSITIONS = re.compile(r"(^|_)(wpe|pos|positions?)(_|$)")


def decoder_config(model: PreTrainedModel | PretrainedConfig) -> PretrainedConfig:
    """Return the config of a model's text decoder."""
    config: PretrainedConfig = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config(decoder=True)


def geometry(config: PretrainedConfig) -> dict[str, int]:
    """Return layers, KV heads and head dimension of a decoder.

    Raises
    ------
    ConfigError
        They vary from layer to layer.
    """
    check_alike(config)
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon's older models say so and nothing else
    return {
        "num_layers": config.num_hidden_layers,
        "num_kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def check_alike(config: PretrainedConfig) -> None:
    """Refuse a config whose layers differ in K and V.

    Raises
    ------
    ConfigError
        They do; the message names the fields.
    """
    if not getattr(config, "is_heterogeneous", False):
        return
    layers = config.per_layer_config
    fields = ("head_dim", "num_key_value_heads", "num_attention_heads", "hidden_size", "sliding_window")
    values = {name: {getattr(layer, name, None) for layer in layers} for name in fields}
    varying = [f"{name} {sorted(found, key=str)}" for name, found in values.items() if len(found) > 1]
    raise ConfigError(
        f"the model's layers have configs of their own ({', '.join(varying) or 'per_layer_config'}); only layers with "
        "the same heads and head_dim are supported"
    )


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


def check_config(config: PretrainedConfig, max_seq_len: int) -> None:
    """Refuse models whose attention is not causal over all tokens or over a window, up to `max_seq_len`.

    Raises
    ------
    ConfigError
        Another kind of layer, layers that differ in heads, compressed KV, chunks, an encoder, or positions that depend
        on the longest request of a batch or on a token's place in it.
    """
    check_alike(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"the model has layers of kind {', '.join(others)}; only causal attention layers are supported"
        )
    for field in ("kv_lora_rank", "attention_chunk_size"):
        if getattr(config, field, None):
            raise ConfigError(f"the model's config has {field} {getattr(config, field)}, which is not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("the model is an encoder-decoder; only decoder-only models are supported")
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or [0]):
        raise ConfigError(f"the model's config has attn_temperature_tuning, {_TUNED}")
    _check_rope(config, max_seq_len)


class LayerKinds(NamedTuple):
    """What a config says of its attention layers.

    Attributes
    ----------
    windows : list of int or None
        The sliding window of each layer; None where the longest text fits in it.
    soft_cap : float or None
        The cap on scores of all layers.
    """

    windows: list[int | None]
    soft_cap: float | None


def layer_kinds(config: PretrainedConfig, max_seq_len: int) -> LayerKinds:
    """Return what a config says of its attention layers, for texts of up to `max_seq_len` tokens."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = window is not None and window < max_seq_len
    windows = [window if slides and kind == "sliding_attention" else None for kind in kinds]
    return LayerKinds(windows, getattr(config, "attn_logit_softcapping", None))


def attention_features(model: PreTrainedModel, max_seq_len: int) -> frozenset[str]:
    """Return what an attention backend must have to serve a model, by the names of `LayerKind`."""
    kinds = layer_kinds(decoder_config(model), max_seq_len)
    found = {"window": any(kinds.windows), "soft_cap": kinds.soft_cap is not None}
    found["sinks"] = any(getattr(module, "sinks", None) is not None for _, module in attention_layers(model))
    return frozenset(name for name, has in found.items() if has)


def _check_rope(config: PretrainedConfig, max_seq_len: int) -> None:
    for kind, limit in moving_rope(config):
        if max_seq_len > limit:
            raise ConfigError(
                f"rope_type {kind!r} changes all positions when one request is longer than {limit} tokens, so requests "
                f"cannot share a batch; use max_seq_len <= {limit}, not {max_seq_len}"
            )


def moving_rope(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    """Yield the rotary kinds whose frequencies depend on the longest request of a batch.

    Each comes with the length up to which they stay as they are. A config has one kind, or one for each type of layer.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = str(part.get("rope_type", part.get("type", "default")))
        if kind == "longrope" or "dynamic" in kind:
            longest = config.max_position_embeddings
            original = part.get("original_max_position_embeddings") or longest
            yield kind, original if kind == "longrope" else min(original, longest)


def check_model(model: Any) -> None:
    """Refuse a model that cannot take packed batches, whatever its config says.

    Raises
    ------
    ConfigError
        It is wrapped or compiled, is in training mode, or has no language model head.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ConfigError("the model is wrapped by torch.compile; pass the model itself (its _orig_mod)")
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"the model is a {name}; pass a causal language model of transformers, not wrapped in others")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        raise ConfigError(f"{name} was compiled in place (compile()), and steps differ in shape; pass one that was not")
    if model.training:
        raise ConfigError("the model is in training mode; call model.eval()")
    if not model.can_generate() or model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise ConfigError(f"{name} has no language model head; load the model with AutoModelForCausalLM")


def check_layers(model: PreTrainedModel, max_seq_len: int) -> None:
    """Refuse a model whose layers cannot serve texts of `max_seq_len` tokens.

    Raises
    ------
    ConfigError
        It takes no positions or has a table of fewer; or a layer attends both ways, or counts the tokens of a step.
    """
    name = type(model).__name__
    if not _takes_positions(model):
        raise ConfigError(
            f"{name} cannot be served: its forward takes no position_ids, so it would count the tokens of all requests "
            "of a step as one text"
        )
    for part, module in attention_layers(model):
        if getattr(module, "is_causal", True) is False:
            raise ConfigError(
                f"{name} cannot be served: {part} attends to more than the tokens before (is_causal is False)"
            )
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
            raise ConfigError(f"{name} cannot be served: {part} has attn_temperature_tuning, {_TUNED}")
    for part, rows in _position_tables(model):
        if rows < max_seq_len:
            raise ConfigError(f"{name} has a table of {rows} positions ({part}); use max_seq_len <= {rows}")


def _takes_positions(model: PreTrainedModel) -> bool:
    """True when positions reach the decoder: its forward names them, and the model's names them or hands all on."""
    parameters = inspect.signature(type(model).forward).parameters
    inner = inspect.signature(type(_decoder(model)).forward).parameters
    handed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "position_ids" in inner and ("position_ids" in parameters or handed_on)


def _position_tables(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the name of each table of positions in a decoder, and how many positions it has."""
    most = getattr(decoder_config(model), "max_position_embeddings", None)
    decoder = _decoder(model)
    modules = ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Embedding))
    tables = [(name, module.num_embeddings) for name, module in modules]
    tables += [(name, len(tensor)) for name, tensor in decoder.named_buffers() if tensor.dim() == 2]
    for name, rows in tables:
        own = name.rpartition(".")[2]
        if _POSITIONS.search(own) and not own.startswith("rel") and not own.endswith("ids"):
            yield name, min(rows, most or rows)  # some keep the first rows for padding


def _decoder(model: nn.Module) -> nn.Module:
    """Return the text decoder of a model, or the model."""
    found = model.get_decoder() if isinstance(model, PreTrainedModel) else None  # type: ignore[no-untyped-call]
    return found if isinstance(found, nn.Module) else model


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention layers of a model's decoder, by name."""
    decoder = _decoder(model)
    for name, module in decoder.named_modules():
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "scaling"):
            yield name, module


def attention_scale(model: nn.Module) -> float:
    """Return the factor by which the model's attention layers multiply their scores.

    Raises
    ------
    ConfigError
        The layers have no `scaling`, or differ in it.
    """
    scales = {float(module.scaling) for _, module in attention_layers(model)}  # type: ignore[arg-type]
    if len(scales) != 1:
        raise ConfigError(f"the model's attention layers have scalings {sorted(scales)}; they must have one in common")
    return scales.pop()
