"""Decode steps of a model as CUDA graphs, one for each padded number of requests.

A step of one token a request launches the same kernels every time; a captured step costs the host one launch. Kernels
read lengths, slots and tokens from memory that stays in place. So between two replays requests come, grow and go, and
the cache maps pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import AttentionBackend, Batch
from ..attention.batch import PADDED
from ..errors import ConfigError
from ..integrations.servable import decoder_config, layer_kinds, moving_rope
from .counted import CountedBackend

__all__ = ["DecodeGraphs", "graph_sizes"]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """Captures a size when it is first needed, and replays it from then on.

    Parameters
    ----------
    model : PreTrainedModel
    backend : AttentionBackend

    Raises
    ------
    ConfigError
        The backend or the model cannot be captured; see `obstacle`.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        reason = self.obstacle(model, backend)
        if reason:
            raise ConfigError(f"decode steps cannot be captured in CUDA graphs: {reason}; pass cuda_graphs=False")
        self._model, self._backend = model, backend
        self._kinds = layer_kinds(decoder_config(model), backend.max_seq_len)
        self._sizes = graph_sizes(backend.max_batch_size)
        self._inputs = torch.zeros(2 * backend.max_batch_size, dtype=torch.int64, device=backend.device)
        self._captured: dict[int, _Captured] = {}

    @staticmethod
    def obstacle(model: PreTrainedModel, backend: AttentionBackend) -> str | None:
        """Return why steps cannot be captured, or None."""
        if not backend.captures:
            return f"attention backend {backend.name!r} on {backend.device} does not support it"
        for kind, _ in moving_rope(decoder_config(model)):
            return f"rope_type {kind!r} looks at the positions of each step on the host"
        return None

    @property
    def num_captured(self) -> int:
        """Sizes captured so far."""
        return len(self._captured)

    def forward(self, tokens: list[int], reqids: list[int], seq_lens: list[int]) -> Tensor:
        """Compute one token of each request, K and V going to the cache.

        Parameters
        ----------
        tokens, reqids, seq_lens : list of int
            Of each request: the token, its slot, and its length with it.

        Returns
        -------
        Tensor
            ``[len(tokens), vocabulary]``, overwritten by the next call.
        """
        count = len(tokens)
        size = next(size for size in self._sizes if size >= count)
        padding = [0] * (size - count)
        positions = [seq_len - 1 for seq_len in seq_lens]
        padded = Batch([*reqids, *[PADDED] * len(padding)], [1] * size, [*seq_lens, *padding])
        numbers = [*tokens, *padding, *positions, *padding]
        values = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
        self._inputs[: 2 * size].copy_(values, non_blocking=True)
        self._backend.plan(padded, graph=True)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        graph, logits = self._captured[size]
        graph.replay()
        return logits[:count]

    def _capture(self, size: int) -> _Captured:
        """Capture the planned step.

        The step runs once before, so that libraries and kernels are loaded. The first replay appends its rows again.
        """
        current, side = torch.cuda.current_stream(self._backend.device), _capture_stream(self._backend.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._run(size)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._captured.values())).graph.pool() if self._captured else None
        # Other threads, such as the mapper's, go on with their calls meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            logits = self._run(size)
        return _Captured(graph, logits)

    def _run(self, size: int) -> Tensor:
        counted = CountedBackend(self._backend, self._kinds)
        output = self._model(
            input_ids=self._inputs[None, :size],
            position_ids=self._inputs[None, size : 2 * size],
            use_cache=False,
            slicedkv_backend=counted,
        )
        counted.check()
        logits: Tensor = output.logits[0]
        return logits


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for captures: libraries keep a workspace for every stream that they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the numbers of requests to capture, up to `max_batch_size`: few, but with little padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch_size + 1, 32)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]
