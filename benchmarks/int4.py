"""What int4 loses, rounded to the nearest and by GPTQ, on several models.

    python benchmarks/int4.py stories15m=own shakespeare=SHAKESPEARE/val.txt,SHAKESPEARE/train.txt tiny-books=val.txt.xz

Each argument is MODEL=TEXT or MODEL=TEXT,CALIBRATION: the text that is scored and the one that GPTQ is calibrated on
(the model's own if there is none); both are files (maybe .gz or .xz). "own" as the text to score stands for what the
model itself writes, with another seed than for calibration.

Each row is the model in float32, packed in the row's precision by `heedful.load(..., quantize=...)`; "int4, GPTQ" was
exported with --calibrate-on and loaded again. Perplexity is per token; KL is the divergence from the plain model's
predictions in thousandths of a nat; "same" is the share of positions with its argmax.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful
from heedful.generate.calibrate_int4 import N_TOKENS, calibrate_int4, sample_text
from heedful.kernels.accelerate import n_bytes
from heedful.loaded import Loaded
from heedful.models.base import Batch
from quantization import WindowedEvaluation

OPEN = {".gz": gzip.open, ".xz": lzma.open}


def read(path: str, n: int) -> str:
    with OPEN.get(Path(path).suffix, open)(path, "rt", encoding="utf-8") as file:  # type: ignore[operator]
        return str(file.read(n))


def log_probs(loaded: Loaded, evaluation: WindowedEvaluation) -> Tensor:
    with torch.inference_mode():
        return evaluation(lambda ids: loaded.model(Batch(ids)).logits)


def compare(model: str, text: str, calibration: str | None, n_tokens: int, n_calibration: int) -> None:
    """Print a model's rows."""
    plain = heedful.load(model, dtype=torch.float32)
    assert plain.tokenizer is not None, "a model with a tokenizer is needed"
    if text == "own":
        ids = sample_text(plain, n_tokens + 1, seed=1000)
    else:
        ids = plain.tokenizer.encode(read(text, 12 * n_tokens))[: n_tokens + 1]
    window = min(plain.model.context_length or 1024, 1024)
    evaluation = WindowedEvaluation(torch.tensor(ids), window, window // 2)
    expected, targets = log_probs(plain, evaluation), torch.tensor(ids[1:])
    best = F.nll_loss(expected, targets).item()

    def row(name: str, loaded: Loaded, more: str = "") -> None:
        found = log_probs(loaded, evaluation)
        loss = F.nll_loss(found, targets).item()
        divergence = F.kl_div(found, expected, log_target=True, reduction="batchmean").item()
        same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
        print(
            f"{plain.name:24} {name:14} {n_bytes(loaded.model) / 1e6:7.1f} {math.exp(loss):10.4f} "
            f"{math.exp(loss - best) - 1:9.3%} {1000 * divergence:8.3f} {same:7.2%} {more}",
            flush=True,
        )

    row("plain", plain)
    row("int8", heedful.load(model, dtype=torch.float32, quantize="int8"))
    row("int4, nearest", heedful.load(model, dtype=torch.float32, quantize="int4"))
    begin = time.perf_counter()
    calibrate_int4(
        plain, None if calibration is None else read(calibration, 12 * n_calibration), n_tokens=n_calibration
    )
    seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        plain.save(Path(folder) / "int4", quantize="int4")
        packed = heedful.load(Path(folder) / "int4", quantize="int4")
    row("int4, GPTQ", packed, f"calibrated in {seconds:.0f} s on {calibration or 'its own text'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", metavar="MODEL=TEXT[,CALIBRATION]")
    parser.add_argument("--tokens", type=int, default=8_000, help="how many of the text's first tokens to score")
    parser.add_argument("--calibration-tokens", type=int, default=N_TOKENS)
    arguments = parser.parse_args()
    print(f"{'model':24} {'weights':14} {'MB':>7} {'perplexity':>10} {'lost':>9} {'KL':>8} {'same':>7}")
    for given in arguments.models:
        model, _, texts = given.partition("=")
        text, _, calibration = texts.partition(",")
        compare(model, text, calibration or None, arguments.tokens, arguments.calibration_tokens)


if __name__ == "__main__":
    main()
