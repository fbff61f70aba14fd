"""Limits of a process that runs cells: memory, processor time, files, and for answers no side effects.

They are Python's, on every system, and keep mistakes from doing harm, with messages that say so. Code that wants to can
get past them through ctypes: there is the kernel's sandbox for it, on Linux (sandbox.py).
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2**28  # a file that a cell writes
PROCESSES = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
             "pty.spawn", "subprocess.Popen"}  # fmt: skip
CHANGES = {"os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove",
           "os.removexattr", "os.rename", "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime",
           "shutil.rmtree"}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def limit_process(n_bytes: int, seconds: int) -> None:
    """Let this process have n_bytes more than now, and so many seconds of each processor, where the system can."""
    try:
        import resource

        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()
        all_bytes, data_bytes = (int(pages[i]) * resource.getpagesize() for i in (0, 5))
    except (ImportError, OSError):  # not Linux: whoever started it stops it by the clock
        return
    limits = {
        resource.RLIMIT_DATA: data_bytes + n_bytes,
        resource.RLIMIT_AS: all_bytes + 2 * n_bytes,  # shared memory too; and room for what is reserved only
        resource.RLIMIT_CPU: seconds * (os.cpu_count() or 1),
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))


def forbid_side_effects() -> None:
    """From now on this process starts no others, changes no files and opens no connections: PermissionError."""
    checking = threading.local()

    def refuse(event: str, arguments: tuple[Any, ...]) -> str:
        if event in PROCESSES:
            return "starts no other processes"
        if event in ("os.kill", "os.killpg") and arguments[0] != os.getpid():
            return "ends no other processes"
        if event == "socket.__new__":
            return "opens no connections"
        if event in CHANGES or (event == "open" and not isinstance(arguments[0], int) and arguments[2] & WRITING):
            return "changes no files"
        return ""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(checking, "busy", False):
            return
        checking.busy = True
        try:
            if what := refuse(event, arguments):
                raise PermissionError(f"an answer to an exercise {what}")
        finally:
            checking.busy = False

    sys.addaudithook(hook)
