"""`probe`: does a model give the same logits for prompts packed into one row as for each prompt alone?

An engine asks once, when it opens. It computes two short prompts packed in one step, and a decode step of each; then
each alone, by the model's own forward with its own attention. The logits differ if a model counts tokens instead of
reading their positions, attends in a way that a plan cannot say, or does anything else that holds only for one text a
row.

One prompt begins at position 0. The other ends at the last position that the engine can reach, since some models treat
long texts in another way: they tune scores to the distance, or change rotary frequencies. The tokens before it are not
computed. Alone, the prompt runs over a cache which says that those tokens have left a window; packed, it gets the same
positions and lies in the first rows of a slot.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..attention import Batch
from ..attention.base import FLOAT8_DTYPES
from ..cache import SlicedKVCache
from ..errors import BackendUnavailableError, CapacityError, ConfigError, DriverError
from ..integrations.servable import decoder_config
from .runner import ModelRunner

__all__ = ["probe"]

_PROMPT_TOKENS = (3, 2)  # of unequal length, so that places in the row and positions differ everywhere
# How far packed logits may lie from the model's own, as a share of their spread over the vocabulary, root mean square.
# Measured on a model of 30 layers, rounding reaches 9e-6 in float32, 0.04 in bfloat16, and 0.35 over a float8 cache.
_EXACT = 2e-4
_SHORTENED = 0.01  # float32 whose products may be rounded to fewer bits
_HALF = {torch.float16: 0.05, torch.bfloat16: 0.25}
_FLOAT8, _FLOAT8_OF_HALF = 0.1, 0.7
_ATTEMPTS = 3  # rounding may choose another expert for some tokens; a wrong model is wrong for all


class _Prompt(NamedTuple):
    """A prompt and one token behind it, and the position of its first token."""

    tokens: list[int]
    start: int

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.start + len(self.tokens)))


def probe(runner: ModelRunner, cache: SlicedKVCache) -> None:
    """Compute a few tokens packed and alone, and compare. Cache, model and settings are as before afterwards.

    Parameters
    ----------
    runner : ModelRunner
        Of the model and the engine's backend.
    cache : SlicedKVCache
        All its slots are idle. With one slot, or memory for one request, it computes one prompt; with memory for none,
        it computes nothing.

    Raises
    ------
    ConfigError
        The model cannot be served: its logits differ, or a layer asks for what the engine cannot do.
    CapacityError, DriverError, BackendUnavailableError, torch.OutOfMemoryError
        The machine cannot do it.
    """
    tolerance = _tolerance(runner.model.dtype, cache.dtype)
    for attempt in range(1 if tolerance == _EXACT else _ATTEMPTS):
        prompts = _prompts(runner.model, cache, attempt)
        found = _packed(runner, cache, prompts)
        with runner.attention.restored():
            alone = [_alone(runner.model, prompt, cache.dtype) for prompt in prompts[: len(found)]]
        difference = _difference(prompts, found, alone, tolerance)
        if difference is None:
            return
    raise ConfigError(
        f"{type(runner.model).__name__} cannot be served: packed with other requests it computes {difference}. It may "
        "count the tokens of a step instead of using their positions, or attend to more than the tokens before. "
        "probe=False serves it all the same"
    )


def _tolerance(dtype: torch.dtype, cache_dtype: torch.dtype) -> float:
    if cache_dtype in FLOAT8_DTYPES:
        return _FLOAT8_OF_HALF if dtype in _HALF else _FLOAT8
    exact = _EXACT if torch.get_float32_matmul_precision() == "highest" else _SHORTENED
    return _HALF.get(dtype, exact)


def _prompts(model: PreTrainedModel, cache: SlicedKVCache, attempt: int) -> list[_Prompt]:
    longest = cache.layout.max_seq_len
    lengths = [min(length + 1, longest) for length in _PROMPT_TOKENS][-cache.layout.max_batch_size :]
    tokens = iter(_tokens(model, sum(lengths), attempt))
    prompts = [[next(tokens) for _ in range(length)] for length in lengths]
    starts = [0] * (len(prompts) - 1) + [longest - lengths[-1]]
    return [_Prompt(*one) for one in zip(prompts, starts, strict=True)]


def _tokens(model: PreTrainedModel, count: int, attempt: int) -> list[int]:
    """Return ordinary tokens from all over the vocabulary, none for padding, pictures or ends."""
    config = decoder_config(model)
    fields = [*model.config.to_dict().items(), *config.to_dict().items()]
    special = {value for name, value in fields if name.endswith(("token_id", "token_index")) and isinstance(value, int)}
    ordinary = [token for token in range(min(config.vocab_size, 4096)) if token not in special] or [0]
    return [
        ordinary[(7 * attempt + (2 * place + 1) * len(ordinary) // (2 * count)) % len(ordinary)]
        for place in range(count)
    ]


@torch.inference_mode()
def _packed(runner: ModelRunner, cache: SlicedKVCache, prompts: Sequence[_Prompt]) -> list[Tensor]:
    """Logits of every token of the prompts that memory suffices for, computed as an engine does."""
    before = cache.stats().mapped_bytes
    slots: list[int] = []
    try:
        lengths: dict[int, int] = {}
        for prompt in prompts:
            slots.append(cache.alloc_reqid())
            lengths[slots[-1]] = len(prompt.tokens)
            if not cache.step(lengths):
                cache.free_reqid(slots.pop())
                break
        return _compute(runner, slots, prompts[: len(slots)]) if slots else []
    finally:
        for slot in slots:
            cache.free_reqid(slot)
        if cache.stats().mapped_bytes > before:
            cache.trim()


def _compute(runner: ModelRunner, slots: list[int], prompts: Sequence[_Prompt]) -> list[Tensor]:
    """Compute a step with all but the last token of each prompt, then a step with the last ones."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    firsts = [max(1, length - 1) for length in lengths]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for begins, ends in (([0] * len(prompts), firsts), (firsts, lengths)):
        spans = list(zip(prompts, begins, ends, strict=True))
        q_lens = [end - begin for _, begin, end in spans]
        if not all(q_lens):  # max_seq_len is 1
            break
        tokens = [token for prompt, begin, end in spans for token in prompt.tokens[begin:end]]
        positions = [place for prompt, begin, end in spans for place in prompt.positions[begin:end]]
        logits = _forward(runner, Batch(slots, q_lens, ends), tokens, positions)
        for part, rows in zip(parts, torch.split(logits, q_lens), strict=True):
            part.append(rows.float())
    return [torch.cat(part) for part in parts]


