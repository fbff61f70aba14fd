"""Servers of embeddings with OpenAI's interface, for benchmarks/embeddings.py: heedful's, llama.cpp's, and what many
write themselves, FastAPI around the code on the model's card.

    python benchmarks/peers/embedding_servers.py FOLDER PORT     # the latter
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}  # llama.cpp's names
START = 120.0  # seconds
SLOTS = 16  # texts that llama.cpp computes at once


def heedful(folder: Path, precision: str, port: int, sources: str | None) -> list[str]:
    """Float32 as it serves by default: packed, since that loses no precision."""
    quantize = [] if precision == "float32" else ["--quantize", precision]
    return [sys.executable, "-m", "heedful", "serve", f"encoder={folder}", "--port", str(port), *quantize]


def fastapi_loop(folder: Path, precision: str, port: int, sources: str | None) -> list[str]:
    return [sys.executable, __file__, str(folder), str(port)]


def llama_cpp(folder: Path, precision: str, port: int, sources: str | None) -> list[str]:
    """Room for 256 tokens in each of its slots, and all of them in one pass."""
    if not sources:
        raise RuntimeError("no --llama-cpp")
    file = Path(tempfile.gettempdir()) / f"heedful-{folder.name}-{KINDS[precision]}.gguf"
    if not file.exists():
        convert = [sys.executable, str(Path(sources) / "convert_hf_to_gguf.py"), str(folder)]
        convert += ["--outtype", KINDS[precision], "--outfile", str(file)]
        done = subprocess.run(convert, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
    tokens = str(SLOTS * 256)
    command = [str(Path(sources) / "build" / "bin" / "llama-server"), "-m", str(file), "--embedding"]
    command += [
        "--pooling",
        "mean",
        "-t",
        "2",
        "-tb",
        "2",
        "-np",
        str(SLOTS),
        "-c",
        tokens,
        "-b",
        tokens,
        "-ub",
        tokens,
    ]
    return [*command, "--no-ui", "--host", "127.0.0.1", "--port", str(port)]


SERVERS: dict[str, Callable[[Path, str, int, str | None], list[str]]] = {
    "heedful": heedful,
    "llama.cpp": llama_cpp,
    "FastAPI, plain loop": fastapi_loop,
}
CONFIGURATIONS = [
    ("FastAPI, plain loop", "float32"), ("heedful", "float32"), ("llama.cpp", "float32"),
    ("heedful", "bfloat16"), ("llama.cpp", "bfloat16"), ("heedful", "int8"), ("llama.cpp", "int8"),
]  # fmt: skip


class EmbeddingServer:
    """A server that runs, from when it answers until `close`."""

    def __init__(self, name: str, precision: str, folder: Path, port: int, sources: str | None, threads: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            SERVERS[name](folder, precision, port, sources), stdout=self.said, stderr=self.said,
            start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        body = json.dumps({"model": "encoder", "input": "ready"}).encode()
        until = time.monotonic() + START
        while time.monotonic() < until and self.process.poll() is None:
            headers = {"content-type": "application/json"}
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{self.url}/embeddings", body, headers), timeout=60
                ):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"it does not answer: status {self.process.poll()}")

    def close(self) -> None:
        """End it, and what it has started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.said.close()


def make_app(folder: str) -> Any:
    """The code on the model's card behind a route; requests are computed one after another, in a thread."""
    import threading

    import torch
    from fastapi import Body, FastAPI
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model, app = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval(), FastAPI()
    lock = threading.Lock()

    @app.post("/v1/embeddings")
    def embed(body: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        with lock, torch.no_grad():
            given = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            real = given["attention_mask"][..., None]
            hidden = model(**given).last_hidden_state
            vectors = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1).tolist()
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return {"object": "list", "data": data, "model": "encoder", "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    return app


if __name__ == "__main__":
    import uvicorn

    here = str(Path(__file__).parent)  # modules here must not shadow packages
    sys.path = [place for place in sys.path if place != here]
    uvicorn.run(make_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
