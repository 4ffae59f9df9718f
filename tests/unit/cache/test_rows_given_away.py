"""Rows of a cache in the hands of torch, which copies, pickles and shares whole storages: refused, however they were
cut. Nearly all of the storage here has no memory behind it, so whatever reads it ends the process."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing.reduction
import pickle

import pytest
import torch
import torch.multiprocessing

from slicedkv import SlicedKVCache, StateError

CUTS = {
    "rows": lambda cache: cache.k(1)[2, :5],
    "one row": lambda cache: cache.v(0)[2, 3],
    "transposed": lambda cache: cache.k(1)[2, :5].transpose(0, 1),
    "detached": lambda cache: cache.k(0)[2, :5].detach(),
    "data": lambda cache: cache.k(0)[2, :5].data,
    "as bytes": lambda cache: cache.k(0)[2, :5].view(torch.uint8),
    "as uint16": lambda cache: cache.k(0)[2, :5].view(torch.uint16),
    "strided anew": lambda cache: cache.k(0).as_strided((2, 2), (16, 1)),
    "unbound": lambda cache: cache.k(0).unbind(0)[2][:5],
    "of a plane": lambda cache: cache.kv_tensors[0][2, :5],
    "a layer": lambda cache: cache.k(0),
    "in a list": lambda cache: [cache.k(0)[2, :5]],
}
TAKERS = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda rows: torch.save(rows, io.BytesIO()),
    "save, as once": lambda rows: torch.save(rows, io.BytesIO(), _use_new_zipfile_serialization=False),
    "to another process": multiprocessing.reduction.ForkingPickler.dumps,
    "spawn queue": lambda rows: torch.multiprocessing.get_context("spawn").SimpleQueue().put(rows),
}


@pytest.fixture
def cache(make_cache) -> SlicedKVCache:
    cache = make_cache(max_batch_size=1000, max_seq_len=1 << 20)
    reqids = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step({reqids[2]: 5})
    for layer in range(3):
        cache.k(layer)[2, :5] = layer + 1
    return cache


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("cut", CUTS)
def test_torch_is_refused_the_whole_memory(cache, cut, take):
    rows = CUTS[cut](cache)
    with pytest.raises(StateError, match="clone"):
        TAKERS[take](rows)


@pytest.mark.parametrize("cut", ["rows", "one row", "transposed", "a layer"])
def test_rows_are_not_made_shared(cache, cut):
    with pytest.raises(StateError, match=r"rows\.clone"):
        CUTS[cut](cache).share_memory_()


@pytest.mark.parametrize("take", ["clone", "cpu", "tolist", "share_memory_", "pin_memory", "__iter__", "__copy__"])
def test_the_storage_itself_refuses(cache, take):
    with pytest.raises(StateError, match=r"rows\.clone"):
        getattr(cache.k(0)[2, :5].untyped_storage(), take)()


def test_the_storage_is_printed_without_its_bytes(cache):
    assert "bytes of a cache on cpu" in repr(cache.k(0)[2, :5].untyped_storage())


def test_storages_refuse_when_nobody_held_them_meanwhile(cache):
    """torch keeps what says so for as long as a tensor uses the storage, also one that outlives the cache."""
    rows = cache.k(0)[2, :5]
    cache.close()
    for _ in range(3):
        gc.collect()
        with pytest.raises(StateError, match=r"rows\.clone"):
            pickle.dumps(rows)


@pytest.mark.parametrize("take", TAKERS)
def test_a_clone_goes_everywhere(cache, take):
    TAKERS[take](cache.k(1)[2, :5].clone())


def test_other_tensors_are_saved_as_ever(cache):
    file = io.BytesIO()
    torch.save({"rows": cache.k(1)[2, :5].clone(), "other": torch.arange(3)}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["rows"], torch.full((5, 2, 16), 2.0))
    assert loaded["other"].tolist() == [0, 1, 2]


def test_a_shallow_copy_is_the_same_rows(cache):
    rows = cache.k(0)[2, :5]
    assert copy.copy(rows).data_ptr() == rows.data_ptr()


def test_mapped_rows_are_printed(cache):
    for rows in (cache.k(1)[2, :5], cache.v(1)[2, :5, 0], cache.k(1)[2, 4]):
        assert "tensor([" in repr(rows)
    assert "2., 2." in repr(cache.k(1)[2, :5])


def test_computing_gives_ordinary_tensors(cache):
    rows = cache.k(1)[2, :5]
    for result in (rows * 2, rows.clone(), rows @ rows.transpose(1, 2), torch.cat([rows, rows]), rows.contiguous()):
        assert type(result) is torch.Tensor
        assert len(pickle.dumps(result.clone())) < 10_000


RESHAPE = {
    "resize_": lambda view: view.resize_(3, 3),
    "set_": lambda view: view.set_(torch.zeros(3)),
    "transpose_": lambda view: view.transpose_(0, 1),
    "swapaxes_": lambda view: view.swapaxes_(0, 2),
    "squeeze_": lambda view: view.squeeze_(),
    "unsqueeze_": lambda view: view.unsqueeze_(0),
    "as_strided_": lambda view: view.as_strided_((2, 2), (2, 1)),
    "t_": lambda view: view.resize_(3, 5).t_(),
    "data": lambda view: setattr(view, "data", torch.zeros(2)),
    "requires_grad_": lambda view: view.requires_grad_(),
}


@pytest.mark.parametrize("reshape", RESHAPE)
@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_whoever_reshapes_a_view_reshapes_his_own(make_cache, layout, reshape):
    cache = make_cache(layout=layout, head_dim=16, num_kv_heads=1)

    def seen():
        views = (cache.k(0), cache.v(2), *cache.kv_tensors)
        return [(view.shape, view.stride(), view.data_ptr(), view.requires_grad) for view in views]

    before = seen()
    for view in (cache.k(0), cache.v(2), *cache.kv_tensors):
        RESHAPE[reshape](view)
    assert seen() == before
