"""Two threads on the same requests: whatever the second does in a gap of the first, it comes before or after it.

A call that lets go of the lock between deciding and acting leaves gaps. At each of them another thread ends a request,
lets its slot go to a new one, steps, rewinds, shares, moves or cuts it, or another cache of the pool takes memory.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from interleaving import LENGTHS, PAGE, Call, World, check_pair


def step(**lens: int) -> Call:
    return [lambda world: world.cache.step({world[name]: length for name, length in lens.items()})]


def write(name: str, start: int, end: int) -> Call:
    def call(world: World) -> None:
        with world.turn:
            world.lock.traced = None if threading.get_ident() == world.lock.traced else world.lock.traced
            world.write(name, start, end)

    return [call]


def rewind(name: str) -> Call:
    """A request that overwrites its tokens from the second on."""
    return [*step(**{name: 1}), *step(**{name: 100}), *write(name, 1, 100)]


def free(name: str) -> Call:
    return [lambda world: world.cache.free_reqid(world[name])]


def recycle(name: str) -> Call:
    """The request ends, and the next one, as long as it and so the best fit for its slot, writes rows of its own."""
    new, length = f"after {name}", LENGTHS.get(name, 100)

    def begin(world: World) -> object:
        world.name(new, world.cache.alloc_reqid(length), 0)
        return True

    return [*free(name), begin, *step(**{new: length}), *write(new, 0, length)]


def share(source: str, target: str, num_tokens: int) -> Call:
    def call(world: World) -> object:
        ok = world.cache.share_prefix(world[source], world[target], num_tokens)
        if ok:
            world.defined[target] = world.most[target] = num_tokens
        return ok

    return [call]


def fork(name: str) -> Call:
    def call(world: World) -> object:
        (reqid,) = world.cache.fork(world[name])
        world.name("forked", reqid, world.cache.seq_len(reqid))
        return True

    return [call]


def swap_out(name: str) -> Call:
    def call(world: World) -> object:
        handle, world.handle = world.handle, world.cache.swap_out(world[name])
        handle.release()
        return True

    return [call]


def swap_in(world: World) -> object:
    reqid = world.cache.swap_in(world.handle)
    if reqid is not None:
        world.name("back", reqid, world.handle.seq_len)
    return reqid is not None


def release(world: World) -> object:
    return world.handle.release()


def truncate(name: str, seq_len: int) -> Call:
    def call(world: World) -> object:
        world.cache.truncate(world[name], seq_len)
        world.defined[name] = min(world.defined[name], seq_len)
        return True

    return [call]


def prefetch(name: str) -> Call:
    return [lambda world: world.cache.prefetch(world[name], 200)]


def look(world: World) -> object:
    stats = world.cache.stats()
    values = {name: getattr(stats, name) for name in stats.__slots__ if name.endswith(("_bytes", "_slots"))}
    assert min(values.values()) >= 0, values
    assert world.cache.pages_available() >= 0
    assert world.cache.can_admit(1) in {True, False}
    return None


def look_at_use(world: World) -> object:
    """While requests only come, what is in use does not get less."""
    assert world.cache.stats().used_bytes >= world.used_bytes
    return None


def another(world: World) -> object:
    """Another cache of the pool wants memory."""
    reqid = world.other.alloc_reqid()
    ok = world.other.step({reqid: 64})
    world.other.free_reqid(reqid)
    return ok


def check(world: World) -> object:
    return world.cache.check_integrity()


def pause(offload: bool) -> Call:
    return [lambda world: world.cache.pause(offload=offload) >= 0]


SHORT = {"limit_pages": 6}
DEBUG = {"debug": True}
ZEROING = {"zero_on_reuse": True, "limit_pages": 24}
LOOK, ANOTHER, SWAP_IN, RELEASE = [look], [another], [swap_in], [release]
LOOKERS: list[Call] = [LOOK, [check], ANOTHER]

PAIRS: dict[str, tuple[Call, list[Call], dict[str, Any]]] = {
    "a step that copies on write": (
        [*step(sharer=150), *write("sharer", 1, 150)],
        [
            free("source"),
            recycle("source"),
            rewind("source"),
            rewind("third"),
            step(source=100),
            truncate("source", 40),
            fork("source"),
            swap_out("source"),
            share("source", "empty", 70),
            *LOOKERS,
        ],
        {},
    ),
    "its own request": (
        step(sharer=150),
        [
            free("sharer"),
            recycle("sharer"),
            step(sharer=1),
            step(sharer=150),
            truncate("sharer", 0),
            prefetch("sharer"),
            swap_out("sharer"),
            fork("sharer"),
        ],
        {},
    ),
    "a step that copies while memory is short": (
        step(sharer=110),
        [free("source"), free("third"), recycle("third"), free("sharer"), rewind("third"), ANOTHER, LOOK],
        SHORT,
    ),
    "a step that only overwrites": (
        step(rewound=80),
        [
            free("rewound"),
            recycle("rewound"),
            free("child"),
            recycle("child"),
            rewind("child"),
            swap_out("child"),
            LOOK,
        ],
        {},
    ),
    "the same while memory is short": (
        step(rewound=80, lone=130),
        [free("rewound"), free("child"), recycle("child"), free("lone"), ANOTHER],
        SHORT,
    ),
    "a step of two": (
        step(lone=200, rewound=1),
        [
            step(rewound=40),
            step(lone=20),
            free("lone"),
            recycle("lone"),
            recycle("rewound"),
            truncate("lone", 3),
            share("lone", "empty", 50),
            prefetch("lone"),
        ],
        {},
    ),
    "sharing a prefix": (
        share("source", "empty", 70),
        [
            free("empty"),
            recycle("empty"),
            free("source"),
            recycle("source"),
            rewind("source"),
            step(empty=5),
            prefetch("empty"),
            swap_out("empty"),
            swap_out("source"),
            truncate("source", 40),
            fork("empty"),
            [look_at_use],
            *LOOKERS,
        ],
        {},
    ),
    "sharing less than a page": (
        share("source", "empty", 5),
        [
            free("empty"),
            recycle("source"),
            rewind("source"),
            step(empty=9),
            prefetch("empty"),
            truncate("source", 2),
            [look_at_use],
            LOOK,
        ],
        {},
    ),
    "sharing while memory is short": (
        share("lone", "empty", 70),
        [free("third"), free("lone"), recycle("lone"), ANOTHER, LOOK],
        SHORT,
    ),
    "a fork": (
        fork("lone"),
        [
            free("lone"),
            recycle("lone"),
            rewind("lone"),
            swap_out("lone"),
            truncate("lone", 40),
            step(lone=95),
            [look_at_use],
            *LOOKERS,
        ],
        {},
    ),
    "swapping out": (
        swap_out("lone"),
        [
            step(lone=90),
            step(lone=91),
            free("lone"),
            recycle("lone"),
            prefetch("lone"),
            truncate("lone", 3),
            share("lone", "empty", 50),
            fork("lone"),
            swap_out("lone"),
            *LOOKERS,
        ],
        {},
    ),
    "swapping in": (SWAP_IN, [RELEASE, free("lone"), recycle("lone"), SWAP_IN, ANOTHER, LOOK], {}),
    "swapping in while memory is short": (
        SWAP_IN,
        [RELEASE, free("lone"), recycle("lone"), ANOTHER],
        {"limit_pages": 2},
    ),
    "pausing": (
        pause(True),
        [
            free("lone"),
            free("source"),
            step(lone=90),
            prefetch("lone"),
            truncate("lone", 3),
            SWAP_IN,
            fork("lone"),
            LOOK,
        ],
        {},
    ),
    "trimming": (
        [lambda world: world.cache.trim() >= 0],
        [recycle("lone"), free("source"), truncate("lone", 3), step(lone=200), LOOK],
        {},
    ),
    "moving the limit": (
        [lambda world: world.cache.set_memory_limit(300 * PAGE)],
        [recycle("lone"), free("source"), truncate("lone", 3), LOOK],
        {},
    ),
    "zeroing": (
        step(lone=200),
        [
            free("lone"),
            recycle("lone"),
            swap_out("lone"),
            fork("lone"),
            truncate("lone", 3),
            pause(True),
            step(lone=20),
        ],
        ZEROING,
    ),
    "a step that copies on write where shared pages are read-only": (
        [*step(sharer=150), *write("sharer", 1, 150)],
        [free("source"), recycle("source"), rewind("source"), rewind("third"), swap_out("source"), LOOK],
        DEBUG,
    ),
    "sharing where shared pages are read-only": (
        share("lone", "empty", 70),
        # Not `recycle`: a share that comes after it would be one of the new request, which then writes what it shares.
        [free("lone"), free("empty"), free("third"), step(empty=200), LOOK],
        DEBUG,
    ),
    "freeing a sharer where shared pages are read-only": (
        [*free("child"), lambda world: world.cache.trim() >= 0],
        [rewind("rewound"), recycle("rewound"), fork("rewound"), truncate("rewound", 1), swap_out("rewound")],
        DEBUG,
    ),
    "a request that comes": (
        recycle("sharer"),
        [free("third"), recycle("third"), rewind("source"), fork("source"), LOOK],
        {},
    ),
}
# Every sixth release of every third pair, and all of all.
CASES = [
    pytest.param(first, second, options, distance, id=f"{name}-{nth}-{distance}", marks=marks)
    for place, (name, (first, seconds, options)) in enumerate(PAIRS.items())
    for nth, second in enumerate(seconds)
    for distance, marks in ((6, []), (1, [pytest.mark.thorough]))
    if distance == 1 or (nth + place) % 3 == 0
]


@pytest.mark.parametrize(("first", "second", "options", "distance"), CASES)
def test_the_outcome_is_that_of_one_order(first: Call, second: Call, options: dict[str, Any], distance: int) -> None:
    last = check_pair(first, second, range(1, 1000, distance), **options)
    assert last >= (3 if distance == 1 else 1), "it has gaps"
