"""`Engine`: prompts in, tokens out. Ties scheduler, runner, sampler and cache together and owns their lifetime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention import AttentionBackend
from ..cache import SlicedKVCache
from ..checks import check_bool, check_int
from ..config import MemoryLimit
from ..errors import ConfigError, StateError
from ..integrations.servable import decoder_config
from ..unique import Unique
from .opening import check_prefix_cache, eos_ids, open_admission, open_cache, open_runner, warn_of_ignored
from .preemption import PreemptionKind
from .prompts import Prompt, check_params, check_prompts, token_ids
from .record import EngineStep, Event
from .request import NO_TOKEN, Request, SamplingParams
from .sampler import check_numbers, sample
from .scheduler import Scheduler

__all__ = ["Engine"]


class Engine(Unique):
    """Serves many requests with one model by continuous batching, K and V in a `SlicedKVCache`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model in evaluation mode whose layers have the same heads. The engine sets its attention to
        "slicedkv"; `close` gives each part of the model its former attention back. Do not use the model for anything
        else meanwhile.
    tokenizer : PreTrainedTokenizerBase, optional
        Lets prompts be strings.
    max_batch_size, max_seq_len : int
        Slots, and the longest request in tokens.
    cache : SlicedKVCache, optional
        A cache that fits the model, as `cache_for_model` opens it. It replaces `max_batch_size`, `max_seq_len` and
        `cache_kwargs`. The engine closes it.
    max_tokens_per_step : int, optional
        Most tokens of a step; the engine cuts longer prompts in chunks. Default: 512, or `max_batch_size` if that is
        more.
    backend : str or AttentionBackend
        Name of an attention backend, see `open_backend`; or a backend over `cache`.
    cuda_graphs : bool, optional
        Replay a CUDA graph for a step in which every request computes one token. There is one graph for each padded
        number of requests. By default the engine does so where backend and model allow it.
    preemption : {"recompute", "swap", "auto"}
        What happens to the rows of a request that gives its slot to older ones. "recompute": it computes them again.
        "swap": they wait in host memory. "auto": whichever of the two is faster by the engine's measurements.
    prefix_cache : int, float or str, optional
        Share prefixes: requests share the K and V of the tokens that they begin with, and finished ones leave theirs to
        later ones. The value limits what finished requests leave: bytes, "4GiB", or a fraction of the cache's memory
        limit. The engine gives it up when memory or slots are short. By default nothing is shared.
    on_step : callable, optional
        Called with an `EngineStep` after each step.
    probe : bool
        Compute a few tokens at the start, packed and alone, and refuse a model that would give wrong tokens.
    **cache_kwargs
        Further arguments of `SlicedKVCache`, such as `memory_limit` and `layout`.

    Raises
    ------
    ConfigError
        The model cannot be served, or an argument does not fit it; nothing stays open.
    StateError
        Another engine uses the model.

    Warns
    -----
    UserWarning
        The model's `generation_config` asks for what the engine does not do, such as a repetition penalty.

    Notes
    -----
    Use it from one thread. `step` waits until the GPU has chosen the tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        cache: SlicedKVCache | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens_per_step: int | None = None,
        backend: str | AttentionBackend = "auto",
        cuda_graphs: bool | None = None,
        preemption: PreemptionKind = "recompute",
        prefix_cache: MemoryLimit = None,
        on_step: Callable[[EngineStep], None] | None = None,
        probe: bool = True,
        **cache_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.on_step = on_step
        self.num_steps = 0
        self._num_requests = 0
        self._events: list[Event] = []  # not returned yet
        self._closed = False
        check_bool("probe", probe)
        check_prefix_cache(prefix_cache, cache)
        if not isinstance(backend, str) and backend.cache is not cache:
            raise ConfigError(
                f"backend {backend.name!r} is not over the engine's cache; pass cache= the one it is over"
            )
        shape = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        self.cache: SlicedKVCache = open_cache(model, cache, {**shape, **cache_kwargs})
        try:
            slots = self.cache.layout.max_batch_size
            budget = max(512, slots) if max_tokens_per_step is None else max_tokens_per_step
            admission = open_admission(self.cache, prefix_cache)
            self.scheduler = Scheduler(
                self.cache, max_tokens_per_step=budget, preemption=preemption, admission=admission
            )
            self._eos_ids = eos_ids(model)
            warn_of_ignored(model)
            self._runner = open_runner(model, self.cache, backend, cuda_graphs=cuda_graphs, probing=probe)
        except BaseException:
            self.cache.close()
            raise
        self.backend = self._runner.backend

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine(running={len(self.scheduler.running)}, waiting={len(self.scheduler.waiting)})"

    @property
    def idle(self) -> bool:
        """True when every request is finished."""
        return self.scheduler.idle

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a prompt, a string or token ids. `step`, `stream` and `run` serve it.

        Raises
        ------
        ConfigError
            It is no prompt; it is empty; it has unknown tokens; with `max_tokens` it exceeds `max_seq_len`.
        CapacityError
            The request may need more memory than the cache has.
        StateError
            The engine is closed.
        """
        self._check_open()
        tokens = token_ids(prompt, self.tokenizer)
        request = Request(self._num_requests, tokens, check_params(params), self._eos_ids)
        vocabulary = decoder_config(self._runner.model).vocab_size
        check_int("prompt token", max(request.prompt_ids), 0, vocabulary - 1)
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def step(self) -> list[Event]:
        """Compute one step and return its new tokens in packed order; an empty list if there are none.

        Raises
        ------
        OutOfPagesError
            See `Scheduler.schedule`. The requests stay queued.
        StateError
            The engine is closed. Or logits are not numbers: requests with such logits have failed, the others go on.
        """
        self._check_open()
        start, preemptions = time.perf_counter(), self.scheduler.num_preemptions
        cached = self.scheduler.admission.num_cached_tokens
        plan = self.scheduler.schedule()
        if plan is None:
            return self._take_events()
        logits = self._runner.forward(plan)
        ready = self.scheduler.complete(plan)
        chosen = sample(logits, ready)
        seq_lens = tuple(request.num_computed for request in self.scheduler.running)
        try:
            self.scheduler.admit_ahead()
            mapped_bytes = self.cache.stats().mapped_bytes if self.on_step else 0
            held_bytes = self.scheduler.admission.held_bytes if self.on_step else 0
        finally:  # or the next step would draw these tokens again, and might draw others
            wait = self._accept(ready, chosen)
        self.scheduler.preemptor.note_step(plan.q_lens, time.perf_counter() - start, waited=bool(ready))
        self.scheduler.retire()
        self.num_steps += 1
        if self.on_step:
            record = EngineStep(
                index=self.num_steps - 1,
                seconds=time.perf_counter() - start,
                wait_seconds=wait,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_tokens=plan.num_tokens,
                num_cached_tokens=self.scheduler.admission.num_cached_tokens - cached,
                num_preemptions=self.scheduler.num_preemptions - preemptions,
                seq_lens=seq_lens,
                used_bytes=sum(seq_lens) * self.cache.layout.token_bytes,
                mapped_bytes=mapped_bytes,
                held_bytes=held_bytes,
            )
            self.on_step(record)
        check_numbers(ready)
        return self._take_events()

    def _accept(self, ready: Sequence[Request], chosen: Tensor) -> float:
        """Wait until the device has chosen the tokens, and hand them on; return the seconds waited."""
        wait = time.perf_counter()
        tokens: list[int] = chosen.tolist()
        wait = time.perf_counter() - wait
        for request, token in zip(ready, tokens, strict=True):
            request.accept(token)
            if token != NO_TOKEN:
                self._events.append(Event(request, token, request.finish_reason))
        return wait

    def _take_events(self) -> list[Event]:
        """Return the new tokens, and before them the tokens of earlier steps that failed after they had them."""
        events, self._events = self._events, []
        return events

    def run(self) -> None:
        """Serve everything that was submitted."""
        while not self.idle:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """Yield a request's tokens from its first, as they come. The engine serves the other requests meanwhile."""
        given = 0
        while True:
            while given < len(request.output_ids):
                yield request.output_ids[given]
                given += 1
            if request.finished:
                return
            if self.idle:
                raise ConfigError(f"{request!r} is not one of this engine's; stream it where it was submitted")
            self.step()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[int]]:
        """Serve prompts, with common or individual parameters, and return the generated tokens of each.

        Raises
        ------
        ConfigError, CapacityError, OutOfPagesError, StateError
            As `submit` and `step`; one prompt was passed instead of a list. None of these requests goes on.
        """
        each = check_prompts(prompts, params)
        requests: list[Request] = []
        try:
            requests.extend(self.submit(prompt, own) for prompt, own in zip(prompts, each, strict=True))
            self.run()
        except BaseException:
            self.abort(*requests)
            raise
        return [request.output_ids for request in requests]

    def abort(self, *requests: Request) -> None:
        """End requests now; their slots are free for others. See `Scheduler.abort`."""
        self.scheduler.abort(*requests)

    def reset_prefix_cache(self) -> None:
        """Give up all prefixes of finished requests. Running requests go on sharing theirs."""
        self._check_open()
        self.scheduler.admission.clear()

    def close(self) -> None:
        """Abort what is left, give the model its attention back and free all memory. A second call does nothing.

        After a failure the close goes on as far as it can, and a second call tries the rest again.
        """
        if self._closed:
            self.cache.close()
            return
        self._closed = True
        try:
            self.scheduler.abort(*self.scheduler.waiting, *self.scheduler.running)
        finally:
            try:
                self._runner.close()
            finally:
                self.cache.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this engine is closed; open a new one")
