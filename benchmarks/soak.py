"""A server under 74 mixed clients for ten minutes: well-behaved ones beside those that a public server meets.

    python benchmarks/soak.py [--minutes 10] [--memory 4] [--model SmolLM2-135M-Instruct.Q4_1.gguf] [--seed 0]
                              [--json soak.json]

`heedful serve` runs SmolLM2-135M-Instruct (pulled, unless given) and small models with hostile chat templates, in a
process of its own on 127.0.0.1. Each client sends one request after another until the time is over: short chats that
stream, short completions, long prompts (1,500 to 3,500 tokens), prompts beyond the context, clients that never read,
clients that cut their connection, hostile JSON and hostile templates; eight streams with prompts of 7,000 tokens and
max_tokens 1,000, a client that sends 2,000 prompts in one request, again and again, and one that sends one short
request at a time; one more asks /health every second. A client that is told 429 waits for a second. "left" is a client
that went away by itself, "disconnected" one whose connection the server closed, as it does with a body that is too
large.

Printed as JSON (and written to --json): answers with 5xx; refusals (429) of clients that send one short request at a
time; the time to the first token of "one short request" (median and worst); the most memory of the server against
--memory plus the overhead that docs/serving.md states. Then as tables: the time to the first token (of an answer that
does not stream and of an error: to all of it) and the status codes by kind of client, and the memory of the server with
its processes over time. The KV cache keeps what it may (prefixes of later prompts), so that memory grows to its bound.
The exit code is 1 if any of these numbers is beyond its limit, if the server did not answer a client other than the
long streams and the 2,000 prompts within --patience seconds, or if it did not end well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import heedful
from heedful.weights.catalog import pulled_models

CLIENTS = {
    "short chat, stream": 24,
    "short completion": 8,
    "long prompt, stream": 6,
    "beyond the context": 4,
    "never reads": 6,
    "cuts the connection": 6,
    "hostile JSON": 6,
    "hostile template": 4,
    "7,000 tokens, stream": 8,
    "2,000 prompts": 1,
    "one short request": 1,
}
ONE_AT_A_TIME = ("one short request", "short chat, stream", "short completion")
PATIENT = ("7,000 tokens, stream", "2,000 prompts")  # may take longer than the run
OVERHEAD = 1.0  # GB beyond --memory that docs/serving.md states
MEDIAN, WORST = 1.5, 5.0  # seconds to a short request's first token
MAX_REQUESTS = 10_000  # of one client
UNREAD = 45.0  # seconds that a client who never reads stays
REPEATED = "{%% set n = namespace(x='ab') %%}{%% for i in range(999) %%}{%% set n.x = %s %%}{%% endfor %%}{{ n.x }}"
TEMPLATES = {
    "doubling": REPEATED % "n.x ~ n.x",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "joins": REPEATED % "[n.x, n.x] | join(n.x)",
}
WORDS = (
    "the a river mountain engineer writes reads slowly because yesterday seven green boats under bridge and then "
    "model attention light music question answer winter bread table nobody always of in with before"
).split()


@dataclass
class Record:
    """What the clients saw."""

    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds by kind
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MB with the processes it started
    alone: list[float] = field(default_factory=list)  # MB of the server's own process
    wrong: list[str] = field(default_factory=list)  # the first answers with 5xx


class Soak:
    """The clients of one server."""

    def __init__(self, port: int, patience: float, seed: int) -> None:
        self.port, self.patience = port, patience
        self.random, self.record = random.Random(seed), Record()
        self.end = math.inf

    # --- one request -------------------------------------------------------------------------------------------------

    async def post(self, kind: str, path: str, body: object, *, until_first: bool = False) -> str:
        """Send JSON, read the whole answer (or up to its first token) and record both; the status."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.exchange(kind, http_request("POST", path, raw), until_first=until_first)

    async def exchange(self, kind: str, request: bytes, *, until_first: bool = False) -> str:
        """Send bytes and record the answer to them."""
        begin, got, first = time.perf_counter(), b"", 0.0
        patience = self.end - begin + 1 if kind in PATIENT else self.patience
        try:
            async with asyncio.timeout(max(1.0, patience)):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(request)
                    await writer.drain()
                    while piece := await reader.read(65_536):
                        got += piece
                        if not first and b"data: " in got:
                            first = time.perf_counter() - begin
                            if until_first:
                                break
                finally:
                    writer.close()
        except TimeoutError:
            status = "not at its end" if kind in PATIENT else "timeout"
        except OSError:
            status = "disconnected"
        else:
            status = found[1].decode() if (found := re.match(rb"HTTP/1\.1 (\d{3})", got)) else "closed"
        if status == "200" and b'data: {"error"' in got:
            status = "500" if b'"server_error"' in got else "error in the stream"
        self.note(kind, status, first or time.perf_counter() - begin, got)
        return status

    def note(self, kind: str, status: str, seconds: float, got: bytes = b"") -> None:
        self.record.statuses[kind][status] += 1
        if status.isdigit() or b"data: " in got:
            self.record.first[kind].append(seconds)
        if status.startswith("5") or status == "timeout":
            self.record.wrong.append(f"{kind}: {status} {got[-120:]!r}")

    def text(self, n_words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=n_words))

    # --- the kinds of clients ----------------------------------------------------------------------------------------

    async def short_chat(self, kind: str) -> str:
        messages = [{"role": "user", "content": f"Say something about {self.text(6)}."}]
        body = {"model": "smollm2", "messages": messages, "max_completion_tokens": 24, "stream": True}
        return await self.post(kind, "/v1/chat/completions", body)

    async def short_completion(self, kind: str) -> str:
        body = {"model": "smollm2", "prompt": self.text(12), "max_tokens": 12, "temperature": 0.7}
        return await self.post(kind, "/v1/completions", body)

    async def long_prompt(self, kind: str) -> str:
        text = self.text(self.random.randint(1300, 3000))  # about 1.15 tokens each
        body = {"model": "smollm2", "prompt": text, "max_tokens": 8, "stream": True}
        return await self.post(kind, "/v1/completions", body)

    async def beyond_the_context(self, kind: str) -> str:
        body = {"model": "smollm2", "prompt": self.text(20_000), "max_tokens": 8, "stream": True}
        status = await self.post(kind, "/v1/completions", body)
        await asyncio.sleep(self.random.uniform(1, 4))
        return status

    async def never_reads(self, kind: str) -> str:
        """Asks for much, reads nothing, and stays."""
        body = {"model": "smollm2", "prompt": self.text(9), "max_tokens": 400, "n": 4, "logprobs": 5, "stream": True}
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        transport = writer.transport
        transport.pause_reading()
        writer.write(http_request("POST", "/v1/completions", json.dumps(body).encode()))
        await asyncio.sleep(self.random.uniform(0.3, 1) * UNREAD)
        transport.abort()
        self.note(kind, "left", 0.0)
        return "left"

    async def cuts_the_connection(self, kind: str) -> str:
        """Goes away after the first token, in the middle of a request, or at once."""
        body = {"model": "smollm2", "prompt": self.text(20), "max_tokens": 200, "stream": True}
        how = self.random.randrange(3)
        if how == 0:
            return await self.post(kind, "/v1/completions", body, until_first=True)
        raw = http_request("POST", "/v1/completions", json.dumps(body).encode())
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw if how == 1 else raw[: self.random.randrange(10, len(raw))])
        await asyncio.sleep(self.random.uniform(0, 0.5))
        writer.transport.abort()
        self.note(kind, "left", 0.0)
        return "left"

    async def hostile_json(self, kind: str) -> str:
        status = await self.exchange(kind, self.random.choice(HOSTILE))
        await asyncio.sleep(self.random.uniform(0.1, 1))
        return status

    async def hostile_template(self, kind: str) -> str:
        name = self.random.choice(list(TEMPLATES))
        body = {"model": name, "messages": [{"role": "user", "content": self.text(5)}], "max_tokens": 4}
        status = await self.post(kind, "/v1/chat/completions", body)
        await asyncio.sleep(self.random.uniform(1, 5))
        return status

    async def very_long_prompt(self, kind: str) -> str:
        prompt = self.random.choices(range(1000, 10_000), k=7000)
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        return await self.post(kind, "/v1/completions", body)

    async def thousands_of_prompts(self, kind: str) -> str:
        body = {"model": "smollm2", "prompt": ["a"] * 2000, "max_tokens": 16}
        return await self.post(kind, "/v1/completions", body)

    async def one_short_request(self, kind: str) -> str:
        body = {"model": "smollm2", "prompt": self.text(12), "max_tokens": 8, "stream": True}
        status = await self.post(kind, "/v1/completions", body)
        await asyncio.sleep(0.5)
        return status

    async def health(self, kind: str) -> str:
        status = await self.exchange(kind, http_request("GET", "/health"))
        await asyncio.sleep(1)
        return status

    # --- all of them -------------------------------------------------------------------------------------------------

    async def run(self, minutes: float, server: psutil.Process) -> None:
        end = self.end = time.perf_counter() + 60 * minutes
        kinds: dict[str, Callable[[str], Awaitable[str]]] = {
            "short chat, stream": self.short_chat,
            "short completion": self.short_completion,
            "long prompt, stream": self.long_prompt,
            "beyond the context": self.beyond_the_context,
            "never reads": self.never_reads,
            "cuts the connection": self.cuts_the_connection,
            "hostile JSON": self.hostile_json,
            "hostile template": self.hostile_template,
            "7,000 tokens, stream": self.very_long_prompt,
            "2,000 prompts": self.thousands_of_prompts,
            "one short request": self.one_short_request,
        }
        clients = [self.client(kind, kinds[kind], end) for kind, n in CLIENTS.items() for _ in range(n)]
        watcher = asyncio.create_task(self.watch(server))
        await asyncio.gather(*clients, self.client("/health", self.health, end))
        watcher.cancel()

    async def client(self, kind: str, ask: Callable[[str], Awaitable[str]], end: float) -> None:
        for _ in range(MAX_REQUESTS):
            if time.perf_counter() >= end:
                return
            try:
                status = await ask(kind)
            except OSError:
                status = "disconnected"
                self.note(kind, status, 0.0)
            if status in ("429", "disconnected"):
                await asyncio.sleep(1)

    async def watch(self, server: psutil.Process) -> None:
        begin = time.perf_counter()
        while True:
            self.record.memory.append((time.perf_counter() - begin, megabytes(server)))
            self.record.alone.append(server.memory_info().rss / 2**20)
            await asyncio.sleep(2)


