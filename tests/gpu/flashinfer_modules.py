"""Build what FlashInfer compiles for the GPU tests, each module by a process of its own, all at once.

python tests/gpu/flashinfer_modules.py [MODULE]
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import torch

from slicedkv import SlicedKVCache
from slicedkv.attention import Batch, open_backend

COMPILERS = "4"
"""For each module, where MAX_JOBS says nothing: one may take some 3 GB of memory."""


class Step(NamedTuple):
    """A step of one request for which FlashInfer needs a single module."""

    method: str
    num_qo_heads: int
    q_len: int
    seq_len: int


MODULES = {
    "append": Step("append", 32, 512, 4096),
    "single_prefill": Step("run", 32, 512, 4096),
    "paged_prefill": Step("run", 32, 16, 16),
    "decode_by_tensor_cores": Step("run", 32, 1, 16),
    "decode": Step("run", 8, 1, 16),
}


def build(step: Step) -> None:
    """Compute a step, in a cache of one layer."""
    shape = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128, "max_batch_size": 1, "max_seq_len": 8192}
    with SlicedKVCache(**shape, dtype=torch.bfloat16, device="cuda", memory_limit="256MiB") as cache:
        assert cache.step({cache.alloc_reqid(): step.seq_len})
        backend = open_backend("flashinfer", cache, num_qo_heads=step.num_qo_heads)
        backend.plan(Batch([0], [step.q_len], [step.seq_len]))
        q, k, v = (
            torch.zeros(step.q_len, heads, 128, dtype=cache.dtype, device=cache.device)
            for heads in (step.num_qo_heads, 8, 8)
        )
        if step.method == "append":
            backend.append(0, k, v)
        else:
            backend.run(0, q)
        torch.cuda.synchronize()


def main() -> int:
    """Build one module here, or all in processes of their own; return 1 when one of them failed."""
    if len(sys.argv) > 1:
        build(MODULES[sys.argv[1]])
        return 0
    environment = {"MAX_JOBS": COMPILERS} | os.environ
    children = [subprocess.Popen([sys.executable, "-P", __file__, name], env=environment) for name in MODULES]
    return max(map(bool, [child.wait() for child in children]))


if __name__ == "__main__":
    sys.exit(main())
