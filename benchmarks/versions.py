"""Two versions of heedful side by side, in one run: what a change costs or gains.

    python benchmarks/versions.py OLD_SRC [NEW_SRC] [--text FILE] [--rounds 7] [--only generation training serving]

OLD_SRC and NEW_SRC are `src` folders of two checkouts (NEW_SRC: this one's). Both versions run with this Python, each
in processes of its own that stay up; rounds alternate between them, and the order changes from round to round. Shown
are medians in tokens per second, the ratio new / old, and the spread of that ratio over the rounds.

    generation   GPT-2 124M's shape with random weights: a prompt of 64 tokens and 96 new ones, greedy, batch 1 and 8
    training     a GPT of 0.8 million parameters on the text's characters, 12 x 64 tokens a step: `heedful train`'s log
    serving      the shipped Shakespeare model over HTTP: 8 clients, 6 requests of 128 tokens each, greedy
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

VERSIONS = ("old", "new")
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
for line in sys.stdin:
    prompt = torch.randint(1000, (int(line), 64), generator=torch.Generator().manual_seed(1))
    times = []
    for n in (1, 97):
        begin = time.perf_counter()
        with torch.inference_mode():
            greedy_batch(model, Batch(prompt), n)
        times.append(time.perf_counter() - begin)
    print(int(line) * 96 / (times[1] - times[0]), flush=True)
"""


def environment(source: Path) -> dict[str, str]:
    """The variables with which Python imports this version."""
    return os.environ | {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}


def compare(name: str, rounds: int, measure: Callable[[str], float]) -> None:
    """Measure both versions alternately and print a row."""
    found: dict[str, list[float]] = {version: [] for version in VERSIONS}
    for version in VERSIONS:  # once for caches and pages
        measure(version)
    for i in range(rounds):
        for version in VERSIONS if i % 2 else VERSIONS[::-1]:
            found[version].append(measure(version))
    old, new = (statistics.median(found[version]) for version in VERSIONS)
    ratios = sorted(b / a for a, b in zip(found["old"], found["new"], strict=True))
    print(f"| {name} | {old:,.1f} | {new:,.1f} | {new / old:.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |", flush=True)


def generation(sources: dict[str, Path], folder: Path, rounds: int) -> None:
    """Decoding speed at three precisions and two batch sizes."""
    saved = folder / "gpt2"
    program = f"import heedful; heedful.save(heedful.create('gpt2').eval(), {str(saved)!r})"
    subprocess.run([sys.executable, "-c", program], env=environment(sources["old"]), check=True)
    for precision in PRECISIONS:
        workers = {
            version: subprocess.Popen(
                [sys.executable, "-c", GENERATION, str(saved), precision],
                env=environment(source),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for version, source in sources.items()
        }

        def ask(version: str, rows: int, workers: dict[str, subprocess.Popen[str]] = workers) -> float:
            worker = workers[version]
            assert worker.stdin is not None and worker.stdout is not None
            print(rows, file=worker.stdin, flush=True)
            return float(worker.stdout.readline())

        for rows in 1, 8:
            compare(f"generation, {precision}, batch {rows}", rounds, lambda version, rows=rows: ask(version, rows))
        for worker in workers.values():
            worker.communicate()


def training(sources: dict[str, Path], text: Path, folder: Path, rounds: int) -> None:
    """The median speed of a short training, from its log."""
    settings = [f"--set={key}={value}" for key, value in (MODEL | TRAINING).items()]
    settings += ["--set=tokenizer.kind=characters", "--set=data.share=0.02"]
    count = iter(range(1000))

    def measure(version: str) -> float:
        run = folder / f"{version}-{next(count)}"
        command = [sys.executable, "-m", "heedful", "train", str(text), "--out", str(run), "--quiet", *settings]
        subprocess.run(command, env=environment(sources[version]), check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        speeds = [line["tokens"] / line["seconds"] for line in lines if line["kind"] == "step"]
        return statistics.median(speeds[20:])

    compare("training, 0.8 M parameters", rounds, measure)


def serving(sources: dict[str, Path], rounds: int) -> None:
    """Tokens per second of eight clients together."""
    servers, addresses = {}, {}
    for version, source in sources.items():
        command = [sys.executable, "-m", "heedful", "serve", "shakespeare", "--port", "0"]
        servers[version] = subprocess.Popen(command, env=environment(source), text=True, stdout=subprocess.PIPE)
        output = servers[version].stdout
        assert output is not None
        addresses[version] = next(word for line in output for word in line.split() if word.startswith("http://"))

    def ask(address: str) -> None:
        body = {"model": "shakespeare", "prompt": "ROMEO:", "max_tokens": 128, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        for _ in range(6):
            urllib.request.urlopen(request).read()

    def measure(version: str) -> float:
        clients = [threading.Thread(target=ask, args=(addresses[version].rstrip("/."),)) for _ in range(8)]
        begin = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return 8 * 6 * 128 / (time.perf_counter() - begin)

    try:
        compare("serving, 8 clients", rounds, measure)
    finally:
        for server in servers.values():
            server.terminate()
            server.communicate()


def main() -> None:
    """Print a table of all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parents[1] / "src")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["generation", "training", "serving"])
    options = parser.parse_args()
    sources = {"old": options.old.resolve(), "new": options.new.resolve()}
    print("| tokens per second | old | new | new / old | over the rounds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        if "generation" in options.only:
            generation(sources, Path(folder), options.rounds)
        if "training" in options.only and options.text:
            training(sources, options.text.resolve(), Path(folder), options.rounds)
        if "serving" in options.only:
            serving(sources, options.rounds)


if __name__ == "__main__":
    main()
