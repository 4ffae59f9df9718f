"""Which bytes of this process can be written, asked of the kernel, and scripts that end with a fault."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys


def is_writable(address: int) -> bool:
    """Whether the byte at an address can be written. It must be readable; what the kernel stores is what is there."""
    source, sink = os.pipe()
    try:
        os.write(sink, ctypes.string_at(address, 1))
        os.readv(source, [(ctypes.c_char * 1).from_address(address)])
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(source)
        os.close(sink)
    return True


def run_script(script: str) -> tuple[int, str, str]:
    """Run Python in a process of its own; its exit status (a negative signal), output and errors."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr
