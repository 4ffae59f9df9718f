"""Launch choices: there is one for every architecture, and splits fill the GPU without cutting too fine."""

from __future__ import annotations

import pytest

from slicedkv.triton_kernels.tuning import DecodeTile, append_tile, choose_splits, decode_tile, prefill_tile

HOPPER = decode_tile((9, 0), 2)


@pytest.mark.parametrize("capability", [(0, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (13, 0)])
def test_every_architecture_has_choices(capability: tuple[int, int]) -> None:
    for itemsize in (1, 2, 4):
        assert decode_tile(capability, itemsize).tile_bytes >= 4096
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for itemsize in (2, 4):
            tile = prefill_tile(capability, itemsize, head_dim)
            assert tile.rows % 16 == tile.tokens % 16 == 0


@pytest.mark.parametrize(("lanes", "tiles"), [(1, 1), (16, 16), (128, 16), (600, 64)])
def test_what_is_small_or_fills_the_gpu_is_not_split(lanes: int, tiles: int) -> None:
    assert choose_splits(lanes, 8, tiles, 132, HOPPER) == 1


@pytest.mark.parametrize(("lanes", "blocks", "tiles"), [(1, 1, 256), (1, 8, 2048), (2, 8, 2048), (4, 8, 1024)])
def test_parts_fill_the_gpu_in_whole_rounds(lanes: int, blocks: int, tiles: int) -> None:
    splits = choose_splits(lanes, blocks, tiles, 132, HOPPER)
    programs = lanes * blocks * splits
    assert splits > 1
    assert programs > 0.9 * -(-programs // 132) * 132
    assert tiles / splits > 1


@pytest.mark.parametrize(
    ("lanes", "blocks", "tiles"),
    [(4, 4, 2048), (16, 1, 2048), (4, 8, 2048), (4, 8, 1024), (6, 8, 128), (6, 8, 256), (12, 4, 128), (5, 4, 4096)],
)
def test_parts_leave_no_half_of_the_multiprocessors_idle(lanes: int, blocks: int, tiles: int) -> None:
    """Five rounds of one program a multiprocessor are three of two, of which the last fills half of them."""
    programs = lanes * blocks * choose_splits(lanes, blocks, tiles, 132, HOPPER)
    assert programs <= 132 or programs > 0.9 * -(-programs // 264) * 264


def test_many_tiles_are_worth_a_second_program_a_multiprocessor_and_a_second_kernel_is_not() -> None:
    """Choices that were measured on H200, each beside its neighbours."""
    assert choose_splits(1, 8, 2048, 132, HOPPER) == 33
    assert choose_splits(4, 8, 1024, 132, HOPPER) == 8
    assert choose_splits(16, 8, 256, 132, HOPPER) == 1
    assert choose_splits(16, 1, 1024, 132, HOPPER) == 8


def test_no_more_programs_than_fit_keep_a_multiprocessor_busy() -> None:
    for busy, most in ((2, 1), (0, 1)):
        with pytest.raises(ValueError, match=f"busy_programs is {busy} and programs_per_sm {most}"):
            DecodeTile(busy_programs=busy, programs_per_sm=most)


def test_one_program_a_multiprocessor_is_enough_only_where_it_keeps_it_busy() -> None:
    assert 16 * choose_splits(4, 4, 64, 132, DecodeTile(busy_programs=1)) <= 132
    assert 132 < 16 * choose_splits(4, 4, 64, 132, DecodeTile(busy_programs=2)) <= 264


def test_requests_that_may_differ_are_split_even_if_they_fill_the_gpu() -> None:
    assert choose_splits(16, 8, 256, 132, HOPPER, uneven=True) == 16
    assert choose_splits(32, 8, 256, 132, HOPPER, uneven=True) == 32, "two requests a part: twice as many parts"
    assert choose_splits(1, 8, 1, 132, HOPPER, uneven=True) == 1


def test_parts_are_never_more_than_tiles_nor_than_twice_the_places() -> None:
    for lanes in (1, 7, 100, 5000):
        for blocks in (1, 4, 40, 200):
            for tiles in (1, 2, 63, 1000, 10**5):
                assert 1 <= choose_splits(lanes, blocks, tiles, 132, DecodeTile()) <= min(256, tiles)
                splits = choose_splits(lanes, blocks, tiles, 132, DecodeTile(), uneven=True)
                assert 1 <= splits <= lanes * tiles
                assert lanes == 1 or splits == 1 or splits * blocks <= 528


def test_few_tokens_get_small_tiles() -> None:
    assert append_tile(64, 8, 132).tokens < append_tile(4096, 8, 132).tokens
