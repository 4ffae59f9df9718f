"""What `plan` needs of a model's config.json: layers, KV heads and head dimension. Reads one file; knows no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..checks import check_int
from ..errors import ConfigError

__all__ = ["ModelShape", "read_shape"]

_FILE = "config.json"
_MOST_BYTES = 16 << 20
# Fields of models whose layers do not all hold K and V of one shape for each token, and what they mean there.
_OTHER_SHAPES = {
    "kv_lora_rank": "its layers hold latent rows in place of K and V",
    "num_kv_shared_layers": "some of its layers have no K and V of their own",
    "global_head_dim": "its layers have heads of two sizes",
    "num_global_key_value_heads": "its layers have different numbers of KV heads",
    "layers_block_type": "it mixes layers of different kinds",
    "block_types": "it mixes layers of different kinds",
    "hybrid_override_pattern": "it mixes layers of different kinds",
    "attn_layer_period": "it mixes layers of different kinds",
    "attn_layer_indices": "it mixes layers of different kinds",
    "full_attention_interval": "it mixes layers of different kinds",
    "cross_attention_layers": "some of its layers attend to other things than tokens",
    "multi_query": "its KV heads are counted otherwise",
    "num_kv_heads": "its KV heads are counted otherwise",
    "is_encoder_decoder": "it is an encoder and a decoder",
}
_WITH_ROWS = ("full_attention", "sliding_attention", "chunked_attention")


class ModelShape(NamedTuple):
    """Layers, KV heads and head dimension of a whole model."""

    layers: int
    kv_heads: int
    head_dim: int


def read_shape(path: Path) -> tuple[str, ModelShape]:
    """Read a config.json, or that of a folder; return the folder's name and the shape.

    Layers whose attention has a window count in full: a cache holds all their tokens, too.

    Raises
    ------
    ConfigError
        There is no such file, it is not a model's, or its layers do not all hold K and V of one shape.
    """
    file = path / _FILE if path.is_dir() else path
    config = _load(file)
    nested = config.get("text_config")
    if isinstance(nested, dict):  # of a model that sees or hears, too
        config = nested
    for field, meaning in _OTHER_SHAPES.items():
        if config.get(field):
            raise ConfigError(f"{file} has {field}: {meaning}, which plan does not reckon with")
    kinds = config.get("layer_types") or ()
    if others := sorted({str(kind) for kind in kinds} - {*_WITH_ROWS}):
        raise ConfigError(f"{file} has layers of type {', '.join(others)}, which hold no K and V for each token")
    return file.resolve().parent.name, _shape(file, config)


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{file} is larger than any model's {_FILE}")
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a model's {_FILE}, or its folder") from error
    except ValueError as error:  # neither text nor JSON
        raise ConfigError(f"{file} is not JSON ({error}); give a model's {_FILE}, or its folder") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is a {type(found).__name__}, not an object; give a model's {_FILE}, or its folder")
    return found


def _shape(file: Path, config: dict[str, Any]) -> ModelShape:
    def number(name: str) -> int:
        if config.get(name) is None:
            raise ConfigError(f"{file} has no {name}; give --layers, --kv-heads and --head-dim instead")
        return check_int(f"{name} in {file}", config[name], 1)

    layers = number("num_hidden_layers")
    kv_heads = number("num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads")
    if config.get("head_dim") is not None:
        return ModelShape(layers, kv_heads, number("head_dim"))
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{file} has no head_dim, and its hidden_size {hidden} is no multiple of {heads} heads")
    return ModelShape(layers, kv_heads, hidden // heads)
