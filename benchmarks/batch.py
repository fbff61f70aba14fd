"""Batches: `heedful batch` against requests one after another to a server; with --ray two workers against one.

    python benchmarks/batch.py [--model smollm2-135m-instruct] [--requests 128] [--max-tokens 48] [--rounds 3]
    python benchmarks/batch.py --ray [--model ...] [--requests 256] [--max-tokens 48] [--rounds 3]

Prompts are words in a random order, 8 to 64 of them, new in every round; completions have --max-tokens tokens each. The
server is `heedful serve`, and its client sends a request when the last is answered. Of `heedful batch` there are two
times: the command's own (with the model loaded), and the whole process. Threads are as usual, one per core.

With --ray a local cluster has two cores, and each worker one of them, with one thread: two workers have twice the cores
of one. They have answered a few requests before the time is taken, and rounds alternate between one and two. Tokens
per second are those of completions; ratios are of the same round's requests, and medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

WORDS = (
    "the old man went to sea with his boat and a dog while rain fell on every house of that small town near river "
    "where nobody had seen summer since last year when two ships came from north"
).split()
WARM_UP = 16  # requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    (measure_ray if options.ray else measure_server)(options)


def lines(options: argparse.Namespace, seed: int) -> list[str]:
    """The requests of a round, as lines of a batch."""
    draw, found = random.Random(seed), []
    for i in range(options.requests):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(8, 64)))
        body = {"prompt": prompt, "max_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True}
        found.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    return found


def report(name: str, rates: list[float]) -> None:
    print(f"| {name} | {statistics.median(rates):,.0f} | {', '.join(f'{rate:,.0f}' for rate in rates)} |", flush=True)


def report_ratio(what: str, numerators: list[float], denominators: list[float]) -> None:
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    print(f"\n{what}: {statistics.median(ratios):.2f} times ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")


# --- against a server -------------------------------------------------------------------------------------------------


def measure_server(options: argparse.Namespace) -> None:
    """Requests one after another over HTTP, then the same as a batch."""
    n_tokens = options.requests * options.max_tokens
    one_by_one, batch, process = list[float](), list[float](), list[float]()
    command = [sys.executable, "-m", "heedful", "serve", options.model, "--port", "0"]
    for seed in range(options.rounds):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # one at a time has the cores
            try:
                one_by_one.append(n_tokens / measure_posts(options, server, seed))
            finally:
                server.terminate()
        inner, whole = run_batch(options, lines(options, seed))
        batch.append(n_tokens / inner)
        process.append(n_tokens / whole)
    print(f"{options.requests} requests, {options.max_tokens} tokens each, {options.model}, {options.rounds} rounds\n")
    print("| | tokens/s | rounds |\n|---|---|---|")
    report("`heedful serve`, one request after another", one_by_one)
    report("`heedful batch`", batch)
    report("`heedful batch`, with the start of the process", process)
    report_ratio("heedful batch against one request after another", batch, one_by_one)


def measure_posts(options: argparse.Namespace, server: subprocess.Popen[str], seed: int) -> float:
    """The seconds of a round's requests, one after another."""
    assert server.stdout is not None
    found = re.search(r"http://[\d.:]+", server.stdout.readline())
    assert found is not None, "the server did not start"
    post(found[0], lines(options, -1)[0])
    return timed(lambda: [post(found[0], line) for line in lines(options, seed)])


def post(url: str, line: str) -> None:
    request = json.loads(line)
    body = json.dumps(request["body"]).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + request["url"], body, headers)) as response:
        response.read()


def run_batch(options: argparse.Namespace, requests: list[str]) -> tuple[float, float]:
    """The seconds that the command says, and those of its process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "requests.jsonl")
        path.write_text("\n".join(requests))
        command = [sys.executable, "-m", "heedful", "batch", str(path), f"{folder}/answers", "--model", options.model]
        began = time.perf_counter()
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        whole = time.perf_counter() - began
    found = re.search(r"in ([\d.,]+) s", said)
    assert found is not None and f"{len(requests):,} ok, 0 failed" in said, said
    return float(found[1].replace(",", "")), whole


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# --- on Ray -----------------------------------------------------------------------------------------------------------


def measure_ray(options: argparse.Namespace) -> None:
    """One worker with one core, then two with one core each."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for seed in range(options.rounds):
        for n in rates:
            rates[n].append(options.requests * options.max_tokens / on_ray(options, n, lines(options, seed)))
    ray.shutdown()
    print(f"{options.requests} requests, {options.max_tokens} tokens each, {options.model}, {options.rounds} rounds\n")
    print("| | tokens/s | rounds |\n|---|---|---|")
    report("one worker, 1 core", rates[1])
    report("two workers, 1 core each", rates[2])
    report_ratio("two workers against one", rates[2], rates[1])


def on_ray(options: argparse.Namespace, n: int, requests: list[str]) -> float:
    """The seconds that so many workers take."""
    from heedful.serve.batch_files import BatchAnswer, read_requests
    from heedful.serve.options import Options
    from heedful.serve.ray_batch import answer_batch_on_ray, started_replicas

    settings = Options(models=(options.model,))
    answers = list[BatchAnswer]()

    def answer(given: list[str], actors: list[object]) -> None:
        found = read_requests(io.BytesIO("\n".join(given).encode()))
        asyncio.run(answer_batch_on_ray(found, len(given), actors, answers.append, max_rows=settings.max_rows))

    with started_replicas(settings, n, cpus=1) as actors:
        for actor in actors:
            answer(lines(options, -1)[:WARM_UP], [actor])
        answers.clear()
        seconds = timed(lambda: answer(requests, actors))
    assert len(answers) == len(requests) and all(found.status == 200 for found in answers)
    return seconds


if __name__ == "__main__":
    main()
