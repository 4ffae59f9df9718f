"""What the demo asks: questions of very different lengths, and how long each answer may become."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Job", "draw_jobs"]

_MILL = (
    "The mill at Anselhof stood idle for eleven years. Its wheel had rusted to the axle, and the channel that once "
    "brought water from the river was full of reeds. When Marta bought it, her neighbours thought that she meant to "
    "live in it. Instead she dug out the channel by hand, one metre a day, and had a new wheel made of oak. In spring "
    "the water came back, and the stones turned again. She ground rye for the baker in the next village, then spelt "
    "for two more, and by autumn there was a queue of carts in the yard on Saturdays. The old miller's son, who had "
    "left for the city as a boy, came to look and stayed to help. He knew a thing that she did not: the stones have to "
    "be dressed with a chisel every few weeks, or they crush the grain where they should cut it. The flour became "
    "finer and the queue longer. In the second winter the river froze, the wheel stood still for forty days, and the "
    "village ate potatoes. Marta put a small generator into the wheel house that summer. It feeds one lamp in the "
    "yard, which she leaves burning on Friday nights, so that the carts that come early on Saturday can find the way. "
)
_HARBOUR = (
    "The harbour has two basins. The northern one is deep enough for ferries and is kept free of ice; the southern one "
    "is shallow and belongs to the fishing boats. A lock with two gates joins them, and it opens for one hour at high "
    "tide. Whoever misses the hour waits for the next tide. "
)
_ASKED = (
    ("What is the capital of France?", 32),
    (f"{_MILL}What did Marta do with the mill? Answer in two sentences.", 96),
    ("Explain to a child why the sky is blue.", 160),
    ("Write a short poem about rain on a tin roof.", 120),
    (f"{_HARBOUR}How do boats get from one basin to the other?", 80),
    ("List five things to pack for a week in the mountains.", 160),
    (f"{_MILL}{_HARBOUR}{_MILL}Name the people and places in this text.", 64),
    ("What is a prime number? Give three examples.", 110),
    ("Tell me a story about a lighthouse keeper and a whale.", 220),
    ("Name three colours.", 24),
    (f"{_HARBOUR}{_HARBOUR}Write a letter from a fisherman who missed the tide.", 180),
    ("How does a bicycle stay upright?", 140),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a question for a chat model, and the most tokens of its answer."""

    question: str
    max_tokens: int


def draw_jobs(count: int, max_tokens: int, seed: int) -> list[Job]:
    """Return `count` jobs, in an order and with answer lengths that follow from `seed`."""
    generator = random.Random(seed)
    order: list[tuple[str, int]] = []
    while len(order) < count:
        order += generator.sample(_ASKED, len(_ASKED))
    return [
        Job(question, max(1, min(max_tokens, round(length * generator.uniform(0.75, 1.25)))))
        for question, length in order[:count]
    ]
