"""`SlicedKVCache`, the facade: what an engine calls. It checks arguments, takes the lock and asks the other parts.

Knows nothing of attention. What is mapped when is decided in `planner` (ahead of need) and `growth` (now), what may be
taken back in `victims`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from .checks import check_bool, check_int
from .closing import Closeable, abandon, shut_down
from .config import CacheConfig, MapperKind, MemoryLimit
from .layout import KVLayout, LayoutKind
from .memory.page_pool import PagePool
from .opening import limit_bytes, open_state
from .paging.mapper import Mapper
from .paging.planner import Planner
from .paging.reclaim import set_memory_limit, trim
from .paging.victims import available_pages, freeable_pages, has_room
from .requests.copier import Copier
from .requests.copy_on_write import CopyOnWrite
from .requests.lifetime import Lifetime
from .requests.pause import Pauser
from .requests.row_mover import RowMover
from .requests.sharing import Sharer
from .requests.stepping import Stepper
from .requests.swap import SwapHandle, Swapper
from .requests.zeroing import Zeroer
from .state.lengths import SeqLens, parse_seq_lens
from .stats import CacheStats
from .views import KVViews

__all__ = ["SlicedKVCache"]


class SlicedKVCache(Closeable):
    """A KV cache whose requests are contiguous in virtual memory and hold physical pages only as they grow.

    Every public method may be called from any thread, see `slicedkv.state.holds`; on a thread that is in the middle of
    another call only `free_reqid` may be. None waits for the GPU unless it says so. With `mapper="sync"`
    any may wait, for at most 4 s, for driver calls of another thread.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, dtype, max_batch_size, max_seq_len, device, ...
        The fields of `CacheConfig`, described there.
    pool : PagePool, optional
        Share handles and their limit with other caches. Its device, limit, page size and extents hold.

    Raises
    ------
    ConfigError
        An argument is wrong; nothing was opened.
    BackendUnavailableError
        The device's driver is not there.
    DriverError, StateError
        Addresses could not be reserved; the pool has ended. Nothing stays open.
    """

    _instead = "fork() copies requests, another process opens a cache of its own"

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | str,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device | str | None = None,
        memory_limit: int | float | str | None = None,
        page_bytes: int | None = None,
        extent_pages: int | None = None,
        layout: LayoutKind = "sliced",
        mapper: MapperKind = "background",
        lookahead_tokens: int | None = None,
        eager_tokens: int | Literal["auto"] = 0,
        reclaim_watermark: float = 0.1,
        guard_tokens: int = 0,
        zero_on_reuse: bool = False,
        swap_limit: int | float | str | None = None,
        min_share: int | float | str | None = None,
        debug: bool = False,
        pool: PagePool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in {"self", "pool", "__class__"}}
        super().__init__()
        config = CacheConfig(**options)
        self._state = open_state(config, pool)
        self._gate = self._state.gate
        self.dtype: torch.dtype = config.dtype
        self.device = torch.device(self.pool.driver.torch_device)
        self._views = KVViews(self._state.backing, config.dtype)
        self._num_slots = config.max_batch_size
        planner = Planner(self._state)
        self._mapper = Mapper(planner, background=config.mapper == "background")
        copier = Copier(self._state, self._views)
        self._zeroer = Zeroer(self._state, copier) if config.zero_on_reuse else None
        self._copy_on_write = CopyOnWrite(self._state, copier)
        self._stepper = Stepper(self._state, self._mapper, self._copy_on_write, self._zeroer)
        self._lifetime = Lifetime(self._state, planner, self._mapper)
        self._sharer = Sharer(self._state, self._lifetime, self._mapper, copier)
        mover = RowMover(self._state, self._zeroer)
        self._swapper = Swapper(self._state, self._lifetime, mover)
        self._pauser = Pauser(self._state, self._mapper, mover)
        self._finalizer = weakref.finalize(self, abandon, self._state, self._mapper, os.getpid())
        self._finalizer.atexit = False  # the exit is handled where nothing can be in the way
        self._refusal = None

    # --- what it looks like -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"SlicedKVCache({self.layout}, {self.dtype}, {self.device}{', closed' if self.closed else ''})"

    @property
    def layout(self) -> KVLayout:
        """Geometry: bytes and pages of a length, strides, capacity."""
        return self._state.layout

    @property
    def pool(self) -> PagePool:
        """The pool of handles, to be shared with another cache."""
        return self._state.pool

    @property
    def kv_tensors(self) -> tuple[torch.Tensor, ...]:
        """The raw planes, virtual tensors; see `slicedkv.layout` for their shapes. New views each time, as from `k`.

        Only rows below a request's length may be read. After `close` the addresses stay reserved while a view lives,
        and reading them faults.
        """
        self._check_open()
        return self._views.planes()

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer: a view ``[B, L, H, D]`` with ``stride(-1) == 1``; index 0 is the reqid.

        A new view each time. To pickle, save or send rows `clone` them: torch would take the cache's whole memory.

        Raises
        ------
        ConfigError
            No such layer.
        StateError
            The cache is closed.
        """
        self._check_open()
        return self._views.k(check_int("layer", layer, 0, self.layout.num_layers - 1))

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k`."""
        self._check_open()
        return self._views.v(check_int("layer", layer, 0, self.layout.num_layers - 1))

    @property
    def debug(self) -> bool:
        """Whether the cache was opened to find writes where nobody may write; see `CacheConfig`."""
        return self._state.config.debug

    @property
    def protects_shared_pages(self) -> bool:
        """Whether pages that requests share are mapped read-only: with `debug`, where the device can do that."""
        return self._state.protector is not None

    # --- requests ---------------------------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int:
        """Give a new request a slot, the one whose mapped pages suit it best, and return its reqid.

        With `seq_len`, mapping that many tokens starts in the background; `step` waits for what is missing. Of an
        extent that `seq_len` tokens need only in part nobody else could have the rest: where that is more than an
        eighth of their own pages it is unmapped first, for which it waits for the mapper's calls of this moment. If
        work of the slot's last request may still run, nothing is, and work queued later on the current stream is
        ordered after it; a slot that still shares pages is handed out last, and waited for.

        Raises
        ------
        OutOfSlotsError
            All slots are active.
        ConfigError, StateError, DriverError
            `seq_len` is out of range; the cache is closed; the driver failed to unmap, and no request began.
        """
        self._enter()
        slot = self._lifetime.begin(check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        self._mapper.run_pending()
        return slot

    def prefetch(self, reqid: int, seq_len: int) -> None:
        """Start mapping `seq_len` tokens for an active request ahead of need. Never waits with `mapper="background"`.

        Raises
        ------
        ConfigError, StateError
            `seq_len` is out of range; `reqid` is not active.
        """
        self._enter()
        self._lifetime.want(self._check_reqid(reqid), check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        self._mapper.run_pending()

    def free_reqid(self, reqid: int) -> None:
        """End a request. Its pages stay for the next request in the slot and are unmapped only when needed elsewhere,
        after the work queued so far on the current stream is done. Works while paused, too.

        Where another thread's call uses them, the pages stay in use until it is over, and the slot with them; this call
        does not wait for that. It waits for a `pause` or a `swap_out` of the request that is under way. In a signal's
        handler or a finalizer that interrupts a call of this thread, the end is noted, and takes effect with the next
        call.

        Raises
        ------
        ConfigError, StateError
            `reqid` is out of range; it is not active (freed twice); the current stream is being captured.
        """
        self._check_open()
        reqid = self._check_reqid(reqid)
        if not self._gate.is_inside():
            self._enter()
        self._lifetime.end(reqid)
        self._mapper.run_pending()

    def truncate(self, reqid: int, seq_len: int) -> None:
        """Cut a request to its first `seq_len` tokens and give the pages behind them back.

        The request goes on from there, as a request of that length. Pages are unmapped in the background, with
        `mapper="sync"` by a later call, after the work queued so far on the current stream; until then they count as
        available. What other requests share of them stays with those, and an extent that is needed in part stays whole.

        Parameters
        ----------
        reqid : int
            An active request.
        seq_len : int
            Tokens to keep: 0, and at most the length of its last step.

        Raises
        ------
        ConfigError
            An argument is out of range.
        StateError
            `reqid` is not active, or has fewer tokens; the current stream is being captured. Nothing was changed.
        """
        self._enter()
        seq_len = check_int("seq_len", seq_len, 0, self.layout.max_seq_len)
        self._lifetime.truncate(self._check_reqid(reqid), seq_len)
        self._mapper.run_pending()

    def is_active(self, reqid: int) -> bool:
        """True while a request has this slot: from `alloc_reqid` to `free_reqid`, unless a failing driver lost it.

        Raises
        ------
        ConfigError, StateError
            `reqid` is out of range; the cache is closed.
        """
        self._look()
        with self._gate.lock:
            return self._state.has_request(self._check_reqid(reqid))

    def seq_len(self, reqid: int) -> int:
        """Tokens of a request: the length that its last `step`, `share_prefix`, `fork` or `truncate` gave it.

        Raises
        ------
        ConfigError, StateError
            `reqid` is out of range; it is not active.
        """
        self._look()
        with self._gate.lock:
            self._state.slots.require_active(self._check_reqid(reqid))
            return self._state.lengths.last(reqid)

    # --- growth -----------------------------------------------------------------------------------------------------

    def step(self, seq_lens: SeqLens) -> bool:
        """Make sure that tokens ``[0, len + guard_tokens)`` of every request are mapped in every layer.

        Costs a vector comparison when nothing has to grow. Otherwise maps what is missing, waiting for the mapper
        where it is at it and, when memory is short, for device work of freed requests. A request that shares pages
        gets its own copy of those it may write now, see `slicedkv.requests.copy_on_write`; that waits for the current
        stream, and the rows it keeps in them are unmapped for a moment, so no other stream or thread may read them
        meanwhile. Where another thread's call is at one of the requests, the step comes after that call.

        Parameters
        ----------
        seq_lens : mapping, sequence, numpy array or CPU tensor of ints
            ``{reqid: len}``, or `max_batch_size` lengths; 0 leaves a slot alone.

        Returns
        -------
        bool
            True: kernels launched after this call may read and write those tokens; where pages are shared, they may
            write from the request's former length on. False: not enough memory, no request lost anything; free or
            preempt one and try again.

        Raises
        ------
        ConfigError, StateError
            A length is out of range, or given for a reqid that is not active, also when its request ended while the
            call waited; nothing was changed.
        DriverError
            The driver failed for another reason than memory; no request lost anything.
        LostSlotsError
            Undoing that failed too: the requests in its `slots` ended, the slots are out of use. Others lost nothing.
        """
        self._enter()
        lens = parse_seq_lens(seq_lens, self._num_slots)
        ok = self._stepper.step(lens)
        if not self._mapper.background:
            self._mapper.run_pending()
            if ok and self._zeroer is not None:
                self._zeroer.run(lens)
        return ok

    def check_writable(self, reqids: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Refuse rows that a kernel launched now must not write, with or without `debug`.

        Attention backends ask before they append to a cache with `debug`. Waits for nothing.

        Parameters
        ----------
        reqids, starts, ends : sequence of int
            For each request, rows ``[start, end)``.

        Raises
        ------
        ConfigError
            A reqid is out of range, or a row.
        StateError
            A request is not active; rows lie behind the length of its last step, or in pages that others have mapped
            too; the cache is paused or closed. The message names the first such rows.
        """
        self._look()
        for reqid, start, end in zip(map(self._check_reqid, reqids), starts, ends, strict=True):
            check_int(f"end of reqid {reqid}", end, 0, self.layout.max_seq_len)
            check_int(f"start of reqid {reqid}", start, 0, end)
        with self._gate.lock:
            self._copy_on_write.require_writable(reqids, starts, ends)

    # --- sharing a prefix ---------------------------------------------------------------------------------------------

    def share_prefix(self, src: int, dst: int, num_tokens: int) -> bool:
        """Give a request without tokens the first `num_tokens` tokens of another, sharing all whole pages of them.

        Both go on, grow and end independently of each other. Afterwards `dst` has `num_tokens` tokens, as after a step
        to that length. The rows that no whole handle holds are copied by work on the current stream, so whatever
        writes the prefix must be queued before on that stream (or that stream be ordered after it), and whatever reads
        it from `dst` after. Pages that `dst` has from the last request in its slot are unmapped; if its work is not
        over, the call waits for it, as it does for that of other freed requests when memory is short. With `debug` it
        also waits for the work queued on the current stream, as the pages become read-only. Costs the driver time of
        one mapping per handle. What another thread asks of one of the two requests meanwhile, such as freeing it,
        happens after this call.

        Parameters
        ----------
        src : int
            An active request.
        dst : int
            An active request that has had no step yet, such as `alloc_reqid()` returns.
        num_tokens : int
            At least 1 and at most the length of `src` in its last step.

        Returns
        -------
        bool
            False: not enough memory for the rows to be copied and the guard rows; no request lost or got anything.

        Raises
        ------
        ConfigError
            An argument is no integer or out of range, or `src` is `dst`.
        StateError
            A request is not active; `dst` has tokens; `src` has fewer than `num_tokens`; the current stream is being
            captured; device work did not end in time. Nothing was changed.
        DriverError
            The driver failed for another reason than memory; no request lost or got anything.
        """
        self._enter()
        src, dst = self._check_reqid(src), self._check_reqid(dst)
        return self._sharer.share(src, dst, check_int("num_tokens", num_tokens, 1, self.layout.max_seq_len))

    def fork(self, reqid: int, n: int = 1) -> list[int]:
        """Begin `n` requests with all tokens of another one, sharing all whole pages of them; return their reqids.

        As `n` times `alloc_reqid` and `share_prefix`, all or nothing, in the slots that have the least to unmap.

        Parameters
        ----------
        reqid : int
            An active request; the length of its last step counts.
        n : int
            At least 1.

        Raises
        ------
        OutOfSlotsError, OutOfPagesError
            There are not `n` idle slots; not enough memory for the rows to be copied. Nothing was changed.
        ConfigError, StateError, DriverError
            As `share_prefix`.
        """
        self._enter()
        return self._sharer.fork(self._check_reqid(reqid), check_int("n", n, 1))

    def shareable_pages(self, reqid: int, num_tokens: int) -> int:
        """Pages over all planes that `share_prefix(reqid, ..., num_tokens)` would map a second time, not create.

        Raises
        ------
        ConfigError, StateError
            An argument is out of range; the cache is closed.
        """
        self._look()
        reqid, num_tokens = self._check_reqid(reqid), check_int("num_tokens", num_tokens, 0, self.layout.max_seq_len)
        with self._gate.lock:
            segments = self._state.backing.first_segments(reqid, self.layout.whole_pages(num_tokens))
        return segments.pages * self.layout.num_planes

    def freeable_pages(self, reqids: Iterable[int]) -> int:
        """Pages over all planes by which `pages_available()` would grow if all these requests ended.

        What other requests share stays, and what the requests have mapped ahead is available already. One that is not
        active counts nothing.

        Raises
        ------
        ConfigError, StateError
            A reqid is out of range; the cache is closed.
        """
        self._look()
        slots = {self._check_reqid(reqid) for reqid in reqids}
        with self._gate.lock:
            return freeable_pages(self._state, slots & self._state.slots.active - self._state.slots.ending)

    # --- leaving the device and coming back ---------------------------------------------------------------------------

    def swap_out(self, reqid: int) -> SwapHandle:
        """Copy a request's K and V to host memory and end it here; `swap_in` brings it back.

        One copy for each plane, of exactly its tokens, after the work queued so far on the current stream and beside
        what is queued later. The slot is free at once. Its pages can be had by others, as those of a freed request,
        once the copy is done; who needs them waits for that. Pages that it shares are copied too and stay with the
        others.

        Parameters
        ----------
        reqid : int
            Its length is the longest that `step` was given for it.

        Returns
        -------
        SwapHandle
            Drop or `release` it when the request is not wanted any more.

        Raises
        ------
        CapacityError
            Host memory is short, in bytes; nothing was changed.
        ConfigError, StateError
            `reqid` is out of range; it is not active; the current stream is being captured. Nothing was changed.
        DriverError
            The driver could not copy; nothing was changed.
        """
        self._enter()
        handle = self._swapper.swap_out(self._check_reqid(reqid))
        self._mapper.run_pending()
        return handle

    def swap_in(self, handle: SwapHandle) -> int | None:
        """Bring a request that was swapped out into a free slot and return its reqid there.

        Its tokens are backed, by pages of its own also where it shared some before, and kernels launched on the current
        stream after this call see them. Waits, as `step` does, for the mapper and for device work of freed requests
        when memory is short; not for the copy.

        Returns
        -------
        int or None
            None: not enough memory, nothing was changed and the handle is good as before; free or preempt a request
            and try again.

        Raises
        ------
        OutOfSlotsError
            All slots are active; nothing was changed.
        ConfigError, StateError
            `handle` is of another cache; it was swapped in or released already.
        DriverError
            The driver failed for another reason than memory; the handle is good as before.
        """
        self._enter()
        reqid = self._swapper.swap_in(handle)
        self._mapper.run_pending()
        return reqid

    def pause(self, *, offload: bool = False) -> int:
        """Give memory back to the device until `resume`, keeping addresses, views and captured graphs valid.

        Idle, lookahead, eager and free memory is given back and no more is mapped ahead. With `offload` active requests
        go to host memory as well, each with all its rows, and nothing is left on the device. Until `resume` every call
        that would change something raises `StateError`, but for `free_reqid` and `set_memory_limit`, which make room
        for it; `stats`, `close` and other readers work. Waits for all work of the device and for the copies. Requests'
        rows must not be read or written meanwhile: after `offload` that faults.

        Returns
        -------
        int
            Bytes given back to the device.

        Raises
        ------
        CapacityError
            Host memory is short, in bytes; nothing was changed.
        StateError
            The cache is paused already; device work or a copy did not end in time; the current stream is being
            captured.
        DriverError
            The driver failed; no request lost a row and the cache is not paused, or, where undoing it failed too, a
            `StateError` says that it is. What failed after requests had left brings them back sharing no pages.
        """
        self._enter()
        return self._pauser.pause(offload=check_bool("offload", offload))

    def resume(self) -> None:
        """Undo `pause`: bring requests back to their slots, at their lengths, and serve again.

        Kernels launched on the current stream after this call see the rows. Waits as `step` does, not for the copies.
        Requests that went to host memory share no pages any more, so they may need more memory than before; what is
        missing can be had by `free_reqid` and `set_memory_limit`.

        Raises
        ------
        OutOfPagesError
            There is no memory for the requests now; the cache stays paused and nothing was changed.
        StateError
            The cache is not paused.
        DriverError
            The driver failed; the cache stays paused.
        """
        self._enter()
        self._pauser.resume()
        self._mapper.run_pending()

    # --- memory -----------------------------------------------------------------------------------------------------

    def pages_needed(self, seq_lens: SeqLens) -> int:
        """Pages over all planes that `step(seq_lens)` would take of `pages_available()`; raises as `step` does."""
        self._look()
        lens = parse_seq_lens(seq_lens, self.layout.max_batch_size)
        with self._gate.lock:
            return self._stepper.pages_needed(lens)

    def pages_available(self) -> int:
        """Pages over all planes that can be had: free, creatable, and idle, lookahead and eager pages."""
        self._look()
        with self._gate.lock:
            return available_pages(self._state)

    def can_admit(self, seq_len: int) -> bool:
        """True when a slot is idle and memory holds `seq_len` more tokens beside the active requests."""
        self._look()
        pages = self.layout.pages_for(check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        with self._gate.lock:
            return has_room(self._state, pages)

    def trim(self) -> int:
        """Give idle, lookahead, eager and free memory back to the device, and unused host memory to the system.

        Returns the bytes given back to the device. Waits, for a bounded time, for device work of freed requests.
        """
        self._enter()
        with self._state.work("trim"):
            return trim(self._state) * self.layout.page_bytes

    def set_memory_limit(self, memory_limit: MemoryLimit) -> None:
        """Change the memory limit, giving memory above it back to the device. Waits as `trim` does. Also while paused.

        `memory_limit` is as when opening; a fraction is of what is free on the device now and what the pool holds.

        Raises
        ------
        ConfigError, OutOfPagesError
            It is no limit; active requests hold more. The limit stays as it was.
        """
        self._enter()
        with self._state.work("set_memory_limit", paused=True):
            set_memory_limit(self._state, limit_bytes(memory_limit, self.pool.driver, self.pool))

    def stats(self) -> CacheStats:
        """Take a snapshot of memory, counters and times."""
        self._look()
        with self._gate.lock:
            return self._state.snapshot()

    def check_integrity(self) -> None:
        """Compare all books with each other. Waits for driver work under way, for a bounded time.

        Raises
        ------
        StateError
            An invariant is broken; the message says which.
        """
        self._look()
        with self._state.work("check_integrity", paused=True), self._gate.lock:
            self._state.check_integrity()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _before_close(self) -> None:
        self._gate.refuse_inside()

    def _close(self) -> None:
        shut_down(self._state, self._mapper)
        self._finalizer.detach()
        self._views.clear()

    # --- how a call begins --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin a call that takes the lock.

        Raises
        ------
        StateError
            The cache is closed; this thread has the lock already, and would wait for itself.
        """
        self._check_open()
        self._gate.refuse_inside()
        if self._state.late_ends:
            with self._gate.lock:
                self._state.catch_up()

    def _enter(self) -> None:
        """Begin a call that changes something: raise what went wrong in the background since the last one."""
        self._look()
        if self._mapper.failure is not None:
            self._mapper.raise_failure()

    def _check_reqid(self, reqid: int) -> int:
        return check_int("reqid", reqid, 0, self.layout.max_batch_size - 1)
