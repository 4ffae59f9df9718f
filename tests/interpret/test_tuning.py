"""Launch choices: there is one for every architecture, and splits fill the GPU without cutting too fine."""

from __future__ import annotations

import pytest

from slicedkv.triton_kernels.tuning import append_tile, choose_splits, decode_tile, prefill_tile


@pytest.mark.parametrize("capability", [(0, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (13, 0)])
def test_every_architecture_has_choices(capability: tuple[int, int]) -> None:
    for itemsize in (1, 2, 4):
        assert decode_tile(capability, itemsize).tile_bytes >= 4096
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for itemsize in (2, 4):
            tile = prefill_tile(capability, itemsize, head_dim)
            assert tile.rows % 16 == tile.tokens % 16 == 0


@pytest.mark.parametrize(("programs", "tokens"), [(8, 64), (1024, 1024), (5000, 4096)])
def test_what_is_small_or_fills_the_gpu_is_not_split(programs: int, tokens: int) -> None:
    assert choose_splits(programs, tokens, 64, 264) == 1


@pytest.mark.parametrize(("programs", "tokens"), [(1, 16384), (8, 131072), (16, 131072), (32, 65536)])
def test_parts_fill_the_gpu_in_whole_rounds(programs: int, tokens: int) -> None:
    splits = choose_splits(programs, tokens, 64, 132)
    rounds = -(-programs * splits // 132)
    assert splits > 1
    assert programs * splits > 0.9 * rounds * 132
    assert -(-tokens // splits) > 64, "less than a tile each"


def test_splits_are_never_more_than_tiles() -> None:
    for programs in (1, 7, 100, 5000):
        for tokens in (1, 63, 64, 65, 1000, 10**6):
            assert 1 <= choose_splits(programs, tokens, 64, 264) <= min(256, -(-tokens // 64))


def test_few_tokens_get_small_tiles() -> None:
    assert append_tile(64, 8, 132).tokens < append_tile(4096, 8, 132).tokens
