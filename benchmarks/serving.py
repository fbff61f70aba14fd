"""Serving throughput and latency: heedful's server and its peers under the same streaming clients, in one run.

    python benchmarks/serving.py --tokenizer GPT2-TOKENIZER --llama-cpp SOURCES --python litgpt=PYTHON
        [--clients 1 8 32 64] [--rounds 3] [--requests 3] [--only NAME ...] [--precision NAME ...]
        [--model gpt2 | FOLDER]

GPT-2 124M's shape with random weights, on two cores shared by clients and server. A client sends a request, reads its
stream to the end, and sends the next; there are --requests per client, at least eight in all. Prompts have 16 to 256
tokens and completions 32 to 96, greedy; every round has new prompts, so that prefix caching has no effect. In a round
the servers run one after another: each is started, warmed up, measured with each number of clients, and stopped. The
servers are in benchmarks/peers/servers.py; those that fail are listed with the reason.

Requests and tokens per second are medians over the rounds; the time to first token (of text, at the client) is over all
requests of all rounds. "engine" is heedful's engine with the same requests in process, without HTTP: the difference to
"heedful" is the cost of the HTTP layer and of the clients, whose share of the two cores is listed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from generation import make_model_folder
from peers.servers import PRECISIONS, RESTARTED, SEQUENTIAL, InProcess, PromptRequest, Server, Setup

PROMPTS, ANSWERS, FEWEST = (16, 256), (32, 96), 8
PROBLEMS = (RuntimeError, ValueError, OSError, subprocess.SubprocessError)
Key = tuple[str, str, int]  # precision, server, clients


@dataclass
class Completion:
    """One completion: the times of its request, first token and end, and its text."""

    begin: float
    first: float
    end: float
    n_tokens: int
    text: str


@dataclass
class Round:
    """The completions of one round."""

    completions: list[Completion]
    busy: float = 0.0  # CPU seconds of the clients per second

    @property
    def seconds(self) -> float:
        return max(a.end for a in self.completions) - min(a.begin for a in self.completions)

    @property
    def tokens(self) -> float:
        return sum(a.n_tokens for a in self.completions) / self.seconds

    @property
    def requests(self) -> float:
        return len(self.completions) / self.seconds


# --- requests --------------------------------------------------------------------------------------------------------


class PromptGenerator:
    """Random prompts of single-token words, as ids and as text."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = self.tokenizer.get_vocab()
        self.words = sorted(number for word, number in words.items() if re.fullmatch("Ġ[a-z]{3,}", word))
        if len(self.words) < 1000:
            raise ValueError("prompts are made of the words in GPT-2's vocabulary: name its folder by --tokenizer")

    def make(self, n: int, seed: str, longest: int = ANSWERS[1]) -> list[PromptRequest]:
        """n requests, determined by the seed."""
        draw, requests = random.Random(seed), []
        while len(requests) < n:
            prompt = draw.choices(self.words, k=draw.randint(*PROMPTS))
            max_tokens = min(longest, draw.randint(*ANSWERS))
            text = self.tokenizer.decode(prompt)
            if self.tokenizer.encode(text).ids == prompt:
                requests.append(PromptRequest(prompt, text, max_tokens))
        return requests


# --- clients ---------------------------------------------------------------------------------------------------------


class StreamClient(asyncio.Protocol):
    """One streaming request on its own connection. Data is stored with its arrival time and parsed after the run, since
    clients compete with the server for the cores.
    """

    def __init__(self, message: bytes) -> None:
        self.message, self.parts = message, list[tuple[float, bytes]]()
        self.begin = time.perf_counter()
        self.done = asyncio.get_running_loop().create_future()

    def protocol(self) -> StreamClient:
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, problem: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def completion(self, request: PromptRequest) -> Completion:
        """Parse the response; RuntimeError if it is an error or incomplete."""
        whole = b"".join(part for _, part in self.parts)
        if not whole.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"it answered {whole[:300]!r}")
        first, text, chunks, used = 0.0, "", 0, None
        for when, event in self.events():
            if "error" in event:
                raise RuntimeError(f"it answered {event}")
            used = (event.get("usage") or {}).get("completion_tokens") or used
            for choice in event.get("choices", []):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                first = first or (when if piece else 0.0)
                chunks += bool(piece)
                text += piece
        n_tokens = used or chunks
        if n_tokens != request.max_tokens:
            raise RuntimeError(f"{n_tokens} tokens were written where {request.max_tokens} were asked for")
        return Completion(self.begin, first, self.parts[-1][0], n_tokens, text)

    def events(self) -> Iterator[tuple[float, dict]]:
        """The server-sent events with their arrival times; other lines (chunk sizes) are skipped."""
        rest = b""
        for when, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield when, json.loads(line[6:])


async def run_clients(server: Server, requests: list[PromptRequest], n: int) -> Round:
    waiting = list(zip(requests, map(server.message, requests), strict=True))[::-1]
    streams: list[tuple[PromptRequest, StreamClient]] = []
    loop = asyncio.get_running_loop()

    async def client() -> None:
        while waiting:
            request, message = waiting.pop()
            stream = StreamClient(message)
            streams.append((request, stream))
            await loop.create_connection(stream.protocol, "127.0.0.1", server.port)
            await stream.done

    begin, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(n)))
    busy = (time.process_time() - used) / (time.perf_counter() - begin)
    order = {id(request): i for i, request in enumerate(requests)}
    streams.sort(key=lambda pair: order[id(pair[0])])
    return Round([stream.completion(request) for request, stream in streams], busy)


