"""Sentence embeddings: sentences per second of heedful and its peers on real text, in one run.

    python benchmarks/embeddings.py FOLDER [--data ../shared/data] [--sentences 2000] [--rounds 5] [--only NAME ...]
    python benchmarks/embeddings.py FOLDER --server [--llama-cpp SOURCES] [--sentences 500] [--rounds 5]

FOLDER holds all-MiniLM-L6-v2 (`make real` installs it). The sentences are drawn with a fixed seed from SST-2, SQuAD
(questions, sentences, whole passages), Multi30k and WikiText-2, so that most are short and some long, truncated to 256
tokens. Each program runs in its own process with 2 threads and loads once; rounds alternate between the programs. The
time is from texts to vectors, tokenizer included. CTranslate2 has no tokenizer and does not sort: it gets transformers'
tokenizer and batches of 32 sorted by length. "plain loop" is the code on the model's card: padded batches of 32 in the
given order.

The limit is arithmetic: the FLOPs of the real tokens over the measured FLOP/s of matrix products of the model's shape.
The table also compares the vectors with those of sentence-transformers in float32: largest absolute difference and
least cosine similarity.

With --server it is servers over HTTP (peers/embedding_servers.py), asked by OpenAI's client on the same cores: one
client with a text a request, 16 of them, and one with 64 texts a request. All servers run; rounds alternate between
them. Texts of more than 256 tokens are left out: not every server truncates.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

THREADS, ROWS, LONGEST = 2, 32, 256
SHARES = {"sst2": 0.2, "questions": 0.2, "captions": 0.2, "sentences": 0.25, "passages": 0.075, "wiki": 0.075}

Embed = Callable[[list[str]], Any]  # texts -> (N, E)


def sentences(data: Path, n: int) -> list[str]:
    def lines(name: str) -> list[str]:
        return gzip.decompress((data / name).read_bytes()).decode().splitlines()

    passages = json.loads((data / "squad" / "squad_ctx_train.json").read_text())
    found = {
        "sst2": [line.split("\t")[0] for line in (data / "sst2" / "dev.tsv").read_text().splitlines()],
        "questions": [qa["question"] for p in passages for qa in p["qas"]],
        "captions": lines("multi30k/val.en.gz"),
        "sentences": [s for p in passages for s in p["context"].split(". ") if s.strip()],
        "passages": [p["context"] for p in passages],
        "wiki": [s for s in lines("wikitext-2/valid.raw.gz") if s.strip() and not s.strip().startswith("=")],
    }
    draw = random.Random(0)
    texts = [text.strip() for name, kind in found.items() for text in draw.sample(kind, round(SHARES[name] * n))]
    draw.shuffle(texts)
    return texts


# --- programs: each loads the model and returns a function from texts to vectors -------------------------------------


def heedful_program(folder: Path, precision: str) -> Embed:
    import heedful

    return heedful.load(folder, quantize=precision).embed  # type: ignore[arg-type]


def sentence_transformers_program(folder: Path, precision: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, precision)})
    return lambda texts: model.encode(
        texts, batch_size=ROWS, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
    )


def ctranslate2_program(folder: Path, precision: str) -> Embed:
    import ctranslate2
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        ctranslate2.converters.TransformersConverter(str(folder)).convert(place, force=True)
        model = ctranslate2.Encoder(place, device="cpu", intra_threads=THREADS, compute_type=precision)

    def embed(texts: list[str]) -> Any:
        ids = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        vectors: list[Any] = [None] * len(ids)
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            hidden = np.array(model.forward_batch([ids[i] for i in rows]).last_hidden_state)
            for i, states in zip(rows, hidden, strict=True):
                mean = states[: len(ids[i])].mean(axis=0)
                vectors[i] = mean / np.linalg.norm(mean)
        return np.stack(vectors)

    return embed


def plain_loop_program(folder: Path, precision: str) -> Embed:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    @torch.no_grad()
    def embed(texts: list[str]) -> Any:
        vectors = []
        for start in range(0, len(texts), ROWS):
            given = tokenizer(
                texts[start : start + ROWS],
                padding=True,
                truncation=True,
                max_length=LONGEST,
                return_tensors="pt",
            )
            real = given["attention_mask"][..., None]
            hidden = model(**given).last_hidden_state
            vectors.append((hidden * real).sum(1) / real.sum(1))
        return torch.nn.functional.normalize(torch.cat(vectors), dim=-1)

    return embed


PROGRAMS: dict[str, Callable[[Path, str], Embed]] = {
    "heedful": heedful_program,
    "sentence-transformers": sentence_transformers_program,
    "ctranslate2": ctranslate2_program,
    "plain loop": plain_loop_program,
}
CONFIGURATIONS = [
    ("sentence-transformers", "float32"), ("heedful", "float32"), ("ctranslate2", "float32"),
    ("plain loop", "float32"), ("sentence-transformers", "bfloat16"), ("heedful", "bfloat16"),
    ("ctranslate2", "int8"), ("heedful", "int8"),
]  # fmt: skip


# --- the run ---------------------------------------------------------------------------------------------------------


def work(name: str, precision: str, folder: Path, texts: list[str], pipe: Connection) -> None:
    """The worker process: load, then embed once per request; sends the seconds and the vectors."""
    import torch

    torch.set_num_threads(THREADS)
    here = str(Path(__file__).parent)  # modules here must not shadow packages that transformers imports
    sys.path = [place for place in sys.path if place != here]
    try:
        embed = PROGRAMS[name](folder, precision)
        embed(texts[:ROWS])
    except Exception as problem:  # reported in place of a result
        pipe.send(f"{type(problem).__name__}: {problem}")
        return
    pipe.send(None)
    while pipe.recv():
        begin = time.perf_counter()
        vectors = embed(texts)
        pipe.send((time.perf_counter() - begin, torch.as_tensor(vectors).float().numpy()))


class Worker:
    def __init__(self, name: str, precision: str, folder: Path, texts: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        args = (name, precision, folder, texts, theirs)
        self.process = context.Process(target=work, args=args, daemon=True)
        self.process.start()
        self.problem: str | None = self.pipe.recv()
        self.seconds: list[float] = []
        self.vectors: Any = None

    def round(self) -> None:
        self.pipe.send(True)
        seconds, self.vectors = self.pipe.recv()
        self.seconds.append(seconds)

    def end(self) -> None:
        if self.problem is None:
            self.pipe.send(False)
        self.process.join()


def forward_flops(folder: Path, lengths: Sequence[int]) -> float:
    """FLOPs of the matrix products for texts of these lengths in tokens."""
    c = json.loads((folder / "config.json").read_text())
    width, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    weights = 4 * width**2 + 2 * width * inner
    return float(sum(2 * layers * (n * weights + 2 * n**2 * width) for n in lengths))


def matmul_flops_per_second(precision: str) -> float:
    """FLOP/s of a matrix product of the model's shape on two threads."""
    import torch

    torch.set_num_threads(THREADS)
    kind = getattr(torch, precision)
    x, w = torch.ones(1024, 384).to(kind), torch.ones(384, 1536).to(kind)
    multiply = torch._int_mm if precision == "int8" else torch.mm
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        multiply(x, w)
        times.append(time.perf_counter() - begin)
    return 2 * 1024 * 384 * 1536 / min(times)


