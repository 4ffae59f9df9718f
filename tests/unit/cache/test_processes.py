"""The end of a process, and forked children, while a cache is open and its thread is mapping (cases C3, C5).

Every test runs scripts in processes of their own: what counts is the exit code and that stderr stays empty. They are
forked from one that has imported torch, but for the last exit.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from warm_python import run_script

OPEN = """
import atexit, gc, os, sys, threading, time

@atexit.register  # before slicedkv does, so that this runs when slicedkv is done
def report():
    if 0 < driver.counts["map"] < 2 * PAGES * 60 // 128:
        print("in the middle")

import torch
from slicedkv import PagePool, SlicedKVCache, StateError
from slicedkv.vmm.faulty import FaultyDriver
from slicedkv.vmm.host import HostDriver

PAGE, PAGES = 65536, 8192
driver = FaultyDriver(HostDriver(), record=False)
pool = PagePool(driver, page_bytes=PAGE, memory_limit=PAGES * PAGE, extent_pages=1)
cache = SlicedKVCache(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float16, max_batch_size=4,
                      max_seq_len=PAGES * 128, pool=pool, mapper=sys.argv[1])

def start_mapping():
    driver.delay("map", 0.0005)
    cache.alloc_reqid(PAGES * 60)
    while not driver.counts["map"]:
        time.sleep(0.001)

def step_for_ever():
    try:
        while True:
            cache.step({0: 1})
    except StateError:
        pass
"""

ENDS = {
    "at the end of the script": "start_mapping()",
    "by sys.exit in a function": "start_mapping()\ndef leave():\n    keys = cache.k(0)\n    sys.exit(0)\nleave()",
    "in a reference cycle": "start_mapping()\nring = [cache]\nring.append(ring)\ndel ring, cache",
    "just after it was dropped": "start_mapping()\ndel cache, start_mapping, step_for_ever\ngc.collect()",
    "while a daemon thread steps": "start_mapping()\nthreading.Thread(target=step_for_ever, daemon=True).start()",
}


def run(script: str, *arguments: str) -> tuple[int, str, str]:
    return run_script(OPEN + textwrap.dedent(script), *arguments)


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_exits_without_close_in_the_middle_of_mapping_are_silent(times: int) -> None:
    scripts = [*ENDS.values()] * times
    with ThreadPoolExecutor(2) as two_at_a_time:
        results = list(two_at_a_time.map(lambda script: run(script, "background"), scripts))
    assert results == [(0, "in the middle\n", "")] * len(scripts)


def test_an_exit_waits_for_a_daemon_thread_that_computes_inside_a_call() -> None:
    script = """
    import slicedkv.cache
    parse, numbers = slicedkv.cache.parse_seq_lens, torch.empty(40_000_000)
    slicedkv.cache.parse_seq_lens = lambda *given: (numbers.normal_(), parse(*given))[1]  # half a second, without GIL
    start_mapping()
    threading.Thread(target=step_for_ever, daemon=True).start()
    time.sleep(0.05)
    """
    assert run(script, "background") == (0, "in the middle\n", "")


def test_an_exit_is_silent_when_nothing_can_be_unmapped_and_a_view_is_left() -> None:
    script = """
    cache.step({cache.alloc_reqid(): 500})
    keys = cache.k(0)
    driver.fail("unmap", times=10**9)
    """
    for end in ("", "del cache"):
        assert run(textwrap.dedent(script) + end, "background") == (0, "in the middle\n", "")


def test_an_exit_without_close_and_without_a_thread_is_silent() -> None:
    script = OPEN + "cache.step({cache.alloc_reqid(): 500})"
    done = subprocess.run([sys.executable, "-c", script, "sync"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "in the middle\n", "")


FORK = """
atexit.unregister(report)
start_mapping()
keys = cache.k(0)
child = os.fork()
if child == 0:
    calls = [
        lambda: cache.kv_tensors, lambda: cache.k(0), lambda: cache.v(0), cache.alloc_reqid, cache.trim, cache.stats,
        lambda: cache.prefetch(0, 5), lambda: cache.free_reqid(0), lambda: cache.step({0: 1}), cache.check_integrity,
        lambda: cache.pages_needed({0: 1}), cache.pages_available, lambda: cache.can_admit(1), cache.close,
        lambda: cache.set_memory_limit(PAGE), lambda: cache.__enter__(),
    ]
    begun = time.monotonic()
    for call in calls:
        try:
            call()
        except StateError as error:
            if "belongs to" not in str(error):
                sys.exit("wrong error")
        else:
            sys.exit("no error")
    if time.monotonic() - begun > 1:
        sys.exit("slow")
    if sys.argv[2] == "drop":
        del cache, keys, calls
        gc.collect()
    # The child ends like any script: finalizers and exit functions run.
else:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    driver.heal()
    assert cache.step({0: PAGES * 60})
    keys[0, PAGES * 60 - 1] = 7
    cache.check_integrity()
    cache.close()
    pool.trim()
    print(status, driver.inner.used_bytes())
"""


@pytest.mark.parametrize("end", ["keep", "drop"])
@pytest.mark.parametrize("mapper", ["background", pytest.param("sync", marks=pytest.mark.thorough)])
def test_a_forked_child_gets_an_error_and_its_parent_goes_on(mapper: str, end: str) -> None:
    if mapper == "sync":
        script = FORK.replace("start_mapping()", "assert cache.step({cache.alloc_reqid(): 500})")
    else:
        script = FORK
    assert run(script, mapper, end) == (0, "0 0\n", "")


OWN = """
atexit.unregister(report)
torch.set_num_threads(1)

def serve(cache, value):
    assert cache.step({reqid: 500 for reqid in [cache.alloc_reqid(500) for _ in range(4)]})
    for layer in range(2):
        cache.k(layer)[:, :500], cache.v(layer)[:, :500] = value, -value
    return bool((cache.k(1)[:, :500] == value).all() and (cache.v(1)[:, :500] == -value).all())

assert serve(cache, 3)
child = os.fork()
if child == 0:
    options = dict(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float16, max_batch_size=4)
    with SlicedKVCache(**options, max_seq_len=PAGES * 128, device="cpu", page_bytes=PAGE, mapper=sys.argv[1]) as own:
        assert serve(own, 8)
        own.check_integrity()
else:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, bool((cache.k(1)[:, :500] == 3).all() and (cache.v(0)[:, :500] == -3).all()))
    cache.check_integrity()
    cache.close()
"""


@pytest.mark.parametrize("mapper", ["background", "sync"])
def test_a_forked_child_opens_a_cache_of_its_own(mapper: str) -> None:
    assert run(OWN, mapper) == (0, "0 True\n", "")