# --- rounds ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="requests and tokens per second of servers, side by side")
    parser.add_argument("--model", default="gpt2", help="a published size (random weights) or a folder")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--threads", type=int, default=2, help="of each server's model")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these servers")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=["float32", "bfloat16"])
    parser.add_argument("--llama-cpp", help="llama.cpp's sources, with llama-server built in their folder build")
    parser.add_argument("--python", nargs="+", metavar="NAME=PATH", default=[], help="the python to run a server with")
    parser.add_argument("--tokenizer", type=Path, help="a folder with GPT-2's tokenizer, for random weights")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that `finally` stops the running server
    pythons = dict(pair.split("=", 1) for pair in options.python)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(options.model)
        if not folder.exists():
            folder = make_model_folder(options.model, Path(place) / options.model, options.tokenizer)
        compare(Setup(folder.resolve(), options.llama_cpp, pythons, options.threads), options)


def compare(setup: Setup, options: argparse.Namespace) -> None:
    prompts = PromptGenerator(setup.folder)
    rounds: dict[Key, list[Round]] = {}
    failed: dict[tuple[str, str], str] = {}
    turns = [(p, name) for p in options.precision for name in PRECISIONS[p]]
    for number in range(options.rounds):
        for precision, name in turns:
            if (options.only and name not in options.only) or (precision, name) in failed:
                continue
            print(f"round {number + 1} of {options.rounds}: {name} {precision}", file=sys.stderr)
            try:
                for n, found in measure_server(name, precision, setup, prompts, number, options):
                    rounds.setdefault((precision, name, n), []).append(found)
                    line = f"  {n} clients: {found.tokens:.1f} tokens/s in {found.seconds:.1f} s"
                    print(line, file=sys.stderr, flush=True)
            except PROBLEMS as problem:
                failed[precision, name] = str(problem)
    report(rounds, options)
    for (precision, name), reason in failed.items():
        print(f"\n{name} {precision}: not measured to the end ({reason})")


def measure_server(
    name: str, precision: str, setup: Setup, prompts: PromptGenerator, number: int, options: argparse.Namespace
) -> Iterator[tuple[int, Round]]:
    """Start a server, and for each number of clients warm it up and measure it."""
    server: Server | InProcess | None = None
    try:
        for n in options.clients:
            if server is not None and name in RESTARTED:
                server.close()
                server = None
            if server is None:
                server = InProcess(precision, setup) if name == "engine" else Server(name, precision, setup, n)
            each = 1 if name in SEQUENTIAL else options.requests
            measure(server, prompts.make(min(n, FEWEST), f"warm {number} {n}", longest=8), n)
            yield n, measure(server, prompts.make(max(FEWEST, each * n), f"{number} {n}"), n)
    finally:
        if server is not None:
            server.close()


def measure(server: Server | InProcess, requests: list[PromptRequest], n: int) -> Round:
    if isinstance(server, InProcess):
        return Round([Completion(*times) for times in server.round(requests, n)])
    return uvloop.run(run_clients(server, requests, n))


# --- report ----------------------------------------------------------------------------------------------------------


def report(rounds: dict[Key, list[Round]], options: argparse.Namespace) -> None:
    """Print a markdown table, then the speed of heedful's server relative to the others."""
    rate = {key: statistics.median(r.tokens for r in found) for key, found in rounds.items()}
    print(
        "| precision | clients | server | requests/s | first token: median, p99 | tokens/s | x transformers ",
        end="",
    )
    print("| clients' share of the cores |\n|---|---|---|---|---|---|---|---|")
    for precision in options.precision:
        for n in options.clients:
            for name in PRECISIONS[precision]:
                key = precision, name, n
                if key not in rounds:
                    continue
                found = rounds[key]
                waits = sorted(a.first - a.begin for r in found for a in r.completions)
                wait = f"{statistics.median(waits):.2f} s, {waits[math.ceil(0.99 * len(waits)) - 1]:.2f} s"
                base = rate.get((precision, "transformers", n))
                busy = statistics.median(r.busy for r in found) / 2
                cells = [precision, str(n), name, f"{statistics.median(r.requests for r in found):.2f}", wait]
                cells += [f"{rate[key]:.0f}", f"{rate[key] / base:.2f}" if base else ""]
                cells += ["" if name == "engine" else f"{busy:.1%}"]
                print(f"| {' | '.join(cells)} |")
    print()
    for precision in options.precision:
        for n in options.clients:
            mine = rounds.get((precision, "heedful", n))
            if mine:
                others = [(name, rounds.get((precision, name, n), [])) for name in PRECISIONS[precision]]
                ratios = [relative_speed(mine, name, theirs) for name, theirs in others if theirs and name != "heedful"]
                print(f"- {precision}, {n} clients: heedful at {'; '.join(ratios)}")


def relative_speed(mine: list[Round], name: str, theirs: list[Round]) -> str:
    """The median ratio of tokens per second over the rounds, and the number of identical completions."""
    pairs = list(zip(mine, theirs, strict=False))
    ratio = statistics.median(a.tokens / b.tokens for a, b in pairs)
    same = [x.text == y.text for a, b in pairs for x, y in zip(a.completions, b.completions, strict=False)]
    if name == "litgpt":  # other weights
        return f"{ratio:.2f} of {name}"
    return f"{ratio:.2f} of {name} ({sum(same)} of {len(same)} answers the same)"


if __name__ == "__main__":
    main()
