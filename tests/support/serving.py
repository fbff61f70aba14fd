"""Real `heedful serve` processes, the small models that they serve, and plain ways to talk to them."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from heedful.text import Tokenizer, train_bpe
from heedful.weights.save import save
from support.trainings import story

KEY = "sk-of-the-tests"
PATIENCE = 60.0  # seconds after which a test that waits for something fails
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- models -----------------------------------------------------------------------------------------------------------


def words() -> Tokenizer:
    """A byte-level BPE of 400 tokens that knows the words of `story`, the end of a text and the turns of a chat."""
    texts = story(200, seed=3).split("\n\f\n")
    return train_bpe([*texts, "é ü 日本 👍"] * 2, 400, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def saved(folder: Path) -> Path:
    """A GPT-2 with random weights and a chat template, sure enough of itself to be told apart."""
    from support.folders import tiny_gpt

    tokenizer = words()
    model = tiny_gpt(d_model=48, vocab_size=len(tokenizer), max_len=1024)
    model.special = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    save(model, folder, Tokenizer(tokenizer.backend, roles=tokenizer.roles, chat_template=CHATML))
    return folder


def exported(folder: Path) -> Path:
    """The like as transformers writes it to the disk."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = words()
    backend = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
    )
    torch.manual_seed(7)
    end = tokenizer.eos_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=1024, n_embd=48, n_layer=2, n_head=4,
        initializer_range=0.2, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    backend.save_pretrained(folder)
    return folder


def as_gguf(path: Path) -> Path:
    """A LLaMA with random weights and a byte-level tokenizer in one GGUF file."""
    from support.folders import tiny_llama
    from support.ggufs import write_gguf

    tokenizer = words()
    special = set(tokenizer.special_tokens.values())
    merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
    write_gguf(
        path,
        tiny_llama(vocab_size=len(tokenizer), max_len=256),
        "llama",
        tokenizer_model="gpt2",
        tokenizer_pre="gpt-2",
        token_list=[tokenizer.token(i) for i in range(len(tokenizer))],
        token_types=[3 if i in special else 1 for i in range(len(tokenizer))],
        token_merges=[f"{a} {b}" for a, b in merges],
        eos_token_id=tokenizer.eos_id,
    )
    return path


# --- servers ----------------------------------------------------------------------------------------------------------


class Client:
    """Whoever talks to a server at `url`."""

    def __init__(self, url: str, key: str | None = None, token: str = "") -> None:
        self.url, self.token = url, token
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= {"x-heedful-token": token} if token else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False)

    @property
    def address(self) -> tuple[str, int]:
        found = httpx.URL(self.url)
        assert found.port is not None
        return found.host, found.port

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must work."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end in [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events(b"".join(response.iter_raw()))

    def metrics(self) -> dict[str, float]:
        """The numbers of /metrics by name and labels, as `name{model="tiny"}`."""
        lines = self.get("/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def count(self, name: str) -> float:
        """One of them, over all its labels."""
        return sum(v for k, v in self.metrics().items() if k == name or k.startswith(name + "{"))

    def running(self) -> float:
        return self.count("heedful_running_requests")

    def waiting(self) -> float:
        return self.count("heedful_waiting_requests")

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Ask until it is so."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, f"waited in vain for {what}"

    def wait_until_idle(self) -> None:
        self.wait_for(lambda: self.running() == self.waiting() == 0, "nothing running and nothing waiting")

    def open(self, path: str, body: Any, *, key: str | None = None, **headers: str) -> socket.socket:
        """A bare connection on which a request was sent; what comes back is for the test to read, or not."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
        more |= {} if key is None else {"authorization": f"Bearer {key}"}
        more |= {"x-heedful-token": self.token} if self.token else {}
        lines = [f"POST {path} HTTP/1.1", f"host: {self.address[0]}", *[f"{k}: {v}" for k, v in more.items()]]
        sock = socket.create_connection(self.address, timeout=PATIENCE)
        sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        return sock


def events(raw: bytes) -> list[dict[str, Any]]:
    """What a stream's bytes say, by the letter: `data: {json}`, an empty line, and [DONE] in the end."""
    parts = raw.decode("utf-8").split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], raw[-300:]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1]), raw[:300]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


class Server(Client):
    """`heedful serve ...` as a process of its own, on a port that was free."""

    def __init__(self, *arguments: str | Path, key: str | None = None, **environment: str) -> None:
        command = [sys.executable, "-m", "heedful", "serve", *map(str, arguments), "--port", "0"]
        usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "200"}
        given = {k: v for k, v in os.environ.items() if k not in ("HEEDFUL_API_KEY", "FORCE_COLOR")}
        given |= usual | ({} if key is None else {"HEEDFUL_API_KEY": key}) | environment
        self.process = subprocess.Popen(command, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        super().__init__(self._find_url(), key, self._find_token())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _find_url(self) -> str:
        """It says where it listens once it does."""
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            if found := re.search(r"http://\S+:\d+", line):
                return found[0].rstrip("/").removesuffix("/v1")
        raise AssertionError(f"the server ended at once: {''.join(self.said)}")

    def _find_token(self) -> str:
        """The line after has the page's address, with the token that what runs code and trains asks for."""
        line = self._lines.get(timeout=PATIENCE) or ""
        return line.strip().partition("?token=")[2]

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not stop: {''.join(self.said)}") from None
        finally:
            self._reader.join(PATIENCE)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ThreadServer(Client):
    """A server in a thread of this process, whose models a test can spoil."""

    def __init__(self, app: Any, max_connections: int | None = None) -> None:
        import uvicorn

        from heedful.serve.protocol import Protocol

        self.app = app
        protocol = functools.partial(Protocol, max_connections=max_connections)
        self._server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_config=None, access_log=False))
        # With its protocol named, as the server does it, small answers are sent at once.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(128)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])), daemon=True)
        self._thread.start()
        url, token = f"http://127.0.0.1:{self._socket.getsockname()[1]}", app.state.options.token
        super().__init__(url, token=token)

    @property
    def ports(self) -> set[int]:
        """The ports of the clients that are connected; asked in a loop, it leaves the server's thread its time."""
        time.sleep(0.005)
        return {connection.client[1] for connection in list(self._server.server_state.connections)}

    def stop(self) -> None:
        self._server.should_exit = True
        self.http.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def serving(*models: str | Path, **options: Any) -> Iterator[ThreadServer]:
    """These models, served by a thread of this process."""
    from heedful.serve.app import create_app
    from heedful.serve.metrics import Metrics
    from heedful.serve.model_manager import ModelManager
    from heedful.serve.options import Options

    chosen = Options(models=tuple(map(str, models)), port=0, **options)
    manager = ModelManager(chosen.models, chosen, Metrics())
    inside = ThreadServer(create_app(manager, chosen), chosen.max_connections)
    try:
        yield inside
    finally:
        inside.stop()


# --- what must be -----------------------------------------------------------------------------------------------------


def assert_error(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """The error shape, all four keys; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert response.headers["x-request-id"]
    if param is not None:
        assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code, body
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]["message"]


def shared_data(*parts: str) -> Path:
    """A file or folder of the data beside the repository, or a skip."""
    root = Path(__file__).resolve().parents[2]
    for data in (root.parent / "shared" / "data", root / "shared" / "data"):
        if data.joinpath(*parts).exists():
            return data.joinpath(*parts)
    pytest.skip(f"shared/data/{'/'.join(parts)} is not beside the repository")
