"""Scripts in processes of their own that need not import torch: one process did, and each is forked from it.

A script sees what ``python -c`` shows it, and ends as an interpreter does, with its exit functions and finalizers. But
torch is imported already; `slicedkv` is not.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading

__all__ = ["run_script"]

_NURSERY = """
import contextlib, json, os, signal, socket, sys, warnings
import torch

def script():
    # Return in a new process for each script that comes. End when nobody can send another.
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG if request else 0)[0]:
                pass
        if not request:
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside BLAS's threads
            child = os.fork() or keep(files[2], request)
        if not child:
            break
        for file in files:
            os.close(file)
    requests.close()
    os.dup2(files[0], 1), os.dup2(files[1], 2)
    for file in files:
        os.close(file)
    code, arguments, _ = json.loads(request)
    sys.argv[1:] = arguments
    code = compile(code, "<string>", "exec")
    for name in [name for name in globals() if not name.startswith("__")]:
        del globals()[name]
    return code

def keep(answer, request):
    # Fork the script, wait for it no longer than it may take, and tell its exit status.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
    child = os.fork()
    if child:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(json.loads(request)[2])
        os.write(answer, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    return child

exec(script())
"""
_opening = threading.Lock()
_requests: list[socket.socket] = []


def run_script(script: str, *arguments: str, timeout_s: int = 60) -> tuple[int, str, str]:
    """Run Python in a process of its own; its exit status (a negative signal), output and errors.

    A script that takes longer than `timeout_s` is killed: its status is -9.
    """
    request = json.dumps([textwrap.dedent(script), arguments, timeout_s]).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        result, answer = os.pipe()
        try:
            socket.send_fds(_nursery(), [request], [out.fileno(), errors.fileno(), answer])
        finally:
            os.close(answer)
        with open(result, "rb") as told:
            status = int(told.read())
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, errors)]
    return status, texts[0], texts[1]


def _nursery() -> socket.socket:
    """Where to send scripts; the process that forks them is started at the first."""
    with _opening:
        if not _requests:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-c", _NURSERY, str(theirs.fileno())]
                nothing = subprocess.DEVNULL
                process = subprocess.Popen(
                    command, stdin=nothing, stdout=nothing, pass_fds=[theirs.fileno()], start_new_session=True
                )
            atexit.register(process.wait)
            atexit.register(ours.close)  # the first of the two: functions run last to first
            _requests.append(ours)
        return _requests[0]
