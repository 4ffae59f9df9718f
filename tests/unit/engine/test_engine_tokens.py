"""The engine's greedy tokens are those of `model.generate` with DynamicCache, one request at a time.

Every run has more requests than slots, prompts longer than a step's budget, requests that cross pages, and so little
memory that requests are preempted; counters prove it.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from greedy import MAX_TOKENS, generate

from slicedkv.engine import SamplingParams

KIB, MIB = 1 << 10, 1 << 20
# Shapes that fill pages of each size within a few hundred tokens.
SHAPES = {
    64 * KIB: {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    2 * MIB: {
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "num_hidden_layers": 2,
        "hidden_size": 64,
    },
}
# Batching changes the order of sums. In half precision the two likeliest tokens may swap when their logits are closer
# than this share of the logits' spread.
TIE = {torch.float32: 0.0, torch.float16: 0.02, torch.bfloat16: 0.1}
# So many of the six requests, 24 tokens each, may meet such a tie.
MOST_TIES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}


def generate_alone(model, prompt):
    """Tokens of one prompt with DynamicCache, and the logits each was chosen from."""
    found = generate(model, torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True)
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).float()


def count_ties(expected, logits, tokens, tie):
    """Return 0 when the tokens are equal, 1 when they part at a tie; parting anywhere else fails."""
    assert len(tokens) == len(expected)
    for step, (wanted, token) in enumerate(zip(expected, tokens, strict=True)):
        if token != wanted:
            gap = (logits[step, wanted] - logits[step, token]) / logits[step].std()
            assert gap < tie, f"token {step} is {token}, not {wanted}, though their logits differ by {gap:.3f} spreads"
            return 1
    return 0


def check(make_engine, model, *, page_bytes, layout="sliced", **options):
    """Serve six prompts around a page's end in memory for three pages, and compare."""
    settings = {"page_bytes": page_bytes, "layout": layout, "max_batch_size": 3, **options}
    with make_engine(model, max_seq_len=64, **settings) as probe:
        geometry = probe.cache.layout
    page = geometry.tokens_per_page
    random = torch.Generator().manual_seed(page)
    lengths = [page - 3, page - 5, page // 3, page + 7, 5, page - 2]
    prompts = [torch.randint(3, 61, (length,), generator=random).tolist() for length in lengths]
    alone = [generate_alone(model, prompt) for prompt in prompts]

    settings["memory_limit"] = 3 * geometry.num_planes * page_bytes
    settings["max_tokens_per_step"] = budget = max(8, page // 2)
    records = []
    engine = make_engine(model, max_seq_len=page + 40, on_step=records.append, **settings)
    tokens = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))

    assert engine.scheduler.num_preemptions > 0
    assert max(record.num_tokens for record in records) == budget < max(lengths)
    assert max(max(record.seq_lens) for record in records) > page
    assert max(record.mapped_bytes for record in records) == settings["memory_limit"]
    assert engine.cache.stats().pages_reused > 0
    ties = [count_ties(*one, found, TIE[model.dtype]) for one, found in zip(alone, tokens, strict=True)]
    assert sum(ties) <= MOST_TIES[model.dtype], f"{sum(ties)} of {len(ties)} requests met a tie"
    return sum(ties)


LAYOUTS = ["sliced", "interleaved", "per_layer"]


def case(page_bytes, layout, dtype):
    """Half precision takes long on a CPU."""
    quick = dtype == torch.float32 or (page_bytes == 64 * KIB and layout == "sliced")
    name = f"{page_bytes >> 10}KiB-{layout}-{str(dtype)[6:]}"
    return pytest.param(page_bytes, layout, dtype, id=name, marks=[] if quick else [pytest.mark.thorough])


CASES = [case(*values) for values in product(SHAPES, LAYOUTS, TIE)]


@pytest.mark.parametrize(("page_bytes", "layout", "dtype"), CASES)
def test_llama(make_engine, tiny_model, record_property, page_bytes, layout, dtype):
    model = tiny_model("llama", dtype, **SHAPES[page_bytes])
    record_property("ties", check(make_engine, model, page_bytes=page_bytes, layout=layout))


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {"hidden_size": 512}), ("qwen3", {}), ("mistral", {}), ("mistral", {"sliding_window": 400})],
)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_other_families(make_engine, tiny_model, family, options, backend):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if family != "qwen2":
        shape["head_dim"] = 64
    check(make_engine, tiny_model(family, **shape, **options), page_bytes=64 * KIB, backend=backend)


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_mappers(make_engine, tiny_model, mapper):
    check(make_engine, tiny_model("llama", **SHAPES[64 * KIB]), page_bytes=64 * KIB, mapper=mapper)
