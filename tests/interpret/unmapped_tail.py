"""Every kernel over two requests that end with their last mapped page; run as a process of its own.

python tests/interpret/unmapped_tail.py EXTRA_TOKENS
"""

from __future__ import annotations

import mmap
import sys

import torch
from kernel_reference import attend_all, error, index
from reserved_memory import ReservedMemory

from slicedkv.triton_kernels import DecodeTile, append_kv, decode_attention, prefill_attention

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 80, 1024
TOKEN = LAYERS * HEADS * HEAD_DIM


def main(extra_tokens: int) -> None:
    """Append, decode and prefill the last layer; its last row ends where a page ends, and nothing is behind it."""
    lens = [256, 512]
    memory = [ReservedMemory(2 * TOKENS * TOKEN * 4) for _ in range(2)]
    strides = (TOKENS * TOKEN, TOKEN, HEAD_DIM, 1)
    shape, offset = (2, TOKENS, HEADS, HEAD_DIM), (LAYERS - 1) * HEADS * HEAD_DIM
    k, v = (m.tensor(shape, strides, torch.float32, offset) for m in memory)
    for plane, cache in zip(memory, (k, v), strict=True):
        for slot, length in enumerate(lens):
            plane.map_rows(cache[slot, :length])
            cache[slot, :length] = torch.randn(length, HEADS, HEAD_DIM)
            row_end = (offset + slot * strides[0] + (length - 1) * TOKEN + HEADS * HEAD_DIM) * 4
            assert row_end % mmap.PAGESIZE == 0, "the test needs a row that ends with its page"
    lanes = {"reqids": index([1, 0]), "seq_lens": index([lens[1], lens[0] + extra_tokens])}
    q, new = torch.randn(4, 4, HEAD_DIM), torch.randn(4, HEADS, HEAD_DIM)
    cu_q_lens = index([0, 2, 4])
    append_kv(new, new, k, v, cu_q_lens=cu_q_lens, **lanes)
    expected, _ = attend_all(q, k, v, [1, 0], [2, 2], [lens[1], lens[0]])
    for tile_bytes in (8192, 49152):
        tile = DecodeTile(tile_bytes=tile_bytes)
        for num_splits in (1, 3):
            assert error(decode_attention(q, k, v, q_len=2, num_splits=num_splits, tile=tile, **lanes), expected) < 1e-5
    for causal in (True, False):
        expected, _ = attend_all(q, k, v, [1, 0], [2, 2], [lens[1], lens[0]], causal=causal)
        assert error(prefill_attention(q, k, v, cu_q_lens=cu_q_lens, causal=causal, **lanes), expected) < 1e-5
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]))
