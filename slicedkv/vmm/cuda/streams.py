"""`TorchStreams`: torch's streams and events of one CUDA device, whatever device is current in the calling thread.

Callers submit their work through torch, so fences are torch's events. Imports torch only when one is needed. The only
memory it knows of is torch's own cache.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import StateError

__all__ = ["TorchStreams"]


class TorchStreams:
    """Streams of one device.

    Parameters
    ----------
    index : int
        CUDA device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._copy_stream: Any = None

    @property
    def copy_stream(self) -> Any:
        """A stream for copies alone, made at the first use."""
        if self._copy_stream is None:
            self._copy_stream = self._cuda.Stream(self._index)
        return self._copy_stream

    def timed_event(self, stream: Any) -> Any:
        """Record an event on a stream. The event also notes the time at which the stream reaches it."""
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @property
    def _cuda(self) -> Any:
        return import_module("torch").cuda

    def record(self) -> Any:
        """Record an event on the device's current stream; `StateError` while that stream captures a graph."""
        if self.is_capturing():
            raise StateError(f"a fence cannot be recorded while the current stream of cuda:{self._index} captures")
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._index))
        return event

    def order_after(self, event: Any) -> None:
        """Make the device's current stream wait for the event."""
        self._cuda.current_stream(self._index).wait_event(event)

    def is_capturing(self) -> bool:
        """True while the device's current stream captures a graph."""
        cuda = self._cuda
        if not cuda.is_initialized():
            return False
        with cuda.device(self._index):
            return bool(cuda.is_current_stream_capturing())

    def empty_cache(self) -> bool:
        """Give torch's unused cached memory back to the device; True when there was some."""
        cuda = self._cuda
        if not cuda.is_initialized() or self.is_capturing():
            return False
        before = cuda.memory_reserved(self._index)
        try:
            cuda.empty_cache()
        except RuntimeError:  # another thread captures a graph
            return False
        return bool(cuda.memory_reserved(self._index) < before)