def _forward(runner: ModelRunner, batch: Batch, tokens: list[int], positions: list[int]) -> Tensor:
    try:
        return runner.compute(batch, tokens, range(len(tokens)), positions).clone()
    except (BackendUnavailableError, CapacityError, DriverError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        name = type(runner.model).__name__
        raise ConfigError(f"{name} cannot be served: in a forward over packed requests, {error}") from error


@torch.inference_mode()
def _alone(model: PreTrainedModel, prompt: _Prompt, dtype: torch.dtype) -> Tensor:
    """Logits of every token of one prompt, computed as `generate` would in its first step, K and V kept in `dtype`."""
    layers = decoder_config(model).num_hidden_layers
    forward = inspect.signature(type(model).forward).parameters
    name = "past_key_values" if "past_key_values" in forward else "cache"
    past: dict[str, Any] = {name: Cache(layers=[_LateLayer(prompt.start, dtype) for _ in range(layers)])}
    ids, positions = (torch.tensor([values], device=model.device) for values in (prompt.tokens, prompt.positions))
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=True, **past).logits[0]
    return logits.float()


class _LateLayer(DynamicLayer):
    """A layer which says that `start` tokens have left its window. Those behind attend to each other only."""

    def __init__(self, start: int, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start, self._dtype = start, dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kept = (rows.to(self._dtype).to(rows.dtype) for rows in (key_states, value_states))
        return super().update(*kept, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self._start + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, self._start


def _difference(
    prompts: Sequence[_Prompt], found: Sequence[Tensor], alone: Sequence[Tensor], tolerance: float
) -> str | None:
    """Say where packed logits are further from the model's own than the tolerance, and how far; None: nowhere."""
    for index, (prompt, packed, own) in enumerate(zip(prompts, found, alone, strict=False)):
        finite = own.isfinite()
        count = finite.sum(dim=-1).clamp(min=1)
        middle = own.where(finite, 0).sum(dim=-1, keepdim=True) / count[:, None]
        spread = ((own - middle).where(finite, 0).square().sum(dim=-1) / count).sqrt()
        gap = ((packed - own).where(finite, 0).square().sum(dim=-1) / count).sqrt()
        share = gap / spread.clamp(min=torch.finfo(torch.float32).tiny)
        wrong = ~(share <= tolerance)  # NaN is wrong, too
        if wrong.any():
            row = int(wrong.nonzero()[0])
            step = "prompt" if row < max(1, len(prompt.tokens) - 1) else "decode step"
            return (
                f"other logits than alone: those of prompt {index + 1} of {len(found)} (tokens {prompt.tokens} from "
                f"position {prompt.start} on) at position {prompt.positions[row]}, in its {step}, are off by "
                f"{float(share[row]):.2g} of their spread, {tolerance:.2g} is allowed"
            )
    return None
