"""What becomes of gradients at a cache: rows are written without them, and `backward` through a cache is refused.

A cache holds rows in place, outlives every graph, and other requests' rows lie beside. So no row joins a graph; and
since a result without one would leave gradients out in silence, it has one that raises. Knows torch only.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import StateError

__all__ = ["refuse_backward", "wants_gradient"]


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Return whether torch would record what is computed from one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def refuse_backward(result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """Return `result` itself, now computed from `sources` as far as torch knows; `backward` through it raises.

    Parameters
    ----------
    result : Tensor
        Part of no graph, and nobody else's.
    *sources : Tensor
        At least one requires a gradient.
    """
    refused: torch.Tensor = _Refusal.apply(result, *sources)  # type: ignore[no-untyped-call]
    return refused


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(result)  # so this very tensor is returned, no view of it that could not be changed in place
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise StateError(
            "backward through a KV cache: rows are kept without gradients, so those of K and V would be lost; compute "
            "without a cache to train, or under torch.no_grad() to infer"
        )
