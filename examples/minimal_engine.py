"""The smallest engine over a SlicedKVCache: what the author of an engine writes first.

It needs no GPU, and serves a model of two layers with random weights: chunks of prompts beside requests that decode,
preemption when memory is short, a prefix that requests share, and guessed tokens that are cut off again if wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from slicedkv import SlicedKVCache
from slicedkv.attention import Batch, open_backend

VOCAB, HIDDEN, LAYERS, QO_HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 61, 64, 2, 4, 2, 16, 256
# On the host a page may be small: 16 tokens. 30 pages are so few that memory gets short. A GPU has pages of 2 MiB.
MEMORY: dict[str, Any] = {"device": "cpu", "page_bytes": 4096, "extent_pages": 1, "memory_limit": 30 * 4096}
SIZES: dict[str, Any] = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_seq_len": MAX_LEN}
CHUNK, GUESSES = 16, 3  # most tokens that a request computes in a step; tokens that it guesses ahead


class TinyModel:
    """Two layers of random weights. `attend(layer, q, k, v)` keeps K and V of the new tokens and returns attention."""

    def __init__(self) -> None:
        self.tokens, self.places = torch.randn(VOCAB, HIDDEN), torch.randn(MAX_LEN, HIDDEN)
        widths = ((QO_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, HIDDEN)
        self.layers = [[torch.randn(HIDDEN, width) / 8 for width in widths] for _ in range(LAYERS)]
        self.head = torch.randn(HIDDEN, VOCAB)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.tokens[ids] + self.places[positions]
        for layer, (qkv, out, mlp) in enumerate(self.layers):
            heads = (layer_norm(x, (HIDDEN,)) @ qkv).view(len(x), -1, HEAD_DIM)
            x = x + attend(layer, *heads.split((QO_HEADS, KV_HEADS, KV_HEADS), dim=1)).flatten(1) @ out
            x = x + (layer_norm(x, (HIDDEN,)) @ mlp).relu()
        return layer_norm(x, (HIDDEN,)) @ self.head


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, then what the model said
    length: int  # how many tokens to end with
    reqid: int = -1  # the slot, while the request runs
    computed: int = 0  # tokens whose K and V are in the cache
    new: list[int] = field(default_factory=list)  # tokens of this step, guesses last
    end: int = 0  # tokens in the cache when this step is over

    def choose(self) -> None:
        """Take the next chunk. What followed the last token when it came before is guessed to follow it again."""
        *before, last = self.tokens
        follows = len(before) - before[::-1].index(last) if last in before else len(self.tokens)
        guesses = self.tokens[follows : follows + min(GUESSES, self.length - len(self.tokens) - 1)]
        self.new = (self.tokens[self.computed :] + guesses)[:CHUNK]
        self.end = self.computed + len(self.new)

    def common(self, other: Request) -> int:
        """Tokens that this request can share with another: all but its last one, which is always computed."""
        most = min(other.computed, len(self.tokens) - 1)
        return next((n for n in range(most) if self.tokens[n] != other.tokens[n]), most)


class MinimalEngine:
    def __init__(self, model: TinyModel, cache: SlicedKVCache) -> None:
        self.model, self.cache = model, cache
        self.backend = open_backend("auto", cache, num_qo_heads=QO_HEADS)
        self.waiting, self.running = list[Request](), list[Request]()
        self.shared = self.preempted = self.rejected = 0

    def step(self) -> None:
        """Compute a chunk of every request that fits."""
        while self.waiting and self.cache.can_admit(len(self.waiting[0].tokens)):
            self.admit(self.waiting.pop(0))
        for request in self.running:
            request.choose()
        while not self.cache.step({request.reqid: request.end for request in self.running}):
            self.preempt()
        for request, said in zip(list(self.running), self.compute(), strict=True):
            self.accept(request, said)
            if len(request.tokens) == request.length:
                self.cache.free_reqid(request.reqid)
                self.running.remove(request)

    def admit(self, request: Request) -> None:
        """Give a request a slot, with the longest prefix that a running one has computed already."""
        request.reqid, request.computed = self.cache.alloc_reqid(), 0
        source = max(self.running, key=request.common, default=request)
        if (length := request.common(source)) and self.cache.share_prefix(source.reqid, request.reqid, length):
            request.computed = length
            self.shared += length
        self.running.append(request)

    def preempt(self) -> None:
        """Memory is short: the request that came last frees its pages, and is computed again later."""
        if len(self.running) < 2:
            raise MemoryError("one request alone does not fit in the cache")
        request = self.running.pop()
        self.cache.free_reqid(request.reqid)
        self.waiting.insert(0, request)
        self.preempted += 1

    def compute(self) -> list[list[int]]:
        """Run the model over the new tokens of all requests; return what it says behind each of them."""
        batch = Batch(*zip(*((each.reqid, len(each.new), each.end) for each in self.running), strict=True))
        self.backend.plan(batch)
        ids = torch.tensor([token for request in self.running for token in request.new])
        logits = self.model(ids, torch.tensor(batch.positions()), self.attend)
        return [part.tolist() for part in logits.argmax(dim=1).split(batch.q_lens)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.backend.append(layer, k, v)
        return self.backend.run(layer, q)

    def accept(self, request: Request, said: list[int]) -> None:
        """Keep the guesses that the model agrees with and the token behind them; cut the rows of the others off."""
        known = len(request.tokens) - request.computed  # of the new tokens; guesses are behind them
        guesses, said = request.new[known:], said[known - 1 :]
        if said:  # else more of the prompt is to come
            agreed = next((n for n, guess in enumerate(guesses) if guess != said[n]), len(guesses))
            request.tokens += said[: agreed + 1]
        request.computed = min(request.end, len(request.tokens) - 1)
        if request.computed < request.end:
            self.cache.truncate(request.reqid, request.computed)
            self.rejected += request.end - request.computed


def main() -> None:
    torch.manual_seed(0)
    requests = [Request([*range(1, 41), n, n + 1], length=120) for n in (50, 52, 54)] + [Request([7], length=60)]
    with SlicedKVCache(**SIZES, **MEMORY, dtype=torch.float32, max_batch_size=4) as cache:
        engine = MinimalEngine(TinyModel(), cache)
        for request in requests:
            engine.waiting.append(request)
            for _ in range(4):  # steps until the next request arrives
                engine.step()
        while engine.waiting or engine.running:
            engine.step()
    print(*(f"{len(each.tokens)} tokens, the last of them {each.tokens[-8:]}" for each in requests), sep="\n")
    print(f"{engine.shared} tokens shared, {engine.rejected} guesses cut off, {engine.preempted} preemptions")


if __name__ == "__main__":
    main()
