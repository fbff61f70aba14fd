"""The servers that benchmarks/serving.py compares: how each is started, and what it is asked. Each is a program of its
own, with two threads for its model, and in its own default settings but for what is set below: of the other settings
tried none was faster throughout.

| server | asked at | prompt | batches |
|---|---|---|---|
| heedful | /v1/completions | token ids | requests join and leave at every step |
| transformers | /v1/completions | text | the same (`--continuous-batching`) |
| llama.cpp | /v1/completions | token ids | the same, of as many requests as `-np` says: the number of clients |
| litgpt | /v1/chat/completions | text | one request at a time: it has no other way to stream |

The text is of words that the tokenizer takes as one token each, so that every server reads the same number of tokens.
LitGPT has no GPT-2: the same shape is built with its GPT-NeoX parts (see programs.py) and random weights of its own.
"engine" is none of them: heedful's engine with the settings of its server, in process and asked without HTTP.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 180.0  # seconds a server may take until it answers
LONGEST = 384  # tokens of a prompt and its answer, rounded up


@dataclass(frozen=True)
class PromptRequest:
    """A request: what every server is sent, in its own way."""

    prompt: list[int]
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Setup:
    """Where things are on this machine."""

    folder: Path  # the model, in the hub's layout
    llama_cpp: str | None = None  # sources, built in their folder build
    pythons: dict[str, str] = field(default_factory=dict)
    threads: int = 2  # of the model

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}

    def program(self, name: str, of: str) -> str:
        """A command of the python that runs this server."""
        return str(Path(self.pythons.get(of, sys.executable)).parent / name)


@dataclass(frozen=True)
class Plan:
    """How a server is started and asked."""

    command: list[str]
    path: str
    body: Callable[[PromptRequest], dict[str, Any]]


def heedful(setup: Setup, precision: str, port: int, clients: int) -> Plan:
    command = [setup.program("heedful", "heedful"), "serve", str(setup.folder), "--port", str(port)]
    command += ["--quantize", precision]
    options = {"model": setup.folder.name, "temperature": 0, "stream": True, "ignore_eos": True}
    options["stream_options"] = {"include_usage": True}
    return Plan(command, "/v1/completions", lambda request: {**options, **ids(request)})


def transformers(setup: Setup, precision: str, port: int, clients: int) -> Plan:
    """128 blocks of 256 tokens: two for each of 64 clients, rather than a share of all memory, its default."""
    command = [setup.program("transformers", "transformers"), "serve", str(setup.folder)]
    command += ["--continuous-batching", "--device", "cpu", "--dtype", precision]
    command += ["--cb-num-blocks", "128", "--cb-max-batch-tokens", "512"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    options = {"model": str(setup.folder), "temperature": 0, "stream": True}
    return Plan(
        command,
        "/v1/completions",
        lambda request: {**options, "prompt": request.text, "max_tokens": request.max_tokens},
    )


def llama_cpp(setup: Setup, precision: str, port: int, clients: int) -> Plan:
    """Keys and values are kept in float16, its default, at every precision: in float32 it takes half as long again."""
    from peers.programs import LlamaCpp

    made = LlamaCpp(precision, setup.folder, setup.llama_cpp)
    command = [str(made.program.with_name("llama-server")), "-m", str(made.file), "--no-ui"]
    n, context = str(setup.threads), str(clients * LONGEST)
    command += ["-t", n, "-tb", n, "-np", str(clients), "-c", context, "-cb"]
    command += ["-cram", "0", "--host", "127.0.0.1", "--port", str(port)]
    options = {"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return Plan(command, "/v1/completions", lambda request: {**options, **ids(request)})


def litgpt(setup: Setup, precision: str, port: int, clients: int) -> Plan:
    """A request waits while others are answered: far more than the 30 s that are its limit by default."""
    python = setup.pythons.get("litgpt", sys.executable)
    place = setup.folder / "converted" / "litgpt-serve"
    if not place.exists():
        done = subprocess.run(
            [python, __file__, "litgpt", str(setup.folder), str(place)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
    kind = {"float32": "32-true", "bfloat16": "bf16-true"}[precision]
    command = [setup.program("litgpt", "litgpt"), "serve", str(place), "--precision", kind]
    command += ["--accelerator", "cpu", "--port", str(port), "--openai_spec", "true", "--stream", "true"]
    command += ["--temperature", "0.0", "--top_k", "1", "--timeout", "3600"]

    def body(request: PromptRequest) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.text}]
        return {
            "model": "lit",
            "messages": messages,
            "stream": True,
            "max_completion_tokens": request.max_tokens,
        }

    return Plan(command, "/v1/chat/completions", body)


def litgpt_folder(folder: Path, place: Path) -> None:
    """In LitGPT's python: a checkpoint as it wants it, with a chat template that adds nothing."""
    import torch
    from litgpt import GPT  # type: ignore[import-not-found]
    from litgpt.utils import save_config  # type: ignore[import-not-found]
    from programs import litgpt_config

    part = place.with_name(f"{place.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    config = litgpt_config(json.loads((folder / "config.json").read_text()))
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), part / "lit_model.pth")
    save_config(config, part)
    shutil.copy(folder / "tokenizer.json", part)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (part / "tokenizer_config.json").write_text(json.dumps(said))
    part.rename(place)


