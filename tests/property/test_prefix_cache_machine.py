"""Any prompts, next turns and aborts over a prefix cache of any size: every row is right and no page is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_serving import Served, options

from slicedkv import SlicedKVCache

PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 3), st.integers(1, 30), st.integers(1, 20))


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(st.one_of(PROMPTS, st.integers(0, 8)), min_size=1, max_size=10),
    pages=st.integers(16, 24),
    slots=st.integers(1, 4),
    budget=st.integers(4, 70),
    limit_pages=st.integers(0, 24),
    shape=st.sampled_from(["sliced", "interleaved", "per_layer"]),
    extent_pages=st.sampled_from([1, 4]),
    head_dim=st.sampled_from([64, 80]),
    zero_on_reuse=st.booleans(),
    guard_tokens=st.sampled_from([0, 3]),
)
def test_everybody_finishes_with_rows_of_its_own(prompts, pages, slots, budget, limit_pages, shape, **more):
    """Whatever comes in whatever order: new prompts, next turns, aborts; every row is right and no page is lost."""
    pages *= 2 if shape == "per_layer" else 1
    with SlicedKVCache(**options(pages, slots, layout=shape, **more)) as cache:
        served = Served(cache, limit_pages, budget)
        for prompt in prompts:
            if isinstance(prompt, tuple):
                kind, shared, other, own, max_tokens = prompt
                served.add([kind + 1] * shared + [other + 10] * own, max_tokens)
            elif served.requests:
                earlier = served.requests[prompt % len(served.requests)]
                if prompt % 3 == 0:
                    served.scheduler.abort(earlier)
                else:
                    served.add([*earlier.token_ids(0, 90), prompt], 5)
            served.step()
            served.check_books()
        served.run()
        served.check_books()
        for request in served.requests:
            assert request.num_cached_tokens % cache.layout.tokens_per_page == 0
        served.prefixes.clear()
        assert (cache.stats().active_slots, served.prefixes.held_bytes) == (0, 0)
        cache.check_integrity()
