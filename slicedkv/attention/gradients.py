"""Gradients end at a cache: it keeps rows without them, and `backward` through it raises.

A cache outlives every graph and keeps rows in place, beside those of other requests. So no row joins a graph. A result
outside every graph would lose gradients in silence, so a result that should have a gradient gets a graph that raises.
Knows torch only.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import StateError

__all__ = ["refuse_backward", "wants_gradient"]


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Return whether torch would record what is computed from these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def refuse_backward(result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """Return `result` itself, recorded as computed from `sources`; `backward` through it raises `StateError`.

    Parameters
    ----------
    result : Tensor
        It belongs to no graph, and the caller alone has it.
    *sources : Tensor
        At least one requires a gradient.
    """
    refused: torch.Tensor = _Refusal.apply(result, *sources)  # type: ignore[no-untyped-call]
    return refused


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(result)  # returns this very tensor: a view could not be changed in place
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise StateError(
            "backward through a KV cache: rows are kept without gradients, so those of K and V would be lost; compute "
            "without a cache to train, or under torch.no_grad() to infer"
        )
