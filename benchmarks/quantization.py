"""Accuracy and memory of packed and quantized weights.

    python benchmarks/quantization.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext-2/valid.raw.gz

Each row is the same model, loaded in float32 and packed in the row's precision, on the same windows of the same text
and on 200 questions of fact. "plain" is the unpacked model; "transformers" loads the folder that heedful exports: the
two must agree. "Q8_0" and "Q4_1" are what llama.cpp's formats lose: the weights of the blocks rounded and restored by
the gguf package, the rest in float32; with "and x" the inputs of these products are rounded to Q8_0 too, as llama.cpp
does.

Perplexity is per token of the model's tokenizer; bits per byte is comparable across tokenizers. KL is the divergence
from the plain model's predictions, in thousandths of a nat; "same" is the share of positions with its argmax. "first"
and "all": the share of questions whose greedy answer begins with the same token as the plain model's, and that are
the same to the end (8 tokens at most); "chat" asks as a user of an assistant.
"""

from __future__ import annotations

import argparse
import gzip
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heedful
from heedful.evaluate.perplexity import sliding_windows
from heedful.kernels.accelerate import n_bytes
from heedful.kernels.packed import Precision
from heedful.loaded import Loaded
from heedful.models.base import Batch
from heedful.nn.block import Block

CAPITALS = """France Germany Italy Spain Portugal England Ireland Norway Sweden Finland Denmark Poland Austria Hungary
Greece Turkey Russia Ukraine Romania Bulgaria Belgium Switzerland Egypt Morocco Kenya Nigeria Ghana Ethiopia Israel Iraq
Iran India Pakistan China Japan Thailand Vietnam Indonesia Malaysia Philippines Australia Canada Mexico Cuba Brazil
Argentina Chile Peru Colombia Venezuela""".split()
OPPOSITES = """hot big tall fast young happy light full open strong rich early good true high wet soft loud clean sweet
long wide thick heavy near""".split()
ELEMENTS = "hydrogen oxygen carbon nitrogen iron gold silver sodium copper helium lead calcium tin zinc neon".split()
CURRENCIES = "Japan Russia India China Mexico England Switzerland Sweden Brazil Turkey".split()
YOUNG = "dog cat cow horse sheep goat pig lion bear frog".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
COLOURS = ["the sky on a clear day", "grass", "snow", "blood", "coal", "a ripe banana", "an orange", "milk", "a lemon"]
CONTINENTS = "France Egypt Brazil China Canada Kenya Australia India Peru Germany Japan Nigeria".split()
SUMS = [(a, b) for a in (2, 3, 5, 7, 10) for b in (1, 2, 4, 5, 6, 8, 9, 10, 20, 100)]


def questions() -> list[tuple[str, str]]:
    """200 pairs of a text to continue and the same as a question."""
    found = [(f"The capital of {x} is", f"What is the capital of {x}?") for x in CAPITALS]
    found += [(f"The opposite of {x} is", f"What is the opposite of {x}?") for x in OPPOSITES]
    found += [(f"The chemical symbol for {x} is", f"What is the chemical symbol for {x}?") for x in ELEMENTS]
    found += [(f"The currency of {x} is the", f"What is the currency of {x}?") for x in CURRENCIES]
    found += [(f"A young {x} is called a", f"What is a young {x} called?") for x in YOUNG]
    found += [(f"The day after {x} is", f"Which day comes after {x}?") for x in DAYS]
    found += [(f"The month after {x} is", f"Which month comes after {x}?") for x in MONTHS]
    found += [(f"The colour of {x} is", f"What colour is {x}?") for x in COLOURS]
    found += [(f"The continent that {x} is in is", f"Which continent is {x} in?") for x in CONTINENTS]
    found += [(f"{a} plus {b} equals", f"What is {a} plus {b}?") for a, b in SUMS]
    assert len(found) == len(set(found)) == 200
    return found


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def load(model: str, kind: str, device: str) -> Loaded:
    quantize = None if kind == "plain" else kind
    return heedful.load(model, device=device, dtype=torch.float32, quantize=quantize)  # type: ignore[arg-type]


