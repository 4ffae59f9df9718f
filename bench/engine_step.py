"""What does a decode step of the engine cost the host, and how much of its GPU time is attention?

    python -m bench.engine_step [--quick]

Eight layers of Llama-3-8B with random weights serve 64 requests. The steps in which all of them decode count.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import transformers

from slicedkv.attention import Batch
from slicedkv.engine import Engine, EngineStep, SamplingParams

from .baselines.workloads import model
from .support.common import parser, progress, record, time_cuda

Row = dict[str, Any]
NEEDS_GPU = True
REQUESTS, PROMPT, LAYERS = 64, 1024, 8
VARIANTS = (("triton", True), ("triton", False), ("flashinfer", True), ("flashinfer", False), ("auto", True))
"""Attention backend, and whether steps are CUDA graphs."""


def measure(served: transformers.PreTrainedModel, backend: str, graphs: bool, steps: int) -> Row:
    """Serve 64 requests and take the steps in which all decode, without the first ten."""
    progress(f"{backend}, {'with' if graphs else 'without'} graphs")
    records: list[EngineStep] = []
    options = {"max_batch_size": REQUESTS, "max_seq_len": 2048, "memory_limit": 16 << 30, "max_tokens_per_step": 8192}
    with Engine(served, backend=backend, cuda_graphs=graphs, on_step=records.append, **options) as engine:
        forward, gpu_ms = engine._runner.forward, []

        def timed(plan: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            logits = forward(plan)
            end.record()
            gpu_ms.append((start, end))
            return logits

        engine._runner.forward = timed  # type: ignore[method-assign]
        random = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 128_000, (PROMPT,), generator=random).tolist() for _ in range(REQUESTS)]
        for prompt in prompts:
            engine.submit(prompt, SamplingParams(max_tokens=steps + 40, ignore_eos=True))
        while len([r for r in records if r.num_tokens == REQUESTS]) < steps + 10:
            engine.step()
        chosen = [i for i, r in enumerate(records) if r.num_tokens == REQUESTS][10:]
        torch.cuda.synchronize()
        host_us = [(records[i].seconds - records[i].wait_seconds) * 1e6 for i in chosen]
        step_us = [records[i].seconds * 1e6 for i in chosen]
        gpu_us = statistics.median(gpu_ms[i][0].elapsed_time(gpu_ms[i][1]) * 1e3 for i in chosen)
        attention_us = attention(engine, graphs) * 1e6
    return {
        "backend": backend, "graphs": graphs, "requests": REQUESTS, "layers": LAYERS, "steps": len(chosen),
        "step_us": statistics.median(step_us), "host_us": statistics.median(host_us),
        "forward_gpu_us": gpu_us, "attention_us": attention_us, "attention_share": attention_us / gpu_us,
    }  # fmt: skip


def attention(engine: Engine, graphs: bool) -> float:
    """Seconds of GPU time that append and attention of all layers take, for the step that comes next."""
    running = engine.scheduler.running
    batch = Batch([r.reqid for r in running], [1] * len(running), [r.num_computed for r in running])
    q, k, v = (torch.randn(len(running), heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))

    def layers() -> None:
        for layer in range(LAYERS):
            engine.backend.append(layer, k, v)
            engine.backend.run(layer, q)

    with torch.inference_mode():
        engine.backend.plan(batch, graph=graphs)
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()  # without launch gaps, whatever the engine does
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            layers()
        return time_cuda(graph.replay, repeats=9)


def main() -> None:
    """Measure all variants."""
    options = parser(__doc__ or "").parse_args()
    if options.device == "cpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    served, steps = model("cuda", LAYERS), 40 if options.quick else 200
    record("engine_step", options, (measure(served, *variant, steps) for variant in VARIANTS))


if __name__ == "__main__":
    main()
