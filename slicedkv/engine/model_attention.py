"""`ModelAttention`: sets a model's attention to "slicedkv", and back to what each part had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ConfigError, StateError
from ..integrations.servable import decoder_config
from ..integrations.transformers import ATTENTION_NAME

__all__ = ["ModelAttention"]


class ModelAttention:
    """Sets a model's attention to "slicedkv" until `restore`.

    Parameters
    ----------
    model : PreTrainedModel

    Raises
    ------
    ConfigError
        The model's attention cannot be replaced. It is as it was.
    StateError
        Another engine uses the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._former = [(config, config._attn_implementation) for config in _configs(model)]
        if any(former == ATTENTION_NAME for _, former in self._former):
            raise StateError("another engine uses the model; close it first")
        self._set()

    def check(self) -> None:
        """Check that nobody else has set the model's attention meanwhile.

        Raises
        ------
        StateError
            Somebody has.
        """
        found = self._model.config._attn_implementation
        if found != ATTENTION_NAME:
            raise StateError(f"the model's attention was set to {found!r} while an engine uses it")

    def restore(self) -> None:
        """Give every part of the model the attention it had. Another call does so again."""
        for config, former in self._former:
            config._attn_implementation = former

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In this context the model has its own attention."""
        self.restore()
        try:
            yield
        finally:
            self._set()

    def _set(self) -> None:
        try:
            self._model.set_attn_implementation(ATTENTION_NAME)
            config = decoder_config(self._model)
            if not config._attn_implementation == self._model.config._attn_implementation == ATTENTION_NAME:
                name = type(self._model).__name__
                raise ConfigError(
                    f"{name} cannot be served: it computes attention in code of its own, which cannot be replaced"
                )
        except BaseException:
            self.restore()
            raise


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the configs of a model's parts, outer ones first: setting a config's attention sets it inside, too."""
    found: dict[int, PretrainedConfig] = {}

    def visit(config: PretrainedConfig) -> None:
        found.pop(id(config), None)
        found[id(config)] = config
        for name in config.sub_configs:
            part = getattr(config, name, None)
            if part is not None:
                visit(part)

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            visit(module.config)
    return list(found.values())
