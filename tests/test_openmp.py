"""Threads wait for each other in a way that leaves other programs, and themselves, their share of the cores."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import warnings

import pytest
import torch

from heedful import openmp
from heedful.data.loader import Permutation
from heedful.openmp import SPINS, WAIT_SETTINGS, BusyMachineWarning, SlowdownCheck, set_wait_policy

libgomp = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings libgomp on Linux alone")


def spin_counts(*commands: list[str], **environment: str) -> list[str | None]:
    """What libgomp itself prints as its spin count when these commands load it."""
    clean = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    clean |= {"OMP_DISPLAY_ENV": "verbose", **environment}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=clean, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        for command in commands
    ]
    counts = [re.findall(r"GOMP_SPINCOUNT = '(\d+)'", process.communicate()[1]) for process in processes]
    return [count[0] if count else None for count in counts]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


@libgomp
def test_every_way_in_sets_the_policy_before_pytorch_is_loaded():
    """Each command is a way to start a process; the last is that of spawned and of Ray's workers."""
    counts = spin_counts(
        python("-c", "import heedful, torch"),
        python("-m", "heedful", "info", "tiny"),
        python("-m", "heedful.lessons.child"),
        python("-c", f"import pickle; pickle.loads({pickle.dumps(Permutation)!r}); import torch"),
    )
    assert counts == [str(SPINS)] * 4


@libgomp
def test_what_the_user_set_stays():
    assert spin_counts(python("-c", "import heedful, torch"), OMP_WAIT_POLICY="passive") == ["0"]


@pytest.mark.parametrize("name", WAIT_SETTINGS)
def test_nothing_is_added_to_what_the_user_set(monkeypatch, name):
    for other in WAIT_SETTINGS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    assert set_wait_policy()
    assert [other for other in WAIT_SETTINGS if other in os.environ] == [name]


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_no_runtime_spins_for_ever(monkeypatch, system):
    for name in WAIT_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", system)
    assert not set_wait_policy()  # PyTorch is loaded
    assert os.environ["KMP_BLOCKTIME"] == "1"  # LLVM's runtime reads `active` as for ever without it
    assert ("GOMP_SPINCOUNT" in os.environ) == ("OMP_WAIT_POLICY" in os.environ) == (system == "linux")
    monkeypatch.delitem(sys.modules, "torch")
    for name in WAIT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert set_wait_policy()


def test_importing_pytorch_first_is_silent():
    code = "import torch; from heedful.openmp import warn_if_slowed; warn_if_slowed(); print(warn_if_slowed.needed)"
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_SETTINGS}
    done = subprocess.run(python("-W", "error", "-c", code), env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.fixture
def clock(monkeypatch):
    """A machine on which every look at the clock is 3 s later, and a share of them was spent waiting for a core."""

    class Clock:
        seconds, waited, share = 0.0, 0.0, 0.5

        def monotonic(self) -> float:
            self.seconds += 3.0
            self.waited += 3.0 * self.share
            return self.seconds

    clock, threads = Clock(), torch.get_num_threads()
    monkeypatch.setattr(openmp.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(openmp, "waited_seconds", lambda: clock.waited)
    torch.set_num_threads(2)
    yield clock
    torch.set_num_threads(threads)


def test_a_slowdown_is_reported_once(clock):
    check = SlowdownCheck(needed=True)
    check()  # the first call only begins the measurement
    with pytest.warns(BusyMachineWarning, match="import heedful first"):
        check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()


@pytest.mark.parametrize(("needed", "share", "threads"), [(False, 0.9, 2), (True, 0.1, 2), (True, 0.9, 1)])
def test_nothing_is_said_where_it_does_not_matter(clock, needed, share, threads):
    """Where the policy was set in time, the cores are free, or one thread waits for no other."""
    clock.share = share
    torch.set_num_threads(threads)
    check = SlowdownCheck(needed=needed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            check()


def test_training_and_generation_report_it(clock, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    monkeypatch.setattr("heedful.train.trainer.warn_if_slowed", SlowdownCheck(needed=True))
    from heedful.recipes import train

    small = {"model": {"d_model": 32, "n_layers": 1, "n_heads": 2}, "data": {"length": 16}, "train": {"steps": 3}}
    with pytest.warns(BusyMachineWarning):
        model = train("my.txt", small, quiet=True)
    monkeypatch.setattr("heedful.generate.engine.warn_if_slowed", SlowdownCheck(needed=True))
    with pytest.warns(BusyMachineWarning):
        model.generate("To be", max_tokens=4)


@pytest.mark.skipif(not openmp.SCHEDSTAT.exists(), reason="the system does not say how long threads wait")
def test_waiting_for_a_core_is_measured():
    """Two threads that compute on one core: each waits for about as long as it runs."""
    code = (
        "import hashlib, os, threading, heedful.openmp as o\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
        "work = lambda: hashlib.pbkdf2_hmac('sha256', b'', b'', 300_000)\n"
        "other = threading.Thread(target=work); before = o.waited_seconds()\n"
        "other.start(); work(); other.join(); print(o.waited_seconds() - before)"
    )
    done = subprocess.run(python("-c", code), capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0