def ids(request: PromptRequest) -> dict[str, Any]:
    return {"prompt": request.prompt, "max_tokens": request.max_tokens}


SERVERS: dict[str, Callable[[Setup, str, int, int], Plan]] = {
    "heedful": heedful,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "litgpt": litgpt,
}
PRECISIONS = {
    "float32": ["engine", "heedful", "transformers", "llama.cpp", "litgpt"],
    "bfloat16": ["engine", "heedful", "transformers", "llama.cpp", "litgpt"],
    "int8": ["engine", "heedful", "llama.cpp"],
}
RESTARTED = {"llama.cpp"}  # started anew for each number of clients: it is told how many there are
SEQUENTIAL = {"litgpt"}  # answers one request at a time: more clients only wait longer


class Server:
    """A server that runs, from when it answers until `close`."""

    def __init__(self, name: str, precision: str, setup: Setup, clients: int) -> None:
        self.port = free_port()
        self.plan = SERVERS[name](setup, precision, self.port, clients)
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            self.plan.command,
            stdout=self.said,
            stderr=self.said,
            env=setup.environment,
            start_new_session=True,
        )
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def message(self, request: PromptRequest) -> bytes:
        """The whole request, headers and all."""
        body = json.dumps(self.plan.body(request)).encode()
        head = f"POST {self.plan.path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nconnection: close\r\n"
        return head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def wait(self) -> None:
        until = time.monotonic() + START
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended: {self.last_words()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"no answer for {START:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"status {self.process.poll()}"

    def close(self) -> None:
        """End it, and then whatever it has started and left."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.said.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class InProcess:
    """heedful's engine in a process that reads requests from a pipe, all of a round at once."""

    def __init__(self, precision: str, setup: Setup) -> None:
        command = [setup.pythons.get("heedful", sys.executable), __file__, "engine", str(setup.folder)]
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, precision],
            text=True,
            # as the server has it
            env={**setup.environment, "OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
        )
        self.read()

    def round(self, requests: list[PromptRequest], clients: int) -> list[tuple[float, float, float, int, str]]:
        """When each began, spoke first and ended; its tokens and text."""
        line = json.dumps({"clients": clients, "requests": [(r.prompt, r.max_tokens) for r in requests]})
        print(line, file=self.process.stdin, flush=True)
        return [tuple(answer) for answer in self.read()]

    def read(self) -> Any:
        line: str = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.said.seek(0)
            raise RuntimeError((self.said.read().strip().splitlines() or ["it ended"])[-1])
        return json.loads(line)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.said.close()


def serve_engine(folder: str, precision: str) -> None:
    """In that process: each line is a round; as many requests at once as there are clients."""
    import heedful
    from heedful.serve.worker import Worker

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Worker(heedful.load(folder, quantize=precision))._make_engine()  # what the server would have
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run_engine(engine, command["requests"], command["clients"])), file=answers, flush=True)


def run_engine(engine: Any, requests: list[tuple[list[int], int]], clients: int) -> list[Any]:
    from heedful.generate.request import Request, Sampling

    waiting = list(enumerate(requests))[::-1]
    running: dict[int, int] = {}
    answers: list[list[Any]] = [[0.0, 0.0, 0.0, 0, ""] for _ in requests]
    while waiting or running:
        while waiting and len(running) < clients:
            place, (prompt, max_tokens) = waiting.pop()
            answers[place][0] = time.perf_counter()
            request = Request(tuple(prompt), max_tokens=max_tokens, sampling=Sampling(temperature=0))
            running[engine.add(request)] = place
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise event.error
            answer = answers[running[event.id]]
            answer[1] = answer[1] or now
            if event.result is not None:
                choice = event.result.choices[0]
                answer[2:] = [now, len(choice.tokens), choice.text]
                del running[event.id]
    return answers


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        serve_engine(*sys.argv[2:])
    else:
        litgpt_folder(Path(sys.argv[2]), Path(sys.argv[3]))
