"""Computing next to a busy process: milliseconds of a step alone, and next to as many busy threads as there are cores.

    python benchmarks/busy.py [--rounds 12] [--steps 12] [--work train generate transformers nanogpt]
        [--policies heedful none passive 1000 4000 late] [--text TEXT] [--nanogpt FOLDER] [--json FILE]

`train` is a step of `heedful train TEXT` (a Shakespeare sample is made if no text is given), `generate` a token of the
`shakespeare` model; `transformers` and `nanogpt` are training loops of benchmarks/peers/trainers.py, which never import
heedful. A policy says how OpenMP's threads wait for each other:

    heedful     what `import heedful` sets
    none        libgomp's default, which spins for 300,000 rounds
    passive     OMP_WAIT_POLICY=passive
    4000        GOMP_SPINCOUNT=4000
    late        nothing is set, and torch is imported before heedful

Every pair of work and policy runs in its own process and is set up once; rounds alternate between all of them, alone
and next to a busy process, so that all meet the same conditions. The table has medians over the rounds, "alone" over
the half of them in which other processes used the CPU least, and the share of all cores which those used. On a machine
that others use, as root on Linux, this puts the benchmark and its busy process before them:

    setsid -w sh -c 'echo -20 > /proc/self/autogroup; exec nice -n -20 python benchmarks/busy.py'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
BUSY = """
import hashlib, sys, threading
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=work, daemon=True).start()
work()
"""


# --- in a worker ----------------------------------------------------------------------------------------------------


def trainer_of(text: str) -> Callable[[int], object]:
    """Train n steps of what `heedful train TEXT` trains."""
    from heedful.recipes.build import build_training
    from heedful.recipes.resolve import resolve_recipe
    from heedful.train.trainer import Trainer

    recipe = resolve_recipe(text, {"train": {"steps": 10**6, "eval_every": 10**6, "save_every": 10**6}}).recipe
    setup = build_training(recipe)
    trainer = Trainer(setup.model, setup.objective, setup.train, None, setup.recipe)

    def train(n: int) -> None:
        trainer.settings = dataclasses.replace(trainer.settings, steps=trainer.step + n)
        trainer.train()

    return train


def generator_of(model: str) -> Callable[[int], object]:
    """Generate n tokens."""
    import heedful

    loaded = heedful.load(model)
    return lambda n: loaded.generate("ROMEO:", max_tokens=n)


def answer(work: str, what: str) -> None:
    """Read how many steps to make, and write the seconds that each took, until there is nothing more to read."""
    output, sys.stdout = sys.stdout, sys.stderr
    step = trainer_of(what) if work == "train" else generator_of(what)
    step(3)
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        step(int(line))
        print((time.perf_counter() - begin) / int(line), file=output, flush=True)


# --- the rounds -----------------------------------------------------------------------------------------------------


def environment_of(policy: str) -> dict[str, str]:
    """The environment of a worker: nothing of ours but the policy."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    if policy == "none":
        return environment | {"GOMP_SPINCOUNT": "300000"}
    if policy == "passive":
        return environment | {"OMP_WAIT_POLICY": "passive"}
    return environment | ({"GOMP_SPINCOUNT": policy} if policy.isdigit() else {})


