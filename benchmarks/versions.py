"""Two versions of heedful side by side, in one run: what a change costs or gains.

    python benchmarks/versions.py OLD_SRC [NEW_SRC] [--text FILE] [--rounds 7] [--only generation training serving]

OLD_SRC and NEW_SRC are `src` folders of two checkouts (NEW_SRC: this one's). Both versions run with this Python, in
processes of their own that are started anew for each round, since where the weights happen to lie in memory makes one
process a few per cent faster than the next. The old version runs twice in every round, and the order changes from
round to round. Shown are medians in tokens per second, the ratio of the best rounds, new / old, and for the noise
the same ratios of the old version to itself.

    generation   GPT-2 124M's shape with random weights: a prompt of 64 tokens and 96 new ones, greedy, batch 1 and 8
    training     a GPT of 0.8 million parameters on the text's characters, 12 x 64 tokens a step: `heedful train`'s log
    serving      the shipped Shakespeare model over HTTP: 8 clients, 6 requests of 128 tokens each, greedy
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median

VERSIONS = ("old", "again", "new")
PRECISIONS = ("float32", "bfloat16", "int8")
MODEL = {"model.family": "gpt", "model.n_layers": 4, "model.n_heads": 4, "model.d_model": 128, "model.dropout": 0.0}
TRAINING = {"train.batch_size": 12, "data.length": 64, "train.steps": 120, "train.eval_every": 120}

GENERATION = """
import sys, time, torch, heedful
from heedful.models.base import Batch
try:
    from heedful.generate.batch import greedy_batch
except ImportError:  # its name until 0.1.0
    from heedful.generate.engine import greedy as greedy_batch
model = heedful.load(sys.argv[1], quantize=sys.argv[2]).model
for rows in (1, 8):
    prompt = torch.randint(1000, (rows, 64), generator=torch.Generator().manual_seed(1))
    speeds = []
    for _ in range(4):
        times = []
        for n in (1, 97):
            begin = time.perf_counter()
            with torch.inference_mode():
                greedy_batch(model, Batch(prompt), n)
            times.append(time.perf_counter() - begin)
        speeds.append(rows * 96 / (times[1] - times[0]))
    print(sorted(speeds)[2])
"""


def environment(source: Path) -> dict[str, str]:
    """The variables with which Python imports this version."""
    return os.environ | {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}


def compare(names: list[str], rounds: int, measure: Callable[[str], list[float]]) -> None:
    """Measure the versions in turn and print a row for each of the values that `measure` gives."""
    found: dict[str, list[list[float]]] = {version: [] for version in VERSIONS}
    for i in range(rounds):
        for version in VERSIONS[i % 3 :] + VERSIONS[: i % 3]:
            found[version].append(measure(version))
    for i, name in enumerate(names):
        old, again, new = ([values[i] for values in found[version]] for version in VERSIONS)
        ratios = [f"{median(b) / median(a):.3f} | {max(b) / max(a):.3f}" for a, b in ((old + again, new), (old, again))]
        print(f"| {name} | {median(old + again):,.1f} | {median(new):,.1f} | {' | '.join(ratios)} |", flush=True)


def generation(sources: dict[str, Path], folder: Path, rounds: int, precisions: list[str]) -> None:
    """Decoding speed at three precisions and two batch sizes."""
    saved = folder / "gpt2"
    program = f"import heedful; heedful.save(heedful.create('gpt2').eval(), {str(saved)!r})"
    subprocess.run([sys.executable, "-c", program], env=environment(sources["old"]), check=True)
    for precision in precisions:

        def measure(version: str, precision: str = precision) -> list[float]:
            command = [sys.executable, "-c", GENERATION, str(saved), precision]
            run = subprocess.run(command, env=environment(sources[version]), text=True, capture_output=True, check=True)
            return [float(line) for line in run.stdout.splitlines()]

        compare([f"generation, {precision}, batch {rows}" for rows in (1, 8)], rounds, measure)


def training(sources: dict[str, Path], text: Path, folder: Path, rounds: int) -> None:
    """The median speed of a short training, from its log."""
    settings = [f"--set={key}={value}" for key, value in (MODEL | TRAINING).items()]
    settings += ["--set=tokenizer.kind=characters", "--set=data.share=0.02"]
    count = iter(range(1000))

    def measure(version: str) -> list[float]:
        run = folder / f"{version}-{next(count)}"
        command = [sys.executable, "-m", "heedful", "train", str(text), "--out", str(run), "--quiet", *settings]
        subprocess.run(command, env=environment(sources[version]), check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        speeds = [line["tokens"] / line["seconds"] for line in lines if line["kind"] == "step"]
        return [median(speeds[20:])]

    compare(["training, 0.8 M parameters"], rounds, measure)


def serving(sources: dict[str, Path], rounds: int) -> None:
    """Tokens per second of eight clients together: the best of four times in one server."""

    def ask(address: str) -> None:
        body = {"model": "shakespeare", "prompt": "ROMEO:", "max_tokens": 128, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        for _ in range(6):
            urllib.request.urlopen(request).read()

    def speed(address: str) -> float:
        clients = [threading.Thread(target=ask, args=(address,)) for _ in range(8)]
        begin = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return 8 * 6 * 128 / (time.perf_counter() - begin)

    def measure(version: str) -> list[float]:
        command = [sys.executable, "-m", "heedful", "serve", "shakespeare", "--port", "0"]
        server = subprocess.Popen(command, env=environment(sources[version]), text=True, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            words = (word for line in server.stdout for word in line.split())
            address = next(word for word in words if word.startswith("http://")).rstrip("/.")
            return [max(speed(address) for _ in range(4))]
        finally:
            server.terminate()
            server.communicate()

    compare(["serving, 8 clients"], rounds, measure)


def main() -> None:
    """Print a table of all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parents[1] / "src")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["generation", "training", "serving"])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args()
    sources = {"old": options.old.resolve(), "again": options.old.resolve(), "new": options.new.resolve()}
    print("| tokens per second | old | new | new / old | of the best | old / old | of the best |\n|---|" + "---|" * 6)
    with tempfile.TemporaryDirectory() as folder:
        if "generation" in options.only:
            generation(sources, Path(folder), options.rounds, options.precision)
        if "training" in options.only and options.text:
            training(sources, options.text.resolve(), Path(folder), options.rounds)
        if "serving" in options.only:
            serving(sources, options.rounds)


if __name__ == "__main__":
    main()
