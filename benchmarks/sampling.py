"""Time to sample one token per row from logits, compared with transformers' logits processors and multinomial.

    OMP_NUM_THREADS=2 python benchmarks/sampling.py [--runs 15] [--vocabulary 50257]

The synthetic logits resemble a language model's: Zipf-like in random order, 64 rows of different sharpness with a mean
entropy of 3 nats, so that the top-p set for 0.95 has from a few to some thousand tokens (256 or fewer in 2 of 3 rows).
Each run takes the next rows, and both programs get the same float32 logits and return a list of ids. With penalties
each row has 200 previous tokens. `--cpu` measures CPU time instead of wall-clock time, for a machine under load; it is
meaningful only with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from heedful.generate.request import Sampling
from heedful.generate.sampling import Sampler, sample

SETTINGS = {
    "greedy": Sampling(temperature=0),
    "temperature 0.8": Sampling(temperature=0.8),
    "top-k 50": Sampling(top_k=50),
    "top-p 0.95": Sampling(top_p=0.95),
    "min-p 0.05": Sampling(min_p=0.05),
    "typical 0.9": Sampling(typical_p=0.9),
    "0.7, top-k 50, top-p 0.9": Sampling(temperature=0.7, top_k=50, top_p=0.9),
    "repetition 1.2, top-p 0.95": Sampling(repetition_penalty=1.2, top_p=0.95),
}


def synthetic_logits(n_rows: int, n_tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    slopes = torch.linspace(1.0, 2.5, n_rows)[torch.randperm(n_rows, generator=random)]
    tail = -slopes[:, None] * torch.arange(1, n_tokens + 1).log()
    logits = tail + 0.5 * torch.randn(n_rows, n_tokens, generator=random) - 50
    order = torch.stack([torch.randperm(n_tokens, generator=random) for _ in range(n_rows)])
    return logits.gather(1, order)


def logits_processors(how: Sampling) -> list[Callable[[Tensor, Tensor], Tensor]]:
    chain: list[Callable[[Tensor, Tensor], Tensor]] = []
    if how.repetition_penalty != 1:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    if how.temperature not in (0, 1):
        chain.append(theirs.TemperatureLogitsWarper(how.temperature))
    if how.top_k is not None:
        chain.append(theirs.TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        chain.append(theirs.TopPLogitsWarper(how.top_p))
    if how.min_p > 0:
        chain.append(theirs.MinPLogitsWarper(how.min_p))
    if how.typical_p < 1:
        chain.append(theirs.TypicalLogitsWarper(how.typical_p))
    return chain


def transformers_sampler(how: Sampling, seen: Tensor) -> Callable[[Tensor], list[int]]:
    chain = logits_processors(how)

    def run(logits: Tensor) -> list[int]:
        for process in chain:
            logits = process(seen, logits)
        if how.temperature == 0:
            return logits.argmax(-1).tolist()
        return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()

    return run


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    print(f"V = {arguments.vocabulary}, {torch.get_num_threads()} threads, median of {arguments.runs} runs, ms")
    print(f"{'':28} {'rows':>4} {'heedful':>9} {'transformers':>13} {'ratio':>6}")
    pool = synthetic_logits(64, arguments.vocabulary)
    for name, how in SETTINGS.items():
        for n_rows in (1, 8, 64):
            seen = torch.randint(arguments.vocabulary, (n_rows, 200))
            samplers = [Sampler(how, row) for row in seen.tolist()]
            run = transformers_sampler(how, seen)
            ours, others = [], []
            for turn in range(arguments.runs + 1):  # the first is a warm-up
                logits = pool.roll(-turn * n_rows, 0)[:n_rows].clone()
                begin = clock()
                sample(logits, samplers)
                middle = clock()
                run(logits)
                end = clock()
                if turn:
                    ours.append(1e3 * (middle - begin))
                    others.append(1e3 * (end - middle))
            mine, other = statistics.median(ours), statistics.median(others)
            print(f"{name:28} {n_rows:4} {mine:9.3f} {other:13.3f} {other / mine:6.1f}")


if __name__ == "__main__":
    main()
