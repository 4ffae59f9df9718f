"""Whether memory can be read, without dying of the answer."""

from __future__ import annotations

import ctypes
import errno
import os


def is_readable(address: int, num_bytes: int) -> bool:
    """True when all these bytes are mapped: asks the kernel to copy them to a file, and it says no instead of faulting.

    A forked child would not do: there, nothing of its parent's caches is mapped.
    """
    file = os.memfd_create("probe")
    try:
        return os.write(file, (ctypes.c_char * num_bytes).from_address(address)) == num_bytes
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(file)
