"""Checks of what users submit: prompts as strings or token ids, one or many, and how to sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .request import SamplingParams

__all__ = ["Prompt", "check_params", "check_prompts", "token_ids"]

Prompt = str | Sequence[int]


def token_ids(prompt: Prompt, tokenizer: Callable[[str], Any] | None) -> Sequence[int]:
    """Return the tokens of a prompt. The model need not know them.

    Raises
    ------
    ConfigError
        It is neither a string nor a sequence, or a string and there is no tokenizer.
    """
    if not isinstance(prompt, str):
        if not _is_list(prompt):
            raise ConfigError(f"the prompt is {_shown(prompt)}; it must be a string or a list of token ids")
        return prompt
    if tokenizer is None:
        raise ConfigError("the prompt is a string; pass token ids, or open the engine with a tokenizer")
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def check_prompts(prompts: Any, params: Any) -> list[SamplingParams]:
    """Return the parameters of each of many prompts.

    Raises
    ------
    ConfigError
        It is one prompt instead of a list of them, or the parameters do not fit.
    """
    if isinstance(prompts, (str, bytes)):
        raise ConfigError(f"prompts is one string, {_shown(prompts)}; pass a list of prompts, [{_shown(prompts)}]")
    if not _is_list(prompts):
        raise ConfigError(f"prompts is {_shown(prompts)}; it must be a list of strings or of lists of token ids")
    first = prompts[0] if len(prompts) else ""
    if not isinstance(first, str) and not _is_list(first):
        raise ConfigError(f"prompts begins with {_shown(first)}; for one prompt of tokens pass a list of it, [[...]]")
    if not isinstance(params, Sequence):
        return [check_params(params)] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(
            f"{len(prompts)} prompts came with {len(params)} parameters; give one for each, or one for all"
        )
    return [check_params(own) for own in params]


def check_params(params: Any) -> SamplingParams:
    """Return sampling parameters, the defaults for None.

    Raises
    ------
    ConfigError
        It is something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is {_shown(params)}; it must be SamplingParams")
    return params


def _is_list(value: Any) -> bool:
    """True for what has a length and an order: lists, tuples, arrays and tensors of at least one dimension."""
    try:
        len(value)
    except TypeError:
        return False
    return hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
