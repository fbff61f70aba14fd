"""The package where Python lacks what it has on Linux alone: modules, functions and constants are removed, text files
without an encoding are errors. Imports every module, then generates, embeds, trains and answers a request.

    python -X warn_default_encoding -m support.without_unix FOLDER
"""

from __future__ import annotations

import builtins
import importlib
import io
import mmap
import os
import pkgutil
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "uvloop")
OS = ("fork", "killpg", "getpgid", "setsid", "preadv", "pread", "sched_getaffinity", "register_at_fork", "getloadavg",
      "sysconf", "getuid", "geteuid", "uname")  # fmt: skip
SIGNALS = ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "setitimer", "ITIMER_PROF", "alarm")


class PlainMap(mmap.mmap):
    """A memory mapping as on Windows."""

    def __getattribute__(self, name: str) -> Any:
        if name == "madvise":
            raise AttributeError(name)
        return super().__getattribute__(name)


def remove() -> None:
    """Take away what is not everywhere. After PyTorch is imported, which has builds for other systems."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OS), (signal, SIGNALS)):
        for name in names:
            delattr(module, name)
    for name in [name for name in vars(mmap) if re.match("MADV_|MAP_|PROT_", name)]:
        delattr(mmap, name)
    mmap.mmap = PlainMap  # type: ignore[misc]
    real_open = builtins.open

    def no_proc(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(file)
        return real_open(file, *args, **kwargs)

    builtins.open = io.open = no_proc


def main(folder: Path) -> None:
    import torch  # noqa: F401  (what others import is theirs)
    import uvicorn  # noqa: F401

    import heedful

    warnings.filterwarnings("error", category=EncodingWarning, module=r"heedful(\.|$)")
    remove()
    for found in pkgutil.walk_packages(heedful.__path__, "heedful."):
        if not re.search(r"kernels\.cuda\.|ray_|harness|__main__", found.name):  # Triton, Ray, lm_eval
            importlib.import_module(found.name)
    from heedful.cli import main as command

    text = folder / "text.txt"
    text.write_text("my lord, what news from Rome? none, my lord. " * 100, encoding="utf-8")
    commands = [
        ["info"],
        ["generate", "sums", "1+1=", "--max-tokens", "3"],
        ["embed", "a house", "--model", "bert-books"],
        ["train", str(text), "--out", str(folder / "run"), "--quiet", "--set", "train.steps=2", "--set",
         "model.n_layers=1", "--set", "model.d_model=32", "--set", "model.n_heads=2"],
        ["generate", str(folder / "run"), "my lord", "--max-tokens", "3"],
    ]  # fmt: skip
    for arguments in commands:
        assert command(arguments) == 0, arguments
    from support.application import sync_client

    with sync_client("sums") as client:
        body = {"model": "sums", "prompt": "1+1=", "max_tokens": 2}
        assert client("POST", "/v1/completions", json=body)[0] == 200


if __name__ == "__main__":
    main(Path(sys.argv[1]))
