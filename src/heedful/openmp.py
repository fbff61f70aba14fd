"""How the threads of a computation wait for each other: OpenMP's policy, set before PyTorch is loaded.

PyTorch's operators and our C kernels share one OpenMP runtime, whose threads meet at a barrier after every part of a
computation, many times in a training step. libgomp, which PyTorch brings on Linux, spins there for about 10 ms
before it sleeps. Next to another program that costs far more than it saves: a thread spins in the time that the one it
waits for needs, and both wait for the other program's next turn, so that a step takes up to a hundred times as long.
Sleeping at once costs a quarter of the speed on an idle machine. A spin of about 30 microseconds, a few times what a
barrier takes when every thread has a core, has neither fault (benchmarks/busy.py).

The runtime reads its settings when it is loaded and never again, so they are set by the first `import heedful`, of
whatever way in: the command line, Python, a notebook, a child process. Where PyTorch was imported before, nothing can
be changed; `warn_if_slowed` reports it only once another program is found to take the cores.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import warnings
from pathlib import Path

WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Rounds of libgomp's loop: on x86 each has a `pause` of 20 to 50 ns, elsewhere only a load.
SPINS = 1500 if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686") else 20_000
SCHEDSTAT = Path("/proc/thread-self/schedstat")
WINDOW = 2.0  # seconds over which waiting is measured
SLOWED = 0.25  # share of it for which a thread was ready and had no core


class BusyMachineWarning(UserWarning):
    """Another program takes the cores, and the threads of this process were told too late how to wait."""


def set_wait_policy() -> bool:
    """Set how threads wait, for this process and its children, unless the user has; False if it is too late."""
    if any(name in os.environ for name in WAIT_SETTINGS):
        return True
    if sys.platform == "linux":
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
        # With more threads than cores, those of several models for instance, libgomp spins less than that: 100 rounds,
        # or 1,000 with this policy, which has no other effect next to a count.
        os.environ["OMP_WAIT_POLICY"] = "active"
    # Of LLVM's and Intel's runtimes (macOS, Windows, conda), in milliseconds: the default is 200, and `active` alone
    # would be for ever.
    os.environ["KMP_BLOCKTIME"] = "1"
    return "torch" not in sys.modules


def waited_seconds() -> float:
    """Seconds for which this thread was ready to run and had no core, since it began; 0 where that is unknown."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class SlowdownCheck:
    """Measures how long threads wait for a core, and warns once."""

    def __init__(self, *, needed: bool) -> None:
        self.needed = needed
        self._window: tuple[int, float, float] | None = None  # thread, time, seconds waited

    def __call__(self) -> None:
        """Called once a step; it costs nothing where it is not needed."""
        if not self.needed:
            return
        now, thread = time.monotonic(), threading.get_ident()
        if self._window is not None and self._window[0] == thread and now - self._window[1] < WINDOW:
            return
        waited, last = waited_seconds(), self._window
        self._window = thread, now, waited
        if last is not None and last[0] == thread and (waited - last[2]) / (now - last[1]) > SLOWED:
            self.needed = False
            if sys.modules["torch"].get_num_threads() == 1:  # which waits for no other
                return
            warnings.warn(
                "other programs are using the cores, and PyTorch was imported before heedful, so that this can be many "
                "times slower than it need be: restart, and import heedful first",
                BusyMachineWarning,
                stacklevel=2,
            )


warn_if_slowed = SlowdownCheck(needed=not set_wait_policy())
