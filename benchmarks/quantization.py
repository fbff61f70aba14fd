"""Accuracy and memory of packed and quantized weights.

    python benchmarks/quantization.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext-2/test.raw.gz

Each row is the same model, loaded in float32 and packed in the row's precision, on the same windows of the same text.
"plain" is the unpacked model; "transformers" loads the folder that heedful exports: the two must agree. Perplexity is
per token of the model's tokenizer; bits per byte is comparable across tokenizers. "same" is the share of positions with
the same argmax as the plain model.
"""

from __future__ import annotations

import argparse
import gzip
import math
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful
from heedful.evaluate.perplexity import sliding_windows
from heedful.kernels.accelerate import n_bytes
from heedful.kernels.packed import Precision
from heedful.loaded import Loaded
from heedful.models.base import Batch


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def load(model: str, kind: str, device: str) -> Loaded:
    quantize = None if kind == "plain" else kind
    return heedful.load(model, device=device, dtype=torch.float32, quantize=quantize)  # type: ignore[arg-type]


class WindowedEvaluation:
    """The summed cross-entropy over the windows of a text, the argmax at each position, and the seconds taken."""

    def __init__(self, tokens: Tensor, window: int, stride: int) -> None:
        self.tokens, self.parts = tokens, list(sliding_windows(len(tokens), window, stride))

    def __call__(self, logits_of) -> tuple[float, Tensor, float]:  # type: ignore[no-untyped-def]
        total, best, began = 0.0, [], time.perf_counter()
        for part in self.parts:
            logits = logits_of(self.tokens[None, part.begin : part.end])[0, -part.n_new :].float()
            targets = self.tokens[part.end + 1 - part.n_new : part.end + 1]
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            best.append(logits.argmax(-1))
        return total, torch.cat(best), time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="what heedful.load takes: a causal model with a tokenizer")
    parser.add_argument("--text", required=True, type=Path, help="a text file, maybe .gz")
    parser.add_argument("--tokens", type=int, default=20_000, help="how many of its first tokens to score")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    plain = load(arguments.model, "plain", arguments.device)
    assert plain.tokenizer is not None, "a model with a tokenizer is needed"
    encoded = plain.tokenizer.encode_with_offsets(read(arguments.text))[: arguments.tokens + 1]
    text = read(arguments.text)[encoded[1][1] : encoded[-1][2]]
    ids = torch.tensor([token for token, _, _ in encoded], device=arguments.device)
    evaluation = WindowedEvaluation(ids, arguments.window, arguments.stride)
    print(
        f"{plain.name}, {arguments.text.name}: {len(encoded) - 1} tokens, {len(text.encode())} bytes, "
        f"windows of {arguments.window} in steps of {arguments.stride}, {arguments.device}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"{'weights':14} {'MB':>7} {'perplexity':>11} {'bits/byte':>10} {'against plain':>14} {'same':>7} {'s':>7}")
    rows: dict[str, tuple[float, Tensor]] = {}

    def report(kind: str, size: float, result: tuple[float, Tensor, float]) -> None:
        total, best, took = result
        base, plain_best = rows.setdefault("plain", (total, best))
        n = len(encoded) - 1
        print(
            f"{kind:14} {size / 1e6:7.1f} {math.exp(total / n):11.4f} "
            f"{total / math.log(2) / len(text.encode()):10.5f} {math.exp((total - base) / n) - 1:14.3%} "
            f"{(best == plain_best).float().mean():7.2%} {took:7.1f}",
            flush=True,
        )

    report("plain", n_bytes(plain.model), evaluation(lambda ids: plain.model(Batch(ids)).logits))
    with tempfile.TemporaryDirectory() as folder:
        plain.save(folder)
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder).eval().to(arguments.device)
        report(
            "transformers",
            sum(p.nbytes for p in theirs.parameters()),
            evaluation(lambda ids: theirs(ids, use_cache=False).logits),
        )
    for kind in get_args(Precision):
        model = load(arguments.model, kind, arguments.device).model
        report(kind, n_bytes(model), evaluation(lambda ids, model=model: model(Batch(ids)).logits))


if __name__ == "__main__":
    main()