def http_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request on a connection of its own."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in given.items())]).encode() + b"\r\n\r\n" + body


def hostile_requests() -> list[bytes]:
    """Bodies and requests that are wrong in many ways; none of them may be answered with 5xx."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    bodies: list[tuple[str, bytes]] = [
        (completions, b""), (completions, b"[]"), (completions, b"null"), (completions, b'{"prompt": '),
        (completions, b"[" * 100_000), (completions, b'{"a":' * 50_000), (completions, b"\xff\xfe{}"),
        (completions, b'{"temperature": NaN}'), (completions, b'{"max_tokens": 1' + b"0" * 5_000 + b"}"),
        (completions, b'{"prompt": "\\ud800"}'), (completions, b'{"prompt": [99999999]}'),
        (completions, b'{"prompt": "x", "n": 128, "max_tokens": 9999999}'), (completions, b'{"model": "../../etc"}'),
        (completions, b'{"model": "smollm2", "logit_bias": {"x": 1}}'), (completions, b'{"stop": ["", ""]}'),
        (completions, b'{"model": "smollm2", "prompt": "x", "num_beams": 4}'),
        (completions, b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}'),
        (chat, b'{"messages": [{"role": "robot", "content": 5}]}'), (chat, b'{"messages": 7, "model": null}'),
        (chat, json.dumps({"messages": [{"role": "user", "content": "x"}] * 5_000}).encode()),
        (chat, b'{"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}'),
        ("/v1/embeddings", b'{"model": "smollm2", "input": []}'), ("/tokenize", b'{"prompt": 1}'),
        ("/v1/nothing", b"{}"),
    ]  # fmt: skip
    whole = [http_request("POST", path, body) for path, body in bodies]
    return [
        *whole,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        http_request("GET", "/" + "a" * 70_000),
        http_request("POST", completions, b"{}", **{"content-encoding": "gzip"}),
        http_request("DELETE", completions),
        http_request("POST", completions, b"{}", origin="https://example.org"),
    ]


HOSTILE = hostile_requests()


# --- the server -------------------------------------------------------------------------------------------------------


def find_model() -> Path:
    if "smollm2-135m-instruct" not in pulled_models():
        sys.exit("SmolLM2 is not here: `heedful pull smollm2-135m-instruct`, or give --model")
    return pulled_models()["smollm2-135m-instruct"]


def hostile_models(folder: Path) -> list[Path]:
    """Small models whose chat templates take all the memory or time that they can get."""
    loaded = heedful.load("tiny")
    assert loaded.tokenizer is not None
    for name, template in TEMPLATES.items():
        loaded.tokenizer.chat_template = template
        loaded.save(folder / name)
    return [folder / name for name in TEMPLATES]


def start_server(models: list[str], memory: float) -> tuple[subprocess.Popen[str], int]:
    """The server and its port, once it listens."""
    command = [sys.executable, "-m", "heedful", "serve", *models, "--port", "0", "--memory", str(memory)]
    server = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
    if not found:
        sys.exit(f"the server did not start: {line}")
    return server, int(found[1])


def megabytes(server: psutil.Process) -> float:
    """The resident memory of the server and of the processes in which templates run."""
    total = 0
    for process in [server, *server.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            pass
    return total / 2**20


def summary(record: Record, memory: float) -> dict[str, float | int | None]:
    """The numbers that have limits."""
    first = sorted(record.first["one short request"])
    return {
        "answers_with_5xx": sum(n for some in record.statuses.values() for s, n in some.items() if s.startswith("5")),
        "refused_one_at_a_time": sum(record.statuses[kind]["429"] for kind in ONE_AT_A_TIME),
        "short_requests": len(first),
        "first_token_median_s": round(statistics.median(first), 3) if first else None,
        "first_token_worst_s": round(first[-1], 3) if first else None,
        "rss_most_gb": round(max(record.alone) * 2**20 / 1e9, 3),
        "rss_with_children_most_gb": round(max(size for _, size in record.memory) * 2**20 / 1e9, 3),
        "rss_bound_gb": memory + OVERHEAD,
    }


def beyond(numbers: dict[str, float | int | None]) -> list[str]:
    """What is beyond its limit."""
    bound = numbers["rss_bound_gb"]
    assert bound is not None
    limits = {"answers_with_5xx": 0, "refused_one_at_a_time": 0, "rss_most_gb": bound}
    limits |= {"first_token_median_s": MEDIAN, "first_token_worst_s": WORST}
    return [
        f"{name} is {numbers[name]}, the limit {limit}"
        for name, limit in limits.items()
        if not ((value := numbers[name]) is not None and value <= limit)
    ]


def print_tables(record: Record) -> None:
    def percentile(values: list[float], p: float) -> float:
        return sorted(values)[min(len(values) - 1, int(p * len(values)))]

    print("\n| client | requests | first token p50 | p95 | max | statuses |\n|---|---|---|---|---|---|")
    for kind, statuses in record.statuses.items():
        times = record.first[kind]
        shown = [f"{percentile(times, p):.2f} s" for p in (0.5, 0.95, 1)] if times else ["", "", ""]
        codes = ", ".join(f"{status} x {n}" for status, n in statuses.most_common())
        print(f"| {kind} | {statuses.total()} | {' | '.join(shown)} | {codes} |")
    steps = record.memory[:: max(1, len(record.memory) // 10)]
    print("\n| time |", " | ".join(f"{at:.0f} s" for at, _ in steps), "|")
    print("|---|" + "---|" * len(steps))
    print("| memory, MB |", " | ".join(f"{size:.0f}" for _, size in steps), "|")
    print(f"\nmost memory: {max(size for _, size in record.memory):.0f} MB; last: {record.memory[-1][1]:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description="74 mixed clients against a real server, for ten minutes.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, help="a GGUF file or folder (default: SmolLM2, pulled)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until an answer counts as missing")
    parser.add_argument("--memory", type=float, default=4.0, help="gigabytes for the models and their KV caches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for the numbers that have limits")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heedful-soak-") as folder:
        hostile = hostile_models(Path(folder))
        server, port = start_server([f"smollm2={given.model or find_model()}", *map(str, hostile)], given.memory)
        try:
            soak = Soak(port, given.patience, given.seed)
            asyncio.run(soak.run(given.minutes, psutil.Process(server.pid)))
        finally:
            died = server.poll()
            server.terminate()
            code = server.wait(90)
    numbers = summary(soak.record, given.memory)
    print(json.dumps(numbers, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    print_tables(soak.record)
    problems = (
        beyond(numbers)
        + soak.record.wrong[:5]
        + ([f"the server ended with {code}"] if died is not None or code else [])
    )
    print("\nwithin all limits, every request answered" if not problems else "\n" + "\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
