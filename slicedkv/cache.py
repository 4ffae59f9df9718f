"""`SlicedKVCache`: what an engine calls. It checks arguments and asks the part of the cache that does the work.

`requests` has one file for each thing that can happen to a request. `paging` decides when pages are mapped and which
may be taken back. Attention is no part of this: backends read what `k` and `v` return.
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

    Any thread may call any method at any time. A call that works without the lock holds the requests that it uses, and
    other threads' calls on them come after it (`slicedkv.state.holds`). A signal's handler or a finalizer that
    interrupts a call may call `free_reqid` only.

    No method waits for the GPU unless its docstring says so. With `mapper="sync"` any method may wait for another
    thread's driver calls, for at most 4 s.

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
        """The raw planes, as virtual tensors; `slicedkv.layout` has their shapes. Each call returns new views.

        Read only rows below a request's length. After `close`, reading faults; the addresses stay reserved as long as
        a view lives.
        """
        self._check_open()
        return self._views.planes()

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer: a view ``[B, L, H, D]`` with ``stride(-1) == 1``; index 0 is the reqid.

        Each call returns a new view. To pickle, save or send rows, `clone` them first: torch would take the whole
        memory of the cache.

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
        """Whether the cache looks for writes to rows that nobody may write; see `CacheConfig`."""
        return self._state.config.debug

    @property
    def protects_shared_pages(self) -> bool:
        """Whether shared pages are mapped read-only. They are with `debug`, if the device can do it."""
        return self._state.protector is not None

    # --- requests ---------------------------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int:
        """Begin a request in the slot whose mapped pages suit it best, and return its reqid.

        With `seq_len`, mapping starts in the background and `step` waits for what is still missing.

        An extent cannot be split, so a request that needs part of one holds all of it. Where the surplus is more than
        an eighth of the request's own pages, that extent is unmapped first, after the mapper's current batch.

        If work of the slot's previous request may still run, nothing is unmapped; work you queue on this stream runs
        after it. A slot that still shares pages is handed out last: the call then waits for that work and unmaps them.

        Raises
        ------
        OutOfSlotsError
            All slots are active.
        ConfigError
            `seq_len` is out of range.
        StateError
            The cache is closed or paused.
        DriverError
            The driver failed to unmap; no request began.
        """
        self._enter()
        slot = self._lifetime.begin(check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        self._mapper.run_pending()
        return slot

    def prefetch(self, reqid: int, seq_len: int) -> None:
        """Have `seq_len` tokens of an active request mapped ahead of need. With `mapper="background"` it never waits.

        Raises
        ------
        ConfigError, StateError
            `seq_len` is out of range; `reqid` is not active.
        """
        self._enter()
        self._lifetime.want(self._check_reqid(reqid), check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        self._mapper.run_pending()

    def free_reqid(self, reqid: int) -> None:
        """End a request. It also works while the cache is paused.

        The pages stay for the next request in the slot. They are unmapped when they are needed elsewhere, and never
        before the work queued so far on the current stream is done.

        If another thread's call uses the request, this call returns at once, and pages and slot stay in use until that
        call is over. Only for a `pause`, or for a `swap_out` of this request, does it wait. In a signal's handler or a
        finalizer that interrupts a call of this thread, the end is noted and takes effect with the next call.

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

        The request goes on from there. The mapper unmaps the pages after the work queued so far on the current stream
        (with `mapper="sync"`, a later call does); until then they count as available. Pages that other requests share
        stay with those. An extent that the request still needs in part stays whole.

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
        """True while a request has this slot, from `alloc_reqid` to `free_reqid`; False once a failing driver lost it.

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

        If all of them are mapped, a step costs one vector comparison. Otherwise it maps what is missing. It then waits
        for the mapper's current batch and, when memory is short, for device work of freed requests.

        A request that shares pages gets its own copy of those that it may write from now on. Which these are,
        `slicedkv.requests.copy_on_write` says. Such a copy waits for the current stream. The rows in those pages are
        unmapped for a moment, so no other stream or thread may read them meanwhile.

        If another thread's call uses one of the requests, the step comes after that call.

        Parameters
        ----------
        seq_lens : mapping, sequence, numpy array or CPU tensor of ints
            ``{reqid: len}``, or `max_batch_size` lengths; 0 leaves a slot alone.

        Returns
        -------
        bool
            True: kernels launched after this call may read those tokens and write them; tokens in shared pages they
            may write from the request's former length on. False: memory is short and no request lost anything; free or
            preempt one and try again.

        Raises
        ------
        ConfigError
            A length is out of range; nothing was changed.
        StateError
            A length is given for a reqid that is not active, or whose request ended while the call waited; the cache is
            closed or paused. Nothing was changed.
        DriverError
            The driver failed for another reason than memory; no request lost anything.
        LostSlotsError
            The driver failed again when the step was undone. The requests in the error's `slots` ended, and these slots
            are out of use. Other requests lost nothing.
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
        """Raise if a kernel launched now must not write some of these rows. It waits for nothing.

        It works with or without `debug`; with it, attention backends call this before they append.

        Parameters
        ----------
        reqids, starts, ends : sequence of int
            For each request, rows ``[start, end)``.

        Raises
        ------
        ConfigError
            A reqid is out of range, or a row.
        StateError
            A request is not active; rows lie behind the length of its last step, or in pages that other requests have
            mapped, too; the cache is paused or closed. The message names the first such rows.
        """
        self._look()
        for reqid, start, end in zip(map(self._check_reqid, reqids), starts, ends, strict=True):
            check_int(f"end of reqid {reqid}", end, 0, self.layout.max_seq_len)
            check_int(f"start of reqid {reqid}", start, 0, end)
        with self._gate.lock:
            self._copy_on_write.require_writable(reqids, starts, ends)

    # --- sharing a prefix ---------------------------------------------------------------------------------------------

    def share_prefix(self, src: int, dst: int, num_tokens: int) -> bool:
        """Give a request without tokens the first `num_tokens` tokens of another one, in the same pages.

        Afterwards `dst` has `num_tokens` tokens, as after a step to that length. Both requests go on and end
        independently of each other. Handles that the prefix fills are mapped once more, which costs the driver time of
        one mapping each. The rows behind the last of them are copied by work on the current stream. So queue whatever
        writes the prefix on this stream before the call, or order this stream after it; queue whatever reads it from
        `dst` behind the call.

        Pages that the slot of `dst` has from its previous request are unmapped first. For that the call waits until
        that request's work is over and, when memory is short, until the work of other freed requests is. With `debug`
        it also waits for the work queued on the current stream, because the pages become read-only.

        Calls of other threads on one of the two requests come after this call.

        Parameters
        ----------
        src : int
            An active request.
        dst : int
            An active request that has had no step yet, such as `alloc_reqid()` returns.
        num_tokens : int
            At least 1, and at most `seq_len(src)`.

        Returns
        -------
        bool
            False: memory is short for the copied rows and the guard rows, and no request lost or got anything.

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
        """Begin `n` requests that share all tokens of another one, and return their reqids.

        It does what `alloc_reqid` and `share_prefix` do, `n` times, all or nothing, in the slots with the least mapped.

        Parameters
        ----------
        reqid : int
            An active request; its `seq_len` counts.
        n : int
            At least 1.

        Raises
        ------
        OutOfSlotsError, OutOfPagesError
            There are not `n` idle slots; memory is short for the copied rows. Nothing was changed.
        ConfigError, StateError, DriverError
            As `share_prefix`.
        """
        self._enter()
        return self._sharer.fork(self._check_reqid(reqid), check_int("n", n, 1))

    def shareable_pages(self, reqid: int, num_tokens: int) -> int:
        """Pages over all planes that `share_prefix(reqid, ..., num_tokens)` would share instead of copying.

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

        Pages that other requests share do not count, since they would stay. Pages mapped ahead do not either, since
        they are available already. A reqid that is not active counts nothing.

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
        """Copy a request's K and V to host memory and free its slot; `swap_in` brings the request back.

        The device makes one copy for each plane, of exactly the request's tokens. It begins after the work queued so
        far on the current stream and runs beside what you queue later. The slot is free at once. Its pages are those
        of a freed request: whoever needs them waits until the copy is done. Shared pages are copied, too, and stay
        with the other requests.

        Parameters
        ----------
        reqid : int
            All rows up to its longest length are copied, also when its last step was to fewer tokens.

        Returns
        -------
        SwapHandle
            It holds the host memory until it is swapped in, dropped or released.

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
        """Bring a request that was swapped out into a free slot, and return its reqid there.

        Kernels launched on the current stream after this call see its tokens. All its pages are its own, also where it
        shared some before. The call waits as `step` does, but not for the copy.

        Returns
        -------
        int or None
            None: memory is short, nothing was changed, and the handle is good as before; free or preempt a request and
            try again.

        Raises
        ------
        OutOfSlotsError
            All slots are active; nothing was changed.
        ConfigError, StateError
            `handle` is another cache's; it was swapped in or released already.
        DriverError
            The driver failed for another reason than memory; the handle is good as before.
        """
        self._enter()
        reqid = self._swapper.swap_in(handle)
        self._mapper.run_pending()
        return reqid

    def pause(self, *, offload: bool = False) -> int:
        """Give memory back to the device until `resume`. Addresses, views and captured graphs stay valid.

        The cache gives back idle, lookahead, eager and free memory, and maps nothing ahead. With `offload`, the rows of
        active requests go to host memory, and nothing is left on the device.

        Until `resume`, calls that would change something raise `StateError`. Two do not, since they make room for
        `resume`: `free_reqid` and `set_memory_limit`. `stats`, `close` and other readers work. Kernels must not read or
        write requests' rows meanwhile; after `offload` that faults.

        The call waits for all work of the device and for the copies.

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
            The driver failed; no request lost a row, and the cache is not paused. If undoing failed, too, it is a
            `StateError`, and the cache stays paused. Requests that had left come back sharing no pages.
        """
        self._enter()
        return self._pauser.pause(offload=check_bool("offload", offload))

    def resume(self) -> None:
        """Undo `pause`: requests are back in their slots, at their lengths, and the cache serves again.

        Kernels launched on the current stream after this call see the rows. The call waits as `step` does, but not for
        the copies. Requests that went to host memory share no pages any more, so they may need more memory than before;
        `free_reqid` and `set_memory_limit` make room for it.

        Raises
        ------
        OutOfPagesError
            Memory is short for the requests; the cache stays paused and nothing was changed.
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
        """Pages over all planes that `step(seq_lens)` would take of `pages_available()`. It raises as `step` does."""
        self._look()
        lens = parse_seq_lens(seq_lens, self.layout.max_batch_size)
        with self._gate.lock:
            return self._stepper.pages_needed(lens)

    def pages_available(self) -> int:
        """Pages over all planes that requests can get: free, creatable, idle, lookahead and eager pages."""
        self._look()
        with self._gate.lock:
            return available_pages(self._state)

    def can_admit(self, seq_len: int) -> bool:
        """True when a slot is idle and memory suffices for `seq_len` more tokens beside the active requests."""
        self._look()
        pages = self.layout.pages_for(check_int("seq_len", seq_len, 0, self.layout.max_seq_len))
        with self._gate.lock:
            return has_room(self._state, pages)

    def trim(self) -> int:
        """Give idle, lookahead, eager and free memory back to the device, and unused host memory to the system.

        It returns the bytes given back to the device. It waits, for at most 4 s, for device work of freed requests.
        """
        self._enter()
        with self._state.work("trim"):
            return trim(self._state) * self.layout.page_bytes

    def set_memory_limit(self, memory_limit: MemoryLimit) -> None:
        """Change the memory limit and give memory above it back to the device. It waits as `trim` does.

        `memory_limit` is written as when the cache is opened. A fraction is one of the memory that is free on the
        device now or held by the pool. The call also works while the cache is paused.

        Raises
        ------
        ConfigError, OutOfPagesError
            It is not written as a limit; active requests hold more. The limit stays as it was.
        """
        self._enter()
        with self._state.work("set_memory_limit", paused=True):
            set_memory_limit(self._state, limit_bytes(memory_limit, self.pool.driver, self.pool))

    def stats(self) -> CacheStats:
        """Return a snapshot of memory, counters and times."""
        self._look()
        with self._gate.lock:
            return self._state.snapshot()

    def check_integrity(self) -> None:
        """Compare all books with each other. It waits, for at most 4 s, for driver work under way.

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
