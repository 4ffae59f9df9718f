"""Serves the demo's questions with an engine and shows the answers as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..text import format_bytes
from .display import Display, Transcript
from .prompts import Job

if TYPE_CHECKING:
    from ...engine import Engine, Event, Request

__all__ = ["serve"]


def serve(engine: Engine, jobs: Sequence[Job], display: Display) -> tuple[list[Request], float]:
    """Submit all jobs and run the engine until they are done.

    Parameters
    ----------
    engine : Engine
        With a tokenizer that has a chat template.
    jobs : sequence of Job
    display : Display

    Returns
    -------
    requests : list of Request
    seconds : float
        Wall time, without the submission.
    """
    requests = [_submit(engine, job) for job in jobs]
    transcripts = [Transcript(_decoder(engine)) for _ in requests]
    rows = {request.request_id: row for row, request in enumerate(requests)}
    total = sum(job.max_tokens for job in jobs)
    begun = time.perf_counter()
    while not engine.idle:
        for event in engine.step():
            row = rows[event.request.request_id]
            if len(event.request.output_ids) == 1:
                display.line(f"> {_shorten(jobs[row].question)}", row)
            for line in _lines(event, transcripts[row]):
                display.line(line, row)
        done = sum(map(_tokens_done, requests))
        display.progress(done, total, _note(engine, done / (time.perf_counter() - begun)))
    return requests, time.perf_counter() - begun


def _submit(engine: Engine, job: Job) -> Request:
    from ...engine import SamplingParams

    tokenizer: Any = engine.tokenizer
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": job.question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return engine.submit(ids, SamplingParams(max_tokens=job.max_tokens))


def _decoder(engine: Engine) -> Callable[[Sequence[int]], str]:
    tokenizer: Any = engine.tokenizer
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def _lines(event: Event, transcript: Transcript) -> list[str]:
    """What a new token completes: lines of text, and a last line that says how the request ended."""
    request = event.request
    lines = transcript.take(request.output_ids, last=request.finished)
    if event.finish_reason is not None:
        how = "complete" if event.finish_reason.value == "stop" else "cut at its limit"
        again = f", preempted {request.num_preemptions}x" if request.num_preemptions else ""
        lines.append(f"-- {len(request.prompt_ids)} + {len(request.output_ids)} tokens, {how}{again}")
    return lines


def _tokens_done(request: Request) -> int:
    """Tokens of an answer that are done: all of them when it ended early."""
    return request.params.max_tokens if request.finished else len(request.output_ids)


def _note(engine: Engine, rate: float) -> str:
    stats, scheduler = engine.cache.stats(), engine.scheduler
    return (
        f"{rate:.0f} a second, {len(scheduler.running)} requests running, {len(scheduler.waiting)} waiting, "
        f"{format_bytes(stats.mapped_bytes)} mapped"
    )


def _shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"