def compare(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    texts = sentences(options.data, options.sentences)
    ids = AutoTokenizer.from_pretrained(options.folder)(texts, truncation=True, max_length=LONGEST)["input_ids"]
    lengths = sorted(len(row) for row in ids)
    print(f"{len(texts)} texts, {sum(lengths)} tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    rates = {precision: matmul_flops_per_second(precision) for precision in ("float32", "bfloat16", "int8")}
    print(", ".join(f"{precision} {rate / 1e9:.0f} GFLOP/s" for precision, rate in rates.items()), "\n")
    chosen = [c for c in CONFIGURATIONS if not options.only or c[0] in options.only]
    workers = {c: Worker(*c, options.folder, texts) for c in chosen}
    for (name, precision), worker in list(workers.items()):
        if worker.problem is not None:
            print(f"{name} {precision}: not measured ({worker.problem.splitlines()[0]})")
            del workers[name, precision]
    for _ in range(options.rounds):
        for worker in workers.values():
            time.sleep(0.3)  # the previous program's threads may still be spinning
            worker.round()
    exact = workers[next(iter(workers))].vectors
    print("| program | precision | sentences/s, median | fastest | limit | largest difference | least cosine |")
    print("|---|---|---|---|---|---|---|")
    for (name, precision), worker in workers.items():
        worker.end()
        median, fastest = (len(texts) / f(worker.seconds) for f in (statistics.median, min))
        limit = len(texts) * rates[precision] / forward_flops(options.folder, lengths)
        difference = abs(worker.vectors - exact).max()
        cosine = (worker.vectors * exact).sum(axis=1).min()
        print(
            f"| {name} | {precision} | {median:.0f} | {fastest:.0f} | {limit:.0f} | {difference:.1e} | {cosine:.6f} |"
        )


# --- servers ---------------------------------------------------------------------------------------------------------

LOADS = ((1, 1), (16, 1), (1, 64))  # clients, texts a request


async def ask(url: str, texts: list[str], clients: int, size: int) -> tuple[float, list[float], Any]:
    """Texts per second, the seconds of each request, and the vectors; each client asks again when it is answered."""
    import numpy as np
    from openai import AsyncOpenAI

    waiting = iter([list(range(i, min(i + size, len(texts)))) for i in range(0, len(texts), size)])
    seconds: list[float] = []
    vectors: list[Any] = [None] * len(texts)

    async def client(openai: AsyncOpenAI) -> None:
        for indices in waiting:
            begin = time.perf_counter()
            reply = await openai.embeddings.create(model="encoder", input=[texts[i] for i in indices])
            seconds.append(time.perf_counter() - begin)
            for i, item in zip(indices, reply.data, strict=True):
                vectors[i] = item.embedding

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:  # takes long to make, so once
        begin = time.perf_counter()
        await asyncio.gather(*(client(openai) for _ in range(clients)))
        total = time.perf_counter() - begin
    return len(texts) / total, seconds, np.array(vectors, dtype=np.float32)


def compare_servers(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from peers.embedding_servers import CONFIGURATIONS, EmbeddingServer
    from peers.servers import free_port

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    texts = [text for text in sentences(options.data, options.sentences) if len(tokenizer(text).input_ids) <= LONGEST]
    servers: dict[tuple[str, str], EmbeddingServer] = {}
    rates: dict[tuple[str, str, int, int], list[float]] = {}
    waits: dict[tuple[str, str, int, int], list[float]] = {}
    found: dict[tuple[str, str], Any] = {}
    try:
        for name, precision in (c for c in CONFIGURATIONS if not options.only or c[0] in options.only):
            try:
                servers[name, precision] = EmbeddingServer(
                    name, precision, options.folder, free_port(), options.llama_cpp, THREADS
                )
            except (RuntimeError, OSError) as problem:
                print(f"{name} {precision}: not measured ({problem})")
        for _ in range(options.rounds):
            for clients, size in LOADS:
                for key, server in servers.items():
                    rate, seconds, found[key] = asyncio.run(ask(server.url, texts, clients, size))
                    rates.setdefault((*key, clients, size), []).append(rate)
                    waits.setdefault((*key, clients, size), []).extend(seconds)
    finally:
        for server in servers.values():
            server.close()
    exact = found[next(iter(found))]
    print("| server | precision | clients | texts a request | texts/s, median | range | ms a request | least cosine |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, precision, clients, size), each in rates.items():
        wait = 1000 * statistics.median(waits[name, precision, clients, size])
        cosine = (found[name, precision] * exact).sum(axis=1).min()
        print(
            f"| {name} | {precision} | {clients} | {size} | {statistics.median(each):.0f} | {min(each):.0f} to "
            f"{max(each):.0f} | {wait:.1f} | {cosine:.6f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="sentence embeddings per second, side by side")
    parser.add_argument("folder", type=Path, help="a sentence encoder in the hub's layout")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these programs or servers")
    parser.add_argument("--server", action="store_true", help="servers over HTTP, in place of programs in process")
    parser.add_argument("--llama-cpp", metavar="SOURCES", help="llama.cpp's folder, with its programs in build/bin")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are stopped
    compare_servers(options) if options.server else compare(options)


if __name__ == "__main__":
    main()
