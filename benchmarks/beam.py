"""Beam search: tokens per second of heedful, transformers and CTranslate2 on translation models, in one run.

    python benchmarks/beam.py [--sizes t5-small opus-mt-en-de] [--rounds 7] [--only NAME ...]

Random weights in float32, 5 beams, a source of 32 tokens, an output of 64 (eos is suppressed before), 2 threads. Each
program runs in its own process and loads once; rounds alternate between the programs. Tokens per second are those of
the output over the time of the whole call, encoder included. The table tells whether all outputs are the same.

The limit is memory bandwidth: the bytes of the decoder's and the head's weights, which each step reads, over the
measured bandwidth of this machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BEAMS, SOURCE, NEW, THREADS = 5, 32, 64, 2
EOS = {"t5": 1, "transformer": 0}  # eos id by family

Generate = Callable[[], list[int]]


def source_ids() -> list[int]:
    return [5 + 97 * i % 5000 for i in range(SOURCE)]


# --- programs: each loads the model and returns a function that runs beam search -------------------------------------


def heedful_program(folder: Path, end: int, *, packed: bool = False) -> Generate:
    import torch

    import heedful
    from heedful.generate.beam import beam_search
    from heedful.models.base import Batch

    model: Any = heedful.load(folder).model
    if packed:
        from heedful.kernels.accelerate import accelerate

        model = accelerate(model, "inference", precision="float32")
    batch = Batch(source=torch.tensor([source_ids()]))

    def generate() -> list[int]:
        found = beam_search(model, batch, beams=BEAMS, min_tokens=NEW, max_tokens=NEW, eos={end})
        return list(found[0][0].tokens)

    return generate


def packed_program(folder: Path, end: int) -> Generate:
    return heedful_program(folder, end, packed=True)


def transformers_program(folder: Path, end: int) -> Generate:
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    source = torch.tensor([source_ids()])

    @torch.inference_mode()
    def generate() -> list[int]:
        out = model.generate(
            source, attention_mask=torch.ones_like(source), num_beams=BEAMS, do_sample=False,
            min_new_tokens=NEW, max_new_tokens=NEW, eos_token_id=end, forced_eos_token_id=None,
        )  # fmt: skip
        ids: list[int] = out[0, 1:].tolist()
        return ids

    return generate


def ctranslate2_program(folder: Path, end: int) -> Generate:
    import ctranslate2

    place = folder.with_name(folder.name + "-ctranslate2")
    converter(folder, end).convert(str(place))
    model = ctranslate2.Translator(
        str(place), device="cpu", inter_threads=1, intra_threads=THREADS, compute_type="float32"
    )
    source = [f"w{i}" for i in source_ids()]

    def generate() -> list[int]:
        (result,) = model.translate_batch([source], beam_size=BEAMS, min_decoding_length=NEW, max_decoding_length=NEW)
        return [int(word.removeprefix("w")) for word in result.hypotheses[0]]

    return generate


def converter(folder: Path, end: int) -> Any:
    """CTranslate2's converter, with a made-up vocabulary, since models with random weights have no tokenizer."""
    import json

    from ctranslate2.converters import TransformersConverter

    n_words = json.loads((folder / "config.json").read_text())["vocab_size"]

    class Words:
        eos_token, unk_token, pad_token = f"w{end}", "w2", "w0"

        def get_vocab(self) -> dict[str, int]:
            return {f"w{i}": i for i in range(n_words - 1)} | {"<pad>": n_words - 1}

        def convert_ids_to_tokens(self, i: int) -> str:
            return f"w{i}"

    class Converter(TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, *_: object, **__: object) -> Words:
            return Words()

    return Converter(str(folder))


PROGRAMS: dict[str, Callable[[Path, int], Generate]] = {
    "heedful": heedful_program,
    "heedful, packed": packed_program,
    "transformers": transformers_program,
    "ctranslate2": ctranslate2_program,
}


# --- the run ---------------------------------------------------------------------------------------------------------


def work(name: str, folder: Path, end: int, pipe: Connection) -> None:
    """The worker process: load, then run once per request; sends the seconds and the ids."""
    import torch

    torch.set_num_threads(THREADS)
    try:
        generate = PROGRAMS[name](folder, end)
    except Exception as problem:  # reported in place of a result
        pipe.send(f"{type(problem).__name__}: {problem}")
        return
    pipe.send(None)
    while pipe.recv():
        begin = time.perf_counter()
        ids = generate()
        pipe.send((time.perf_counter() - begin, ids))


class Worker:
    def __init__(self, name: str, folder: Path, end: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(name, folder, end, theirs), daemon=True)
        self.process.start()
        self.problem: str | None = self.pipe.recv()

    def round(self) -> tuple[float, list[int]]:
        self.pipe.send(True)
        result: tuple[float, list[int]] = self.pipe.recv()
        return result

    def end(self) -> None:
        if self.problem is None:
            self.pipe.send(False)
        self.process.join()


def bytes_per_step(model: Any) -> int:
    """Bytes of the weights that a step reads: decoder, without cross-attention's keys and values, and head."""
    read = [p for name, p in model.decoder.named_parameters() if "cross.key" not in name and "cross.value" not in name]
    return sum(p.nbytes for p in [*read, model.head.weight])


def compare(size: str, place: Path, options: argparse.Namespace) -> None:
    import heedful
    from generation import bandwidth
    from heedful.weights.save import save

    model: Any = heedful.create(size)
    folder = place / size
    save(model, folder)
    read = bytes_per_step(model)
    print(f"\n{size}: {read / 1e6:.0f} MB of weights per step, limit {bandwidth() / read:.0f} tokens/s")
    names = [name for name in PROGRAMS if not options.only or name in options.only]
    workers = {name: Worker(name, folder, EOS[model.family]) for name in names}
    rounds: dict[str, list[tuple[float, list[int]]]] = {}
    for turn in range(options.rounds + 1):  # the first is a warm-up
        for name, worker in workers.items():
            if worker.problem is None:
                time.sleep(0.3)  # the previous program's threads may still be spinning
                took = worker.round()
                if turn:
                    rounds.setdefault(name, []).append(took)
    for name, worker in workers.items():
        worker.end()
        if worker.problem is not None:
            print(f"{name}: not measured ({worker.problem.splitlines()[0]})")
    if rounds:
        print_table(rounds)


def print_table(rounds: dict[str, list[tuple[float, list[int]]]]) -> None:
    first = next(iter(rounds))
    median = {name: NEW / statistics.median(seconds for seconds, _ in done) for name, done in rounds.items()}
    print(f"| program | tokens/s, median | fastest | over {first} | same answer |\n|---|---|---|---|---|")
    for name, done in rounds.items():
        fastest = NEW / min(seconds for seconds, _ in done)
        same = "yes" if done[0][1] == rounds[first][0][1] else "no"
        print(f"| {name} | {median[name]:.0f} | {fastest:.0f} | {median[name] / median[first]:.2f} | {same} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="beam search in tokens per second, side by side")
    parser.add_argument("--sizes", nargs="+", default=["t5-small", "opus-mt-en-de"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, help="only these programs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for size in options.sizes:
            compare(size, Path(place), options)


if __name__ == "__main__":
    main()
