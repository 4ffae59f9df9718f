"""Arithmetic of layouts: rows that do not divide a page, strides, capacity, waste; cases E1 and A1's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicedkv.errors import ConfigError
from slicedkv.layout import K, KVLayout, V, align_up, ceil_div, paged_kv_bytes
from slicedkv.layout import __doc__ as layout_docstring

MIB2 = 2 << 20
LLAMA3_8B = KVLayout("sliced", 32, 8, 128, 2, 4, 131072, MIB2)

layouts = st.builds(
    KVLayout,
    kind=st.sampled_from(["sliced", "interleaved", "per_layer"]),
    num_layers=st.integers(1, 9),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 7, 64, 80, 128]),
    itemsize=st.sampled_from([1, 2, 4]),
    max_batch_size=st.integers(1, 5),
    max_seq_len=st.integers(1, 3000),
    page_bytes=st.sampled_from([4096, 65536, MIB2]),
    guard_tokens=st.integers(0, 70),
)


@given(st.integers(0, 2**70), st.integers(1, 2**40))
def test_rounding_up_is_exact(value: int, divisor: int) -> None:
    quotient, multiple = ceil_div(value, divisor), align_up(value, divisor)
    assert multiple == quotient * divisor
    assert value <= multiple < value + divisor


def test_the_slot_drawn_in_the_docstring() -> None:
    layout = KVLayout("per_layer", 1, 1, 3, 2, 1, 6, 16, guard_tokens=1)
    assert (layout.row_bytes, layout.rows_per_slot, layout.slot_stride_bytes) == (6, 7, 48)
    spans = [layout.page_span(row, row + 1) for row in range(7)]
    assert spans == [(0, 1), (0, 1), (0, 2), (1, 2), (1, 2), (1, 3), (2, 3)]
    assert (layout.pages_for(4), layout.pages_for(5), layout.tokens_backed(2)) == (2, 3, 4)
    pages, rows = (
        line.split(maxsplit=1)[1]
        for line in (layout_docstring or "").splitlines()
        if line.strip().startswith(("pages  |", "rows   |"))
    )
    assert [at for at, mark in enumerate(pages) if mark == "|"] == [0, 16, 32, 48]
    assert [at for at, mark in enumerate(rows) if mark == "|"] == [0, 6, 12, 18, 24, 30, 36, 42, 48]


@given(layouts)
def test_pages_and_tokens_are_inverse(layout: KVLayout) -> None:
    for seq_len in {0, 1, layout.max_seq_len // 2, layout.max_seq_len}:
        pages = layout.pages_for(seq_len)
        assert layout.tokens_backed(pages) >= seq_len
        if pages:
            assert pages * layout.page_bytes >= min(seq_len + layout.guard_tokens, layout.rows_per_slot) * (
                layout.row_bytes
            )
            assert layout.tokens_backed(pages - 1) < seq_len
    assert layout.pages_for(layout.max_seq_len) == layout.pages_per_slot


@given(layouts)
def test_slots_never_share_a_page_and_slices_stay_inside(layout: KVLayout) -> None:
    assert layout.slot_stride_bytes % layout.page_bytes == 0
    assert layout.slot_stride_bytes == align_up(layout.rows_per_slot * layout.row_bytes, layout.page_bytes)
    last_element = layout.num_kv_heads * layout.head_dim - 1
    seen = set()
    for layer in range(layout.num_layers):
        for which in (K, V):
            plane, offset, strides = layout.slice_geometry(layer, which)
            end = (layout.max_batch_size - 1) * strides[0] + (layout.max_seq_len - 1) * strides[1] + offset
            assert (end + last_element + 1) * layout.itemsize <= layout.plane_bytes
            assert 0 <= plane < layout.num_planes
            assert offset + last_element < layout.row_elements
            seen.add((plane, offset))
    assert len(seen) == 2 * layout.num_layers


@given(layouts)
def test_every_kind_holds_the_same_bytes_a_token(layout: KVLayout) -> None:
    assert layout.token_bytes == 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * layout.itemsize


def test_rows_that_do_not_divide_a_page() -> None:
    layout = KVLayout("sliced", 28, 8, 128, 2, 2, 1000, MIB2)
    assert layout.row_bytes == 57_344
    assert (layout.pages_for(36), layout.pages_for(37)) == (1, 2)
    assert replace(layout, num_layers=60, num_kv_heads=4).row_bytes == 61_440
    smollm2 = KVLayout("sliced", 30, 3, 64, 2, 2, 2048, MIB2)
    assert (smollm2.row_bytes, smollm2.pages_for(182), smollm2.pages_for(183)) == (11_520, 1, 2)


def test_known_shapes() -> None:
    assert LLAMA3_8B.row_bytes == 65_536
    assert LLAMA3_8B.tokens_per_page == 32
    assert LLAMA3_8B.slot_stride_bytes // LLAMA3_8B.itemsize == 2**32
    assert replace(LLAMA3_8B, kind="per_layer").num_planes == 64
    assert replace(LLAMA3_8B, kind="interleaved").tokens_per_page == 16


def test_waste_and_capacity() -> None:
    assert LLAMA3_8B.waste_bytes(33) == 2 * 2 * MIB2 - 33 * LLAMA3_8B.token_bytes
    assert LLAMA3_8B.waste_bytes(0) == 0
    assert LLAMA3_8B.capacity(80 << 30, 1024) == (80 << 30) // (1024 * LLAMA3_8B.token_bytes)
    assert LLAMA3_8B.capacity(80 << 30, 0) == LLAMA3_8B.max_batch_size
    per_layer = replace(LLAMA3_8B, kind="per_layer")
    assert per_layer.bytes_for(1) == 64 * MIB2
    assert replace(per_layer, page_bytes=65536).bytes_for(1) == LLAMA3_8B.bytes_for(1)
    assert paged_kv_bytes(100, 17) == 3200


def test_guard_rows_are_part_of_the_slot_and_of_the_pages() -> None:
    guarded = replace(LLAMA3_8B, guard_tokens=16)
    assert guarded.pages_for(17) == 2
    assert guarded.tokens_backed(1) == 16
    assert guarded.pages_per_slot == LLAMA3_8B.pages_per_slot + 1
    assert guarded.pages_for(0) == 0


@pytest.mark.parametrize("layer", [-1, 32])
def test_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match=f"layer is {layer}"):
        LLAMA3_8B.slice_geometry(layer, K)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="'paged'"):
        replace(LLAMA3_8B, kind="paged")
