"""Limits of a process that runs cells: memory, processor time, files, and for answers no side effects.

They keep mistakes from doing harm, such as an endless loop or list. They are no sandbox: whoever may send code to a
server can do what the server's user can.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2**28  # a file that a cell writes
PROCESSES = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn",
             "subprocess.Popen")  # fmt: skip
# Events with the arguments that are paths which are changed.
CHANGES = {
    "os.chmod": (0,), "os.chown": (0,), "os.link": (1,), "os.mkdir": (0,), "os.remove": (0,), "os.rename": (0, 1),
    "os.rmdir": (0,), "os.symlink": (1,), "os.truncate": (0,), "shutil.rmtree": (0,),
}  # fmt: skip


def limit_process(n_bytes: int, seconds: int) -> None:
    """Let this process have n_bytes more than now, and so many seconds of each processor, where the system can."""
    try:
        import resource

        data_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
    except (ImportError, OSError):  # not Linux: whoever started it stops it by the clock
        return
    limits = {
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + n_bytes,
        resource.RLIMIT_CPU: seconds * (os.cpu_count() or 1),
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))


def forbid_side_effects(folder: Path) -> None:
    """From now on this process starts no others and changes no files outside a folder; it raises PermissionError."""
    root, told = os.path.realpath(folder), threading.local()

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):  # an open file
            return True
        place = os.path.realpath(os.fsdecode(path))
        return place == os.devnull or place == root or place.startswith(root + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(told, "busy", False):
            return
        told.busy = True
        try:
            if event in PROCESSES:
                raise PermissionError("an answer to an exercise starts no other processes")
            if event == "open":
                path, _, flags = arguments
                changed = [path] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else []
            else:
                changed = [arguments[i] for i in CHANGES.get(event, ()) if i < len(arguments)]
            if not all(map(is_inside, changed)):
                raise PermissionError(f"an answer to an exercise changes no files outside {root}")
        finally:
            told.busy = False

    sys.addaudithook(hook)
