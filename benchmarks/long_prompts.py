"""Beside a long prompt: the first token of a short request, and a running stream, over HTTP.

    python benchmarks/long_prompts.py [--model smollm2-135m | MODEL] [--lengths 3001 7018] [--quantize bfloat16]

`heedful serve` with SmolLM2-135M's shape and random weights, or any model that it serves. First alone: the first token
of a short request (median of five), and the time between two tokens of a stream (median). Then with a prompt of so many
tokens, sent while the stream runs: short requests one after another, each of 20 new tokens of prompt, until the long
prompt has its first token; and the stream's tokens meanwhile. Last the long prompt without any company.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path

from generation import make_model_folder


class Server:
    """`heedful serve` of one model on a free port."""

    def __init__(self, model: str, quantize: str | None) -> None:
        command = [sys.executable, "-m", "heedful", "serve", f"model={model}", "--port", "0"]
        command += ["--quantize", quantize] if quantize else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)):
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            said += line
        self.port = int(found[1])
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stream(self, n_prompt: int, max_tokens: int) -> Generator[float]:
        """The times at which the tokens of a completion arrive; the prompt is drawn anew."""
        prompt = [random.randrange(5, 5000) for _ in range(n_prompt)]
        body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "logprobs": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        try:
            for line in answer:
                if line.startswith(b"data: {") and b'"token_logprobs": [' in line:
                    yield time.perf_counter()
        finally:
            connection.close()

    def first_token(self, n_prompt: int) -> float:
        """Seconds from a request to its first token."""
        begin = time.perf_counter()
        return next(self.stream(n_prompt, 1)) - begin

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Running(threading.Thread):
    """A stream in the background; `times` are its tokens'."""

    def __init__(self, server: Server, n_prompt: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.begin, self.times, self.stopped = time.perf_counter(), list[float](), False
        self.tokens = server.stream(n_prompt, max_tokens)
        self.start()

    def run(self) -> None:
        for at in self.tokens:
            self.times.append(at)
            if self.stopped:
                return self.tokens.close()

    def wait(self, n: int) -> None:
        """Wait for so many tokens."""
        while len(self.times) < n and self.is_alive():
            time.sleep(0.01)

    def gaps(self, begin: float, end: float) -> list[float]:
        """The times between two tokens, within a time."""
        inside = [at for at in self.times if begin <= at <= end]
        return [b - a for a, b in pairwise(inside)]


def measure(server: Server, length: int) -> str:
    server.first_token(20)  # a warm-up
    alone = statistics.median(server.first_token(20) for _ in range(5))
    stream = Running(server, 20, 4000)
    stream.wait(60)
    gap = statistics.median(stream.gaps(stream.times[10], stream.times[-1]))
    long = Running(server, length, 1)
    time.sleep(0.2)
    shorts: list[float] = []
    while long.is_alive() and not long.times:
        shorts.append(server.first_token(20))
    gaps = stream.gaps(long.begin, long.times[0])
    beside = long.times[0] - long.begin
    slower = f"{statistics.median(gaps) / gap:.1f} | {statistics.quantiles(gaps, n=20)[-1] / gap:.1f}"
    first = f"{statistics.median(shorts):.2f} | {max(shorts):.2f}"
    stream.stopped = True
    stream.join()
    single = server.first_token(length)
    return f"| {length} | {alone:.2f} | {first} | {gap * 1e3:.0f} ms | {slower} | {beside:.1f} | {single:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="latency beside long prompts")
    parser.add_argument(
        "--model", default="smollm2-135m", help="a published size (random weights), or what serve takes"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[3001, 7018])
    parser.add_argument("--quantize", help="as of heedful serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = options.model
        if re.fullmatch(r"[\w.-]+", model) and not Path(model).exists():
            model = str(make_model_folder(model, Path(place) / model, None))
        server = Server(model, options.quantize)
        try:
            print("Seconds; the stream's slowdown in its median and 95th percentile.\n")
            print(
                "| prompt | first token of a short request: alone | beside it | at worst | a stream's token alone |",
                end="",
            )
            print(" times slower | p95 | the prompt's own first token | without company |")
            print("|---|---|---|---|---|---|---|---|---|", flush=True)
            for length in options.lengths:
                print(measure(server, length), flush=True)
        finally:
            server.close()


if __name__ == "__main__":
    main()
