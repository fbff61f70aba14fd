"""What a process that saves checkpoints leaves when it is killed.

    python kill.py FOLDER N

First before each operation on the file system in turn, then killed at N random moments (forked from here and not from
the tests because this process has one thread). A line for each is printed: whether all was good, the last step that was
saved, the newest that was found, the newest after another save, hidden folders before and after that save. Last, a
save without the room for its files. Every number in a checkpoint is its step.
"""

from __future__ import annotations

import os
import random
import resource
import select
import shutil
import signal
import sys
from functools import cache
from pathlib import Path

import torch

from heedful.models.gpt import GPT, GPTConfig
from heedful.train import checkpoint
from heedful.weights.manifest import checkpoints, integrity_error

torch.set_num_threads(1)
OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.scandir",
    "os.listdir",
}


@cache
def model_of(width: int) -> GPT:
    return GPT.create(GPTConfig(d_model=width, n_layers=width // 8, n_heads=2, vocab_size=50, max_len=32))


def model_at(step: int, width: int) -> GPT:
    model = model_of(width)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
    return model


def save(folder: Path, step: int, width: int) -> None:
    tensors = {name: torch.full((width, 8 * width), step) for name in ("a", "b")}
    checkpoint.write_checkpoint(folder, step, model_at(step, width), None, tensors, {"step": step}, best_step=step)
    checkpoint.prune_checkpoints(folder, 2, whole=step)


def look(folder: Path, width: int) -> int | str:
    """The step of the newest checkpoint, or what is wrong with it."""
    told: list[str] = []
    saved = checkpoint.newest_checkpoint(folder, told.append)
    if saved is None or told:
        return f"nothing, {told}"
    if any(integrity_error(path) for path in checkpoints(folder)):
        return "an older one is damaged"  # what is being removed is not seen by its name
    model = model_at(0, width)
    saved.restore(model)
    found = {float(x) for t in [*model.parameters(), *saved.tensors().values()] for x in t.detach().unique()}
    if found != {saved.step} or saved.numbers != {"step": saved.step}:
        return f"{saved.step} has the numbers {found} and {saved.numbers}"
    return saved.step


def operations(folder: Path) -> None:
    """What a process killed before an operation leaves is what is there before it: a copy is made before each."""
    here, done, busy = folder / "here", 0, False
    copies: list[tuple[Path, int, int]] = []

    def copy() -> None:
        nonlocal busy
        if not busy:
            busy = True
            copies.append((shutil.copytree(here, folder / f"{len(copies)}"), done, coming))
            busy = False

    for step in (100, 200):
        save(here, step, 8)
        done = step
    coming = 300
    fsync, write_safetensors = os.fsync, checkpoint.write_safetensors
    os.fsync = lambda fd: (copy(), fsync(fd))[1]  # type: ignore[assignment]
    checkpoint.write_safetensors = lambda *given: (copy(), write_safetensors(*given), copy())[1]  # type: ignore[assignment]
    sys.addaudithook(lambda event, _: copy() if event in OPERATIONS else None)
    for step in (300, 300):  # the first removes an old checkpoint, the second replaces the first
        save(here, step, 8)
        done = step
    busy = True
    for copied, before, after in copies:
        report(copied, before, after, 8)


def child_saves(folder: Path, steps: list[int], width: int) -> tuple[int, int]:
    """Its process, and where it writes a byte after each finished save."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        for step in steps:
            save(folder, step, width)
            os.write(write, b".")
    finally:
        os._exit(0)


def moments(folder: Path, n: int) -> None:
    width, chance = 64, random.Random(1)
    steps = list(range(200, 100_000, 100))
    save(folder / "begin", 100, width)
    for i in range(n):
        here = shutil.copytree(folder / "begin", folder / f"{i}")
        pid, read = child_saves(here, steps, width)
        select.select([], [], [], chance.uniform(0, 0.07))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        count = len(os.read(read, 1000))
        os.close(read)
        report(here, [100, *steps][count], [100, *steps][count + 1], width)


def limit(folder: Path) -> None:
    """A file may grow to 50 kB, so the weights stop in the middle."""
    save(folder, 100, 64)
    if not (pid := os.fork()):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            save(folder, 200, 64)
        except OSError as error:
            print(
                "limit",
                error,
                look(folder, 64),
                sorted(p.name for p in folder.iterdir()),
                sep="\t",
                flush=True,
            )
        os._exit(0)
    os.waitpid(pid, 0)


def report(folder: Path, finished_step: int, next_step: int, width: int) -> None:
    found = look(folder, width)
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    save(folder, 900, 8)
    after = look(folder, 8)
    hidden = [p.name for p in folder.iterdir() if p.name.startswith(".")]
    good = found in (finished_step, next_step) and after == 900 and not hidden
    print("good" if good else "BAD", finished_step, found, after, left, hidden, sep="\t", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    operations(Path(sys.argv[1]) / "operations")
    moments(Path(sys.argv[1]) / "moments", int(sys.argv[2]))
    limit(Path(sys.argv[1]) / "limit")
