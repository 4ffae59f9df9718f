"""A stand-in for `torch.cuda`'s streams and events, in plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Stream:
    def __init__(self, device: int) -> None:
        self.device = device
        self.capturing = False
        self.cuda_stream = 0
        self.synchronized = 0
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeTorchCuda:
    """Stands in for `torch.cuda`: a current device, a stream a device, events that a test finishes."""

    def __init__(self) -> None:
        self.current = 0
        self.streams = defaultdict(_Stream)
        self.hold_events = False
        self.reserved = [0]
        self.initialized = True
        self.side_streams: list[_Stream] = []
        outer = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timed = enable_timing
                self.stream: Any = None
                self.done = not outer.hold_events

            def record(self, stream: _Stream) -> None:
                self.stream = stream

            def query(self) -> bool:
                return self.done

            def elapsed_time(self, end: Any) -> float:
                assert self.timed
                assert end.timed
                return 2.5

        self.Event = Event

    def Stream(self, device: int) -> _Stream:
        stream = _Stream(device)
        stream.cuda_stream = 1 + len(self.side_streams)
        self.side_streams.append(stream)
        return stream

    def is_initialized(self) -> bool:
        return self.initialized

    def current_stream(self, device: int | None = None) -> _Stream:
        index = self.current if device is None else device
        return self.streams.setdefault(index, _Stream(index))

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().capturing

    def memory_reserved(self, device: int) -> int:
        return self.reserved[0]

    def empty_cache(self) -> None:
        self.reserved = self.reserved[1:] or [0]