def answers(loaded: Loaded, n: int) -> list[list[tuple[int, ...]]]:
    """The greedy answers to n of the questions, evenly chosen, as token ids, of texts to continue and in a chat."""
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    texts, chats = zip(*questions()[:: 200 // n], strict=True)
    found = [loaded.complete(texts, **ask), loaded.complete(chats, chat=True, **ask)]
    return [[tuple(result.choices[0].tokens) for result in results] for results in found]


def as_gguf(model: nn.Module, kind: str, *, inputs: bool) -> nn.Module:
    """Round and restore the weights of the blocks as llama.cpp stores them, and the inputs of their products too."""
    import gguf

    of_weights, of_inputs = (gguf.GGMLQuantizationType[name] for name in (kind, "Q8_0"))

    def rounded(x: Tensor, how: gguf.GGMLQuantizationType) -> Tensor:
        written = gguf.quants.quantize(np.ascontiguousarray(x.numpy()), how)
        return torch.from_numpy(gguf.quants.dequantize(written, how))

    for block in (m for m in model.modules() if isinstance(m, Block)):
        for linear in (m for m in block.modules() if isinstance(m, nn.Linear)):
            linear.weight.data = rounded(linear.weight.data, of_weights)
            if inputs:
                linear.register_forward_pre_hook(lambda _, given: (rounded(given[0], of_inputs),))
    return model


class WindowedEvaluation:
    """Log-probabilities at each position of a text, in windows."""

    def __init__(self, tokens: Tensor, window: int, stride: int) -> None:
        self.tokens, self.parts = tokens, list(sliding_windows(len(tokens), window, stride))

    def __call__(self, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        found = [logits_of(self.tokens[None, p.begin : p.end])[0, -p.n_new :].float() for p in self.parts]
        return torch.cat(found).log_softmax(-1)


class Report:
    """Prints one row after the other; the first is what the others are compared with."""

    def __init__(self, targets: Tensor, n_bytes_of_text: int) -> None:
        self.targets, self.n_bytes_of_text = targets, n_bytes_of_text
        self.plain: tuple[Tensor, list[list[tuple[int, ...]]]] | None = None
        print(
            f"{'weights':14} {'MB':>7} {'perplexity':>11} {'bits/byte':>10} {'against plain':>14} {'KL':>8} {'same':>7}"
            f" {'first':>7} {'all':>7} {'chat: first':>12} {'all':>7}"
        )

    def __call__(self, kind: str, size: float, log_probs: Tensor, given: list[list[tuple[int, ...]]] | None) -> None:
        self.plain = self.plain or (log_probs, given or [])
        plain, expected = self.plain
        losses = [F.nll_loss(of, self.targets).item() for of in (log_probs, plain)]
        divergence = F.kl_div(log_probs, plain, log_target=True, reduction="batchmean").item()
        same = (log_probs.argmax(-1) == plain.argmax(-1)).float().mean().item()
        per_byte = losses[0] * len(self.targets) / math.log(2) / self.n_bytes_of_text
        shares = ""
        for ours, theirs in zip(given or [], expected, strict=False):
            pairs = list(zip(ours, theirs, strict=True))
            first, whole = (sum(a[:n] == b[:n] for a, b in pairs) / len(pairs) for n in (1, 8))
            shares += f" {first:{7 if not shares else 12}.1%} {whole:7.1%}"
        print(
            f"{kind:14} {size / 1e6:7.1f} {math.exp(losses[0]):11.4f} {per_byte:10.5f} "
            f"{math.exp(losses[0] - losses[1]) - 1:14.3%} {1000 * divergence:8.3f} {same:7.2%}{shares}",
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="what heedful.load takes: a causal model with a tokenizer")
    parser.add_argument("--text", required=True, type=Path, help="a text file, maybe .gz")
    parser.add_argument("--tokens", type=int, default=8_000, help="how many of its first tokens to score")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--questions", type=int, default=200, choices=(200, 100, 50, 20))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=get_args(Precision))
    parser.add_argument("--no-references", action="store_true", help="only packed models, compared with the first")
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
    report = Report(ids[1:], len(text.encode()))

    def report_loaded(kind: str, loaded: Loaded) -> None:
        log_probs = evaluation(lambda ids: loaded.model(Batch(ids)).logits)
        report(kind, n_bytes(loaded.model), log_probs, answers(loaded, arguments.questions))

    if not arguments.no_references:
        report_loaded("plain", plain)
        with tempfile.TemporaryDirectory() as folder:
            plain.save(folder)
            from transformers import AutoModelForCausalLM

            theirs = AutoModelForCausalLM.from_pretrained(folder).eval().to(arguments.device)
            size = sum(p.nbytes for p in theirs.parameters())
            report("transformers", size, evaluation(lambda ids: theirs(ids, use_cache=False).logits), None)
            del theirs
    del plain
    for kind in arguments.precision:
        report_loaded(kind, load(arguments.model, kind, arguments.device))
    for kind in () if arguments.no_references else ("Q8_0", "Q4_1"):
        for inputs in (False, True):
            loaded = load(arguments.model, "plain", arguments.device)
            as_gguf(loaded.model, kind, inputs=inputs)
            log_probs = evaluation(lambda ids, loaded=loaded: loaded.model(Batch(ids)).logits)
            report(f"{kind}{' and x' if inputs else ''}", n_bytes(loaded.model), log_probs, None)


if __name__ == "__main__":
    main()
