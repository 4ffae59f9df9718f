"""One forward of a model over a packed step. Knows the model and the attention backend; neither queues nor pages."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import AttentionBackend, Batch
from ..attention.batch import PADDED
from ..errors import ConfigError, StateError
from ..integrations.transformers import ATTENTION_NAME
from .graphs import DecodeGraphs
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
    cuda_graphs : bool, optional
        Whether decode steps are captured; by default where backend and model can be.

    Raises
    ------
    ConfigError
        The model is in training mode, or graphs are wanted and cannot be had.
    StateError
        Another engine uses the model.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend, *, cuda_graphs: bool | None = None) -> None:
        if model.training:
            raise ConfigError("the model is in training mode; call model.eval()")
        if model.config._attn_implementation == ATTENTION_NAME:
            raise StateError("another engine uses the model; close it first")
        if cuda_graphs is None:
            cuda_graphs = DecodeGraphs.obstacle(model, backend) is None
        self.model = model
        self.backend = backend
        self.graphs = DecodeGraphs(model, backend) if cuda_graphs else None
        self._former_attention = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """Compute a step, K and V going to the cache.

        Returns
        -------
        Tensor
            ``[n, vocabulary]``: logits after the last token of the `n` requests whose pending tokens end here, in
            packed order. The next call may overwrite them.
        """
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise StateError(
                f"the model's attention was set to {self.model.config._attn_implementation!r} while an engine uses it"
            )
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
        batch = Batch(reqids, plan.q_lens, seq_lens)
        self.backend.plan(batch)
        # The head runs on the wanted rows only: logits of every prompt token would be the largest tensor of the step.
        output = self.model(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(batch.positions())[None],
            use_cache=False,
            logits_to_keep=self._tensor(rows),
            slicedkv_backend=self.backend,
        )
        logits: Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Give the model its former attention back, and the memory of graphs to torch."""
        self.graphs = None
        self.model.set_attn_implementation(self._former_attention)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.backend.device, non_blocking=True)
