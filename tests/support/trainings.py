"""Small trainings on files, and ways to break them off, for tests of whole runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from heedful.kernels.cpu.library import library
from heedful.paths import cache_folder
from heedful.train.recipe import merge_tables
from heedful.train.trainer import Trainer

WORDS = "the a cat dog bird tree house river sees likes finds leaves old young red green and then runs sings".split()
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32}


class PowerCut(BaseException):
    """Nothing that anyone catches."""


def story(n_documents: int = 36, *, seed: int = 1, n_words: int = 20) -> str:
    """Documents of a few words, separated by form feeds."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(n_words // 2, n_words))) for _ in range(n_documents)]
    return "\n\f\n".join(f"{text}." for text in texts) + "\n"


def write_story(path: Path, n_documents: int = 36, **more: Any) -> str:
    path.write_text(story(n_documents, **more))
    return str(path)


def write_pairs(path: Path, n: int = 60) -> str:
    """Sentences and the same backwards, as a tsv."""
    lines = [line.rstrip(".") for line in story(n, n_words=8).split("\n\f\n")]
    path.write_text("".join(f"{line.strip()}\t{' '.join(reversed(line.split()))}\n" for line in lines))
    return str(path)


def write_reviews(path: Path, n: int = 60) -> str:
    """Sentences with a label: whether they speak of a cat."""
    lines = [text.strip() for text in story(n, n_words=6).split("\n\f\n")]
    rows = "".join(f"{text}\t{'with' if 'cat' in text else 'without'}\n" for text in lines)
    path.write_text(f"text\tlabel\n{rows}")
    return str(path)


def changes(**tables: Any) -> dict[str, Any]:
    """Settings of a short training without samples; each table is added to."""
    usual: dict[str, Any] = {
        "train": {"steps": 20, "batch_size": 8, "eval_every": 10, "device": "cpu"},
        "data": {"length": 16},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 2},
        "log": {"samples": False},
    }
    return merge_tables(usual, tables)


def own_cache(folder: Path) -> Path:
    """A cache folder for tests, with the kernels that are compiled already."""
    library()
    (folder / "heedful").mkdir(parents=True)
    for compiled in cache_folder().glob("*.so"):
        shutil.copy(compiled, folder / "heedful")
    return folder


@contextmanager
def power_cut(after: int) -> Iterator[None]:
    """Inside, a training dies once it has made so many steps in all, between a step and what follows it."""
    step = Trainer._step

    def dying(trainer: Trainer, batches: Any) -> None:
        step(trainer, batches)
        if trainer.step == after:
            raise PowerCut

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Trainer, "_step", dying)
        yield


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07}"


def steps_of(run: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def logged(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """What the log says, without what a clock says."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    timed = ("seconds", "utilisation")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line["kind"] == kind]


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Every bit of their checkpoints of a step, and every number of their logs."""
    files = {p.name for p in checkpoint(one, step).iterdir()}
    assert files == {p.name for p in checkpoint(other, step).iterdir()}
    for name in files - {"manifest.json"}:
        a, b = checkpoint(one, step) / name, checkpoint(other, step) / name
        if a.suffix == ".safetensors":  # says which, and a header's order does not matter
            left, right = load_file(a), load_file(b)
            assert left.keys() == right.keys()
            different = [k for k in left if left[k].numpy().tobytes() != right[k].numpy().tobytes()]
            assert not different, f"{name}: {different}"
        else:
            assert json.loads(a.read_text()) == json.loads(b.read_text()), name
    for kind in ("step", "validation"):
        assert logged(one, kind) == logged(other, kind)


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """`heedful ...` as a process of its own, with one thread as the tests have."""
    call = [sys.executable, "-m", "heedful", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(call, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    """Until the process has made a file; what it said if it ends without."""
    while not path.exists():
        try:
            process.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue
        assert path.exists(), process.stderr.read() if process.stderr else ""
