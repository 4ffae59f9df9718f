"""`CountedBackend`: an attention backend for one forward, in which every layer must get K and V once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..integrations.servable import LayerKinds
from ..integrations.transformers import PlannedBackend

__all__ = ["CountedBackend"]


class CountedBackend:
    """Hands calls on to a planned backend and counts the layers.

    A layer that attends twice would overwrite its first K and V, and later tokens would read wrong ones. A layer that
    never calls this attends in code of its own, and its tokens see the tokens of other requests.

    Parameters
    ----------
    backend : PlannedBackend
    kinds : LayerKinds
        What the model's config says of its layers.
    """

    def __init__(self, backend: PlannedBackend, kinds: LayerKinds) -> None:
        self._backend = backend
        self._kinds = kinds
        self._counts = [0] * len(kinds.windows)

    @property
    def scale(self) -> float:
        """As the backend's."""
        return self._backend.scale

    @property
    def max_seq_len(self) -> int:
        """As the backend's."""
        return self._backend.max_seq_len

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As the backend's.

        Raises
        ------
        ConfigError
            The layer has its K and V already, or the cache has no such layer. Nothing was written.
        """
        if not 0 <= layer < len(self._counts):
            raise ConfigError(f"the model has a layer {layer}, the cache layers [0, {len(self._counts)})")
        if self._counts[layer]:
            raise ConfigError(
                f"layer {layer} attends {self._counts[layer] + 1} times in one forward, and the cache has room for the "
                "K and V of one time"
            )
        self._backend.append(layer, k, v)
        self._counts[layer] += 1

    def run(
        self,
        layer: int,
        q: Tensor,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As the backend's.

        Raises
        ------
        ConfigError
            Window or cap are not the config's. The layer would apply them in a mask, and it has none here.
        """
        for name, found, expected in (
            ("a sliding window", window, self._kinds.windows[layer]),
            ("a cap on scores", soft_cap, self._kinds.soft_cap),
        ):
            if found != expected:
                raise ConfigError(
                    f"layer {layer} asks for {name} of {found}, and the model's config has {expected}; such a layer "
                    "cannot be served"
                )
        kind: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
        return self._backend.run(layer, q, **{name: value for name, value in kind.items() if value is not None})

    def check(self) -> None:
        """Refuse a forward that left layers out; call it when the forward is over.

        Raises
        ------
        ConfigError
            At least one layer got no K and V.
        """
        missing = [layer for layer, count in enumerate(self._counts) if not count]
        if missing:
            raise ConfigError(
                f"layers {missing} of {len(self._counts)} in the cache got K and V 0 times in one forward, not once"
            )
