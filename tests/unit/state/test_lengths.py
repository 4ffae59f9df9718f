"""Forms of seq_lens, and the vectors behind `step`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slicedkv.errors import ConfigError
from slicedkv.state.lengths import LengthTable, parse_seq_lens

FORMS = [
    [3, 0, 7],
    (3, 0, 7),
    {0: 3, 2: 7},
    np.array([3, 0, 7]),
    np.array([3, 0, 7], dtype=np.int32),
    np.array([3, 0, 7], dtype=np.uint32),
    np.array([3, 0, 7], dtype=np.uint64),
    np.array([3, 0, 7], dtype=">i8"),
    np.array([7, 0, 3])[::-1],
    np.array([3, 9, 0, 9, 7, 9])[::2],
    torch.tensor([3, 0, 7], dtype=torch.uint16),
    torch.tensor([3, 0, 7]),
    torch.tensor([3, 0, 7], dtype=torch.int32),
    [torch.tensor(3), 0, torch.tensor([7])],
    {0: torch.tensor(3), 2: np.int32(7)},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{type(form).__name__}-{getattr(form, 'dtype', '')}")
def test_every_form_means_the_same(form: Any) -> None:
    assert parse_seq_lens(form, 3).tolist() == [3, 0, 7]
    assert parse_seq_lens(form, 3).dtype == torch.int64


BAD = [
    ([1, 2], "3 items"),
    ([1, 2, 3, 4], "3 items"),
    ([1.5, 2, 3], "1.5"),
    ([True, 2, 3], "True"),
    (["1", 2, 3], "'1'"),
    (7, "7"),
    ("abc", "abc"),
    ([2**70, 0, 0], str(2**70)),
    (torch.tensor([1.0, 2, 3]), "float32"),
    (torch.zeros(3, 1, dtype=torch.int64), r"\(3, 1\)"),
    (torch.tensor([True, False, True]), "bool"),
    (torch.zeros(3, dtype=torch.int64, device="meta"), "meta"),
    (torch.tensor([3, 0, 7]).to_sparse(), "layout torch.sparse_coo"),
    (torch.nested.nested_tensor([torch.tensor([3]), torch.tensor([0, 7])], layout=torch.jagged), "nested"),
    (torch.tensor(3), r"shape \(\)"),
    (torch.tensor(True), "bool"),
    (torch.tensor([3.0, 0, 7], requires_grad=True), "float32"),
    (torch.tensor([3j, 0, 7]), "complex64"),
    ([torch.tensor(True), 2, 3], r"seq_lens\[0\] is tensor\(True\)"),
    ([1, torch.tensor(2, device="meta"), 3], r"seq_lens\[1\] is tensor\("),
    ([1, torch.tensor(2.0, requires_grad=True), 3], r"seq_lens\[1\] is tensor\(2"),
    ([1, torch.tensor([2, 3]), 3], r"seq_lens\[1\] is tensor\(\[2, 3\]"),
    (np.array([1, 2, 3], dtype=object), "object"),
    (np.array([1.0, 2, 3]), "float64"),
    (np.array([True, False, True]), "bool"),
    (np.array([2**63, 0, 0], dtype=np.uint64), str(2**63)),
    (np.int64(3), r"\(\)"),
    (b"\x01" + bytes(23), r"b'\\x01"),
    (bytearray(24), "bytearray"),
    ({3: 1}, "reqid is 3"),
    ({-1: 1}, "reqid is -1"),
    ({0: -2}, r"seq_lens\[0\] is -2"),
    ({0: 1.5}, "1.5"),
    ({"0": 1}, "'0'"),
    ({0: torch.tensor(True)}, r"seq_lens\[0\] is tensor\(True\)"),
    ({0: torch.tensor(5, device="meta")}, r"seq_lens\[0\] is tensor\("),
    ({torch.tensor(True): 5}, r"reqid is tensor\(True\)"),
    ({0: np.bool_(True)}, r"seq_lens\[0\] is np.True_"),
]


@pytest.mark.parametrize(("form", "named"), BAD, ids=str)
def test_wrong_forms_are_named(form: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_seq_lens(form, 3)


def test_quiet_until_a_trigger_is_passed() -> None:
    table = LengthTable(3, 100)
    table.set_backed(1, 10)
    table.schedule(1, 2)
    assert table.is_quiet(torch.tensor([0, 8, 0]))
    assert not table.is_quiet(torch.tensor([0, 9, 0]))
    assert not table.is_quiet(torch.tensor([1, 8, 0])), "a length for an idle slot must stand out"
    assert not table.is_quiet(torch.tensor([0, -1, 0]))
    assert table.beyond_backed(torch.tensor([0, 11, 0])) == [1]


def test_backed_as_far_as_it_is_mapped() -> None:
    table = LengthTable(3, 100)
    table.set_backed(1, 10)
    table.schedule(1, 4)
    assert table.is_backed(torch.tensor([0, 10, 0])), "what is asked for ahead is not missing yet"
    assert not table.is_backed(torch.tensor([0, 11, 0]))
    assert not table.is_backed(torch.tensor([1, 8, 0])), "an idle slot has nothing mapped"
    assert not table.is_backed(torch.tensor([-1, 8, 0]))


def test_touched_is_the_longest_length() -> None:
    table = LengthTable(2, 100)
    for lens in ([5, 0], [3, 1], [0, 2]):
        table.advance(torch.tensor(lens))
    assert list(table.longest) == [5, 2]
    table.reset(0)
    assert list(table.longest) == [0, 2]


def test_a_full_slot_never_triggers() -> None:
    table = LengthTable(1, 10)
    table.set_backed(0, 10)
    table.schedule(0, 5)
    assert table.is_quiet(torch.tensor([10]))
    assert not table.is_quiet(torch.tensor([11])), "a length that can never be must stand out"


def test_range_names_the_first_offender() -> None:
    with pytest.raises(ConfigError, match=r"seq_lens\[1\] is 9.*max_seq_len = 8"):
        LengthTable(3, 8).check_range(torch.tensor([8, 9, -1]))


def test_parsing_does_not_keep_the_callers_memory() -> None:
    table, lens = LengthTable(2, 100), torch.tensor([4, 5])
    table.advance(parse_seq_lens(lens, 2))
    lens.fill_(99)
    assert list(table.longest) == [4, 5]
