"""The allocator of the kvcached package, used as its integrations use it.

It calls 16 tokens of a request a block. Requests share its pages, each of which holds several blocks.
"""

from __future__ import annotations

import torch

from slicedkv.layout import ceil_div

BLOCK_TOKENS = 16


class Kvcached:
    """K and V in the pages of kvcached, opened with its defaults.

    Parameters
    ----------
    shape : (int, int, int)
        Layers, KV heads and head_dim, of bfloat16.
    memory_bytes : int
        Capacity, rounded down to whole pages of all layers.
    device : str
        As kvcached spells it, "cuda:0".
    """

    def __init__(self, shape: tuple[int, int, int], memory_bytes: int, device: str) -> None:
        import kvcached
        from kvcached import vmm_ops
        from kvcached.kv_cache_manager import KVCacheManager
        from kvcached.utils import CONTIGUOUS_LAYOUT, PAGE_SIZE

        layers, heads, dim = shape
        row_bytes = heads * dim * torch.bfloat16.itemsize  # K, or V, of a token in one layer
        self.page_bytes = PAGE_SIZE * layers * 2  # it maps the same page of every layer's K and V together
        pages = memory_bytes // self.page_bytes
        self.version = str(kvcached.__version__)
        self._ops = vmm_ops
        vmm_ops.init_kvcached(device, PAGE_SIZE, CONTIGUOUS_LAYOUT)
        self._tensors = vmm_ops.create_kv_tensors(2 * pages * PAGE_SIZE, torch.bfloat16.itemsize, device, layers, 2)
        blocks = pages * PAGE_SIZE // (BLOCK_TOKENS * row_bytes)
        self._manager = KVCacheManager(blocks, BLOCK_TOKENS, row_bytes, layers)
        self._blocks: dict[int, list[int]] = {}
        self._requests = 0
        self._manager.free(self._manager.alloc(1))  # returns when its threads are ready

    def admit(self, tokens: int) -> int:
        """Begin a request without blocks."""
        self._requests += 1
        self._blocks[self._requests] = []
        return self._requests

    def grow(self, lengths: dict[int, int]) -> bool:
        """Allocate the blocks that are missing, with one call for each request."""
        for request, length in lengths.items():
            blocks = self._blocks[request]
            missing = ceil_div(length, BLOCK_TOKENS) - len(blocks)
            if missing > 0:
                found = self._manager.alloc(missing)
                if found is None:
                    return False
                blocks += found
        return True

    def free(self, request: int) -> None:
        """Give a request's blocks back. kvcached unmaps empty pages at once, but for a few."""
        self._manager.free(self._blocks.pop(request))

    def trim(self) -> None:
        """Unmap the few empty pages that are still mapped."""
        self._manager.trim()

    def held_bytes(self) -> int:
        """Pages in use, and empty pages still mapped."""
        state = self._manager.page_allocator.get_page_state()
        return int(state["inuse_pages"] + state["reserved_pages"]) * self.page_bytes

    def close(self) -> None:
        """Stop its threads, remove its shared segment and unmap all."""
        self._manager.shutdown()
        self._tensors = None
        self._ops.shutdown_kvcached()
