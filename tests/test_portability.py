"""Systems other than Linux: what Python does not have there is removed, or replaced by what it does there."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import heedful
from heedful.cli import train as train_command
from heedful.kernels.cpu.memory import keep_memory
from heedful.serve.playground import runs

TESTS = Path(__file__).parent


def test_commands_and_server_without_what_only_linux_has(tmp_path):
    """Every module is imported; generate, embed, train and a request: support/without_unix.py."""
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-m", "support.without_unix", str(tmp_path)],
        capture_output=True, encoding="utf-8", cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(heedful.__file__).parents[1]), str(TESTS)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_malloc_is_left_alone_on_windows(monkeypatch):
    def load(name):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

    monkeypatch.setattr(ctypes, "CDLL", load)
    keep_memory()


def test_a_training_is_never_sent_ctrl_c_by_a_look_at_its_lock(tmp_path, monkeypatch):
    """On Windows the signal 0, with which others ask whether a process exists, is Ctrl-C."""
    lock, sent = tmp_path / ".lock", []
    lock.write_text("1234")
    monkeypatch.setattr(runs, "os", SimpleNamespace(name="nt", kill=lambda *given: sent.append(given)))
    assert not runs._is_alive(lock) and not sent
    monkeypatch.setattr(runs, "os", SimpleNamespace(name="posix", kill=lambda *given: sent.append(given)))
    assert runs._is_alive(lock) and sent == [(1234, 0)]


def test_the_end_of_the_input_reaches_the_handler_on_windows(monkeypatch):
    """There os.kill ends a process without a word to its handlers."""
    raised = []
    monkeypatch.setattr(train_command, "os", SimpleNamespace(name="nt", read=lambda *_: b""))
    monkeypatch.setattr(train_command, "signal", SimpleNamespace(SIGTERM=signal.SIGTERM, raise_signal=raised.append))
    monkeypatch.setattr(train_command, "threading", SimpleNamespace(Thread=InThisThread))
    train_command.stop_on_eof()
    assert raised == [signal.SIGTERM]


class InThisThread:
    """A thread that runs when it is started, here."""

    def __init__(self, target, **_):
        self.start = target
