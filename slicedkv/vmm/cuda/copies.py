"""`HostCopies`: copies between one device's mapped addresses and host memory, on a stream of their own.

The stream is torch's, so that all fences are of one kind. The copies are the driver's, so that they need no tensors.
Gets the bindings from `driver`, which also sees to contexts and captures. Does not know what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base import Copy
from .streams import TorchStreams

__all__ = ["HostCopies"]


class HostCopies:
    """Copy beside the caller's stream.

    Parameters
    ----------
    api
        The module `cuda.bindings.driver`.
    streams : TorchStreams
        Streams of the device.
    check : callable
        Takes a verb and an answer of the bindings; raises `DriverError` unless the answer is success.
    """

    def __init__(self, api: Any, streams: TorchStreams, check: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._api = api
        self._streams = streams
        self._check = check

    def copy(self, copies: Sequence[Copy]) -> Any:
        """Queue copies behind the current stream's work and return an event after them.

        Raises
        ------
        DriverError
            A copy could not be queued. The call has waited for those queued before it.
        StateError
            The current stream captures a graph: the copies would be part of the graph.
        """
        ready, stream = self._streams.record(), self._streams.copy_stream
        stream.wait_event(ready)
        begun = self._streams.timed_event(stream)
        try:
            for target, source, num_bytes in copies:
                self._check("copy", self._api.cuMemcpyAsync(target, source, num_bytes, stream.cuda_stream))
        except BaseException:
            stream.synchronize()
            raise
        done = self._streams.timed_event(stream)
        done.begun = begun
        return done

    def seconds(self, done: Any) -> float:
        """Seconds that the copies before an event of `copy` took. The event must be done."""
        return float(done.begun.elapsed_time(done)) / 1e3
