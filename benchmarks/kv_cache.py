"""Memory, accuracy and speed of a KV cache in 8 bits, beside the same model with keys and values in float32.

    python benchmarks/kv_cache.py --model smollm2-135m-instruct --text wikitext-2/valid.raw.gz

Perplexity is that of `heedful eval MODEL perplexity TEXT --kv-cache int8`, in windows without overlap. Its change has a
standard error: that of the mean difference of the log-probabilities of tokens. "ms" is a decode step of one row after
so many tokens, the median of all rounds; both caches decode in turn.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful
from heedful.loaded import Loaded
from heedful.models.base import Batch, DecoderModel
from heedful.weights.describe import format_bytes

KINDS = (None, "int8")
OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def read(path: Path) -> str:
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        return str(file.read().decode("utf-8"))


def decoder(loaded: Loaded) -> DecoderModel:
    assert isinstance(loaded.model, DecoderModel), "a model that continues a text is needed"
    return loaded.model


def losses(model: DecoderModel, ids: Tensor, window: int) -> Tensor:
    """-log p of every token but the first of each window."""
    found = []
    for part in ids.split(window):
        hidden = model.hidden(Batch(part[None, :-1]), model.scoring_state(1))[0]
        found.append(F.cross_entropy(model.head(hidden).float(), part[1:], reduction="none"))
    return torch.cat(found).double()


def step_times(models: list[DecoderModel], n: int, rounds: int) -> list[list[float]]:
    """Milliseconds of decode steps after n tokens, of the models in turn."""
    ids = torch.randint(10, 200, (1, n), generator=torch.Generator().manual_seed(0))
    states = [model.start(Batch(ids), capacity=n + 16 * rounds)[1] for model in models]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, state, found in zip(models, states, times, strict=True):
            for i in range(8):
                begin = time.perf_counter()
                model.step(ids[:, i], state)
                found.append(1000 * (time.perf_counter() - begin))
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="what heedful.load takes: a decoder with a tokenizer")
    parser.add_argument("--text", type=Path, help="a text file, maybe .gz or .xz; none: no perplexity")
    parser.add_argument("--tokens", type=int, default=32_768, help="how many of its first tokens to score")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--quantize", default="float32", help="the weights of both (default float32)")
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 2048, 8192], help="tokens before the steps")
    parser.add_argument("--rounds", type=int, default=5, help="of 8 decode steps each")
    options = parser.parse_args()

    loaded = [heedful.load(options.model, quantize=options.quantize, kv_cache=kind) for kind in KINDS]
    models = [decoder(one) for one in loaded]
    sizes = [models[0].kv_bytes_per_token(kind) for kind in KINDS]
    print(f"{loaded[0].name}, weights {options.quantize}, {torch.get_num_threads()} threads")
    print(f"KV cache per token: float32 {format_bytes(sizes[0])}, int8 {format_bytes(sizes[1])} ", end="")
    print(f"({sizes[1] / sizes[0]:.3f} of float32, {2 * sizes[1] / sizes[0]:.3f} of 16 bits)", flush=True)
    if options.text is not None:
        tokenizer = loaded[0].tokenizer
        assert tokenizer is not None, "a model with a tokenizer is needed"
        ids = torch.tensor(tokenizer.encode(read(options.text)[: 10 * options.tokens])[: options.tokens])
        window = min(options.window, models[0].context_length or options.window)
        exact, rounded = (losses(model, ids, window) for model in models)
        change = rounded - exact
        print(
            f"{options.text.name}, {len(exact)} tokens in windows of {window}: perplexity {exact.mean().exp():.4f}, "
            f"int8 {rounded.mean().exp():.4f}: {change.mean().expm1():+.4%} ± {change.std() / len(change) ** 0.5:.4%}",
            flush=True,
        )
    for n in options.contexts:
        if models[0].context_length is not None and n + 8 * options.rounds > models[0].context_length:
            continue
        plain, small = map(statistics.median, step_times(models, n, options.rounds))
        print(f"after {n:5} tokens: {plain:.2f} ms, int8 {small:.2f} ms: {plain / small:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
