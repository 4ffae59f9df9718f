"""Greedy tokens: a model's own, and those of an engine in half precision, equal to them or tied within rounding."""

from __future__ import annotations

import inspect

import torch

MAX_TOKENS = 24
"""Tokens that each request generates."""


def generate(model, ids, cache=None, **options):
    """`model.generate` without sampling and past ends of text; `options` replace what is set here.

    transformers is renaming the argument `past_key_values` to `cache`.
    """
    settings = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(ids)} | options
    if cache is not None:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        settings[name] = cache
    return model.generate(ids, **settings)


def logits_after(model, prompt, tokens):
    """Logits that each token was chosen from, the whole request computed at once."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    with torch.inference_mode():
        return model(ids, logits_to_keep=len(tokens)).logits[0].float()


def check(model, exact, prompts, found):
    """Every token must be the model's likeliest, or tie with it: no further below than rounding moves logits.

    The model computes each request at once, the engine in pieces, so both round, each in its way. The standard
    deviation of rounding is measured against exact logits; four roundings, two of each, stand between two logits here
    and there, and a tie is allowed three standard deviations. Returns how many tokens tied.
    """
    exact_logits = [logits_after(exact, *one) for one in zip(prompts, found, strict=True)]
    logits = [logits_after(model, *one) for one in zip(prompts, found, strict=True)]
    rounding = float((torch.cat(logits) - torch.cat(exact_logits)).std())
    limit, spread = 3 * 2 * rounding, float(torch.cat(exact_logits).std())
    ties, worst = 0, 0.0
    for rows, tokens in zip(logits, found, strict=True):
        gaps = rows.max(dim=-1).values - rows[torch.arange(len(tokens)), tokens]
        ties, worst = ties + int((gaps > 0).sum()), max(worst, float(gaps.max()))
    total = sum(map(len, found))
    print(f"{ties} of {total} tokens tie, the furthest by {worst:.3f} of {limit:.3f}; logits spread by {spread:.3f}")
    assert total == len(prompts) * MAX_TOKENS
    assert worst < limit < spread
    assert ties <= total // 10
    return ties