class Worker:
    """A process that makes steps when it is asked to."""

    def __init__(self, work: str, policy: str, options: argparse.Namespace, text: str) -> None:
        if work in ("train", "generate"):
            script = f"{'import torch' if policy == 'late' else 'import heedful'}\nimport runpy, sys\n"
            script += f"sys.path.insert(0, {str(HERE.parent)!r})\nsys.argv = ['busy.py']\n"
            script += f"import busy\nbusy.answer({work!r}, {text if work == 'train' else 'shakespeare'!r})"
            command = [sys.executable, "-c", script]
        else:
            folder = options.nanogpt if work == "nanogpt" else ""
            command = [sys.executable, str(HERE.parent / "peers" / "trainers.py"), work, text, folder, "float32", "no"]
            command += ["0.0", str(CORES)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=environment_of(policy))
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self.process.wait()}")
        return line

    def seconds(self, n: int) -> float:
        """Seconds of one of n steps."""
        assert self.process.stdin is not None
        print(n, file=self.process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def busy_process() -> Iterator[int]:
    """A process with as many busy threads as there are cores, as if from another terminal; its id."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(CORES)], start_new_session=True)
    own, its = Path("/proc/self/autogroup"), Path(f"/proc/{process.pid}/autogroup")
    if own.exists():  # Linux divides the cores among sessions: this one counts as much as ours
        its.write_text(own.read_text().split()[-1])
    try:
        time.sleep(0.5)  # until its threads run
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cpu_seconds(path: str) -> float:
    """CPU seconds used by a process (/proc/PID/stat), or by all together (/proc/stat); 0 without /proc."""
    if not Path(path).exists():
        return 0.0
    line = Path(path).read_text().split("\n", 1)[0]
    numbers = line.split()[1:4] if path == "/proc/stat" else line.rpartition(")")[2].split()[11:13]
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")


def measure(worker: Worker, n: int, busy: int | None) -> tuple[float, float]:
    """Seconds of a step, and the share of all cores that processes beside the worker and the busy one used."""
    own = [f"/proc/{worker.process.pid}/stat", *([f"/proc/{busy}/stat"] if busy else [])]
    before, begin = cpu_seconds("/proc/stat") - sum(map(cpu_seconds, own)), time.perf_counter()
    seconds = worker.seconds(n)
    others = cpu_seconds("/proc/stat") - sum(map(cpu_seconds, own)) - before
    return seconds, max(0.0, others) / (time.perf_counter() - begin) / CORES


def quiet_median(rounds: list[tuple[float, float]]) -> float:
    """The median seconds of the half of the rounds in which others used the CPU least."""
    ordered = sorted(rounds, key=lambda one: one[1])
    return statistics.median(seconds for seconds, _ in ordered[: (len(ordered) + 1) // 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="what `train` and the peers train on")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help="of a round; tokens are ten times as many")
    parser.add_argument("--work", nargs="+", default=["train", "generate", "transformers"])
    parser.add_argument("--policies", nargs="+", default=["heedful", "none", "passive"])
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a clone of nanoGPT, for `nanogpt`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.text is None:
            options.text = Path(folder) / "text.txt"
            options.text.write_text(
                "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind\n" * 9999
            )
        pairs = [
            (work, policy)
            for work in options.work
            for policy in options.policies
            if work in ("train", "generate") or policy not in ("heedful", "late")
        ]
        workers = {(work, policy): Worker(work, policy, options, str(options.text)) for work, policy in pairs}
        results: dict[tuple[str, str], dict[str, list[tuple[float, float]]]]
        results = {pair: {"alone": [], "busy": []} for pair in pairs}
        try:
            for round in range(options.rounds):
                order = pairs if round % 2 == 0 else pairs[::-1]
                for pair in order:
                    n = options.steps * (10 if pair[0] == "generate" else 1)
                    results[pair]["alone"].append(measure(workers[pair], n, None))
                with busy_process() as busy:
                    for pair in order:
                        slow = 2 if pair[1] in ("none", "late") else 1  # fewer steps where they may take seconds
                        n = max(2, options.steps * (10 if pair[0] == "generate" else 1) // (4 * slow))
                        results[pair]["busy"].append(measure(workers[pair], n, busy))
        finally:
            for worker in workers.values():
                worker.close()
    print(f"{CORES} cores, {options.rounds} rounds; milliseconds of a step or token, medians")
    print(
        f"{'work':14}{'policy':>10}{'alone':>9}{'to none':>9}{'busy':>10}{'slower':>8}{'to none':>9}{'others used':>13}"
    )
    rows = []
    for (work, policy), found in results.items():
        alone, busy = quiet_median(found["alone"]), statistics.median(seconds for seconds, _ in found["busy"])
        reference = results.get((work, "none"))
        to_none = {"alone": float("nan"), "busy": float("nan")}
        if reference is not None:  # of pairs of the same round
            for kind in to_none:
                to_none[kind] = statistics.median(
                    mine[0] / theirs[0] for mine, theirs in zip(found[kind], reference[kind], strict=True)
                )
        others = statistics.median(share for _, share in found["alone"])
        rows.append({"work": work, "policy": policy, "alone": alone, "busy": busy, "alone_to_none": to_none["alone"],
                     "busy_to_none": to_none["busy"], "others": others, "rounds": found})  # fmt: skip
        print(
            f"{work:14}{policy:>10}{alone * 1e3:9.2f}{to_none['alone']:9.3f}{busy * 1e3:10.2f}{busy / alone:8.2f}"
            f"{to_none['busy']:9.3f}{others:13.0%}"
        )
    if options.json:
        machine = {"cores": CORES, "processor": platform.processor(), "system": platform.platform()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
