"""A stand-in for the kvcached package: the calls of version 0.1.6 that the benchmark makes, without memory behind them.

A page holds the same rows of all layers. Pages whose last block is freed are kept in reserve, up to `RESERVE` of them.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

PAGE_SIZE = 64 << 10
RESERVE = 2


class State(SimpleNamespace):
    """What the package has been told, and what it holds."""


STATE = State(opened=None, tensors=None, threads=0)


def init_kvcached(dev_str, page_size=0, contiguous_layout=True):
    assert STATE.opened is None
    STATE.opened = (dev_str, page_size, contiguous_layout)


def shutdown_kvcached():
    STATE.opened = STATE.tensors = None


def create_kv_tensors(size, dtype_size, dev_str, num_layers, num_kv_buffers=2, group_id=0, unified_pool=False):
    assert STATE.opened[0] == dev_str
    assert size % (2 * PAGE_SIZE) == 0
    STATE.tensors = (size, num_layers, num_kv_buffers)
    return [object()]


class KVCacheManager:
    def __init__(self, num_blocks, block_size, cell_size, num_layers, world_size=1, num_kv_buffers=2):
        size, layers, buffers = STATE.tensors
        assert (layers, buffers) == (num_layers, num_kv_buffers)
        assert num_blocks * block_size * cell_size * num_kv_buffers == size
        self.blocks_a_page = PAGE_SIZE // (block_size * cell_size)
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.used: dict[int, set[int]] = {}
        self.reserved = 0
        self.page_allocator = SimpleNamespace(get_page_state=self._state)
        STATE.threads += 1

    def _state(self):
        return {"inuse_pages": len(self.used), "reserved_pages": self.reserved}

    def alloc(self, need_size):
        assert need_size > 0
        if need_size > len(self.free_blocks):
            return None
        found = [self.free_blocks.pop() for _ in range(need_size)]
        for block in found:
            self.used.setdefault(block // self.blocks_a_page, set()).add(block)
        return found

    def free(self, indices):
        for block in indices:
            page = block // self.blocks_a_page
            self.used[page].remove(block)
            self.free_blocks.append(block)
            if not self.used[page]:
                del self.used[page]
                self.reserved = min(RESERVE, self.reserved + 1)

    def trim(self):
        self.reserved = 0

    def shutdown(self):
        STATE.threads -= 1
        return True


def install(monkeypatch):
    """Let `import kvcached` find this."""
    parts = {
        "kvcached": {"__version__": "0.1.6"},
        "kvcached.vmm_ops": {n: globals()[n] for n in ("init_kvcached", "shutdown_kvcached", "create_kv_tensors")},
        "kvcached.kv_cache_manager": {"KVCacheManager": KVCacheManager},
        "kvcached.utils": {"PAGE_SIZE": PAGE_SIZE, "CONTIGUOUS_LAYOUT": True},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules["kvcached"], name.partition(".")[2], module)
