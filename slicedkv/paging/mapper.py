"""`Mapper`: runs the planner's work, on a thread of its own ("background") or on the calling thread ("sync").

The thread is started at the first work, lives as long as the cache, sleeps on
the gate's condition and never spins. It holds no reference to the cache object, so a forgotten cache can be collected.
After a failure the thread goes on; the next foreground call raises what it kept.
"""

from __future__ import annotations

import _thread
import threading
import time

from ..errors import OutOfPagesError, StateError
from ..memory.patience import TIMEOUT_S
from .planner import Grow, Planner, Work

__all__ = ["Mapper"]

_FENCE_POLL_S = 0.002


class Mapper:
    """Do background work for one cache.

    Parameters
    ----------
    planner : Planner
    background : bool
        Work on a thread of its own; otherwise inside `run_pending`.

    Attributes
    ----------
    failure : Exception or None
        What went wrong in the background, until a foreground call raises it.
    """

    def __init__(self, planner: Planner, *, background: bool) -> None:
        self.background = background
        self._planner = planner
        self._state = planner.state
        self._gate = planner.state.gate
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._asked_at: float | None = None
        self._answering: float | None = None
        self.failure: Exception | None = None
        self._failed = False

    # --- foreground -----------------------------------------------------------------------------------------------

    def wake(self, *, due: bool = False) -> None:
        """Say that there may be work. With `due`, time from now how late the mapper is. Lock held; never waits."""
        if due and self._asked_at is None:
            self._asked_at = time.perf_counter()
        self._state.news = True
        self._failed = False
        if not self.background or self._stopped:
            return
        if self._thread is None:
            self._start()
        self._gate.lock.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="slicedkv-mapper", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left; the next wake tries again
            self._keep(error)
        else:
            self._thread = thread

    def run_pending(self) -> None:
        """Without a thread, do all work now. It takes the token and keeps failures as the thread does."""
        if self.background or not self._state.news:
            return
        try:
            with self._state.work("background work on the calling thread"):
                while True:
                    with self._gate.lock:
                        work = self._plan()
                    if work is None or not self._execute(work):
                        return
        except StateError:
            self._state.news = True  # somebody else is long at it; this work can wait for the next call

    def raise_failure(self) -> None:
        """Raise, once, what went wrong in the background since the last call."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            failure.add_note("raised by slicedkv's mapper in the background; the call that shows it did nothing yet")
            raise failure

    def stop(self) -> None:
        """End the thread and wait for it, for a bounded time. Idempotent.

        Raises
        ------
        StateError
            A driver call of the thread hangs.
        """
        with self._gate.lock:
            self._stopped = True
            thread = self._thread
            self._gate.lock.notify_all()
        if thread is None or thread.ident == _thread.get_ident():
            return
        thread.join(TIMEOUT_S)
        if thread.is_alive():
            raise StateError(f"the mapper did not end within {TIMEOUT_S:g} s; a driver call hangs")

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._state.pool.driver.bind_thread()
        except Exception as error:
            self._keep(error)
        while True:
            work = self._wait_for_work()
            if work is None:
                return
            try:
                self._execute(work)
            finally:
                self._gate.hand_back()

    def _wait_for_work(self) -> Work | None:
        """Sleep until there is work and the token is ours; None when the mapper is stopped."""
        lock = self._gate.lock
        with lock:
            while not self._stopped:
                if self._state.news and self._gate.try_claim("the mapper"):
                    work = self._plan()
                    if work is not None:
                        return work
                    self._gate.drop_claim()
                waiting = not self._failed and self._awaits_device()
                lock.wait(_FENCE_POLL_S if waiting else None)
                self._state.news |= waiting
        return None

    def _plan(self) -> Work | None:
        """Ask the planner; a failure in planning is kept like one in working. Lock held."""
        self._state.news = False  # from here on a wake is news again, also while the work is being done
        work = None
        try:
            work = self._planner.next()
        except Exception as error:
            self._keep(error)
        # A step that asks from now on is answered by the next batch, not by this one.
        self._answering, self._asked_at = self._asked_at, None
        return work

    def _awaits_device(self) -> bool:
        """Ask the planner; a failure of the device is kept, or it would end the thread. Lock held."""
        try:
            return self._planner.awaits_device()
        except Exception as error:
            self._keep(error)
            return False

    def _keep(self, error: Exception) -> None:
        """Keep the first failure for the foreground, and do nothing more until the foreground has news."""
        self.failure = self.failure or error
        self._failed = True

    def _execute(self, work: Work) -> bool:
        """Do one batch; False when it failed. Work that fails is not tried again before there is news."""
        try:
            seconds = self._planner.execute(work)
        except OutOfPagesError:
            return False  # the device has less than the limit: what was to be mapped ahead is mapped at need
        except Exception as error:
            self._keep(error)
            return False
        with self._gate.lock:
            self._state.news = True  # there may be more
            self._failed = False
            if self.background:
                self._state.counters.hidden_map_us += seconds * 1e6
            else:
                self._state.counters.critical_map_us += seconds * 1e6
            if isinstance(work, Grow) and work.reason == "lookahead":
                mappings = sum(pages for _, pages in work.growths) * self._state.layout.num_planes
                asked = self._answering
                since_asked = None if asked is None else time.perf_counter() - asked
                self._state.pace.mapped(mappings, seconds, since_asked)
        return True
