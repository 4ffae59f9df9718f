"""`ModelRunner`: one forward of a model over a packed step, through an attention backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import AttentionBackend, Batch
from ..attention.batch import PADDED
from ..integrations.servable import decoder_config, layer_kinds
from .counted import CountedBackend
from .graphs import DecodeGraphs
from .model_attention import ModelAttention
from .plan import StepPlan

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs a model with its attention set to "slicedkv" until `close`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model in evaluation mode.
    backend : AttentionBackend
        Over the cache that the scheduler steps.
    attention : ModelAttention
        Of the model.
    cuda_graphs : bool, optional
        Capture decode steps; by default if backend and model can be captured.

    Raises
    ------
    ConfigError
        `cuda_graphs` is True, and backend or model cannot be captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        attention: ModelAttention,
        *,
        cuda_graphs: bool | None = None,
    ) -> None:
        if cuda_graphs is None:
            cuda_graphs = DecodeGraphs.obstacle(model, backend) is None
        self.model = model
        self.backend = backend
        self.attention = attention
        self.graphs = DecodeGraphs(model, backend) if cuda_graphs else None
        self._kinds = layer_kinds(decoder_config(model), backend.max_seq_len)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """Compute a step; its K and V go to the cache.

        Returns
        -------
        Tensor
            ``[n, vocabulary]``: the logits after the last token of each request that has no pending token after this
            step, in packed order. The next call may overwrite them.
        """
        self.attention.check()
        tokens: list[int] = []
        reqids, seq_lens, rows = [], [], []
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            tokens += request.pending_ids(q_len)
            reqids.append(PADDED if request.reqid is None else request.reqid)
            seq_lens.append(request.num_computed + q_len)
            if q_len == request.num_pending:
                rows.append(len(tokens) - 1)
        if self.graphs is not None and len(rows) == len(tokens) == len(reqids):
            return self.graphs.forward(tokens, reqids, seq_lens)
        return self.compute(Batch(reqids, plan.q_lens, seq_lens), tokens, rows)

    @torch.inference_mode()
    def compute(
        self, batch: Batch, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int] | None = None
    ) -> Tensor:
        """Compute a batch without a graph.

        Parameters
        ----------
        batch : Batch
            With every row backed.
        tokens : sequence of int
            Packed.
        rows : sequence of int
            Which tokens to return logits for.
        positions : sequence of int, optional
            Of the tokens; by default those of the batch.

        Returns
        -------
        Tensor
            ``[len(rows), vocabulary]``.

        Raises
        ------
        ConfigError
            A layer of the model attends more or less than once, or asks for what the backend cannot do.
        """
        self.backend.plan(batch)
        counted = CountedBackend(self.backend, self._kinds)
        # The head runs on the wanted rows only: logits of every prompt token would be the largest tensor of the step.
        output = self.model(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(batch.positions() if positions is None else positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(rows),
            slicedkv_backend=counted,
        )
        counted.check()
        logits: Tensor = output.logits[0]
        # Some models return the logits of every token, whatever one asks for.
        return logits if len(logits) == len(rows) else logits[self._tensor(rows)]

    def close(self) -> None:
        """Give the model its former attention back, and the memory of graphs to torch."""
        self.graphs = None
        self.attention.restore()

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.backend.device, non_blocking=True)
