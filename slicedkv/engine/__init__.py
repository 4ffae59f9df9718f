"""A small continuous-batching engine over a transformers model: `Engine`, `Request`, `SamplingParams`.

`engine`, `opening`, `probe`, `runner`, `graphs` and `model_attention` import transformers; the other files do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .record import EngineStep, Event
from .request import FinishReason, Request, RequestState, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Engine", "EngineStep", "Event", "FinishReason", "Request", "RequestState", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Late, so that requests and sampling work without transformers.
    if name == "Engine":
        import_module("..integrations.transformers", __name__)  # says what to install if transformers is missing
        from .engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
