"""Speculative decoding compared with plain greedy decoding: speed and steps, for the same tokens.

    python benchmarks/speculative.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/speculative.py --model BIG --draft SMALL      a draft model with the same vocabulary too

Two tasks, greedy: "edit" repeats a paragraph with one change, which suits prompt lookup; "write" asks for a new text,
which does not. Times are of a whole completion, prefill included, and medians of the repetitions, which alternate
between the methods. "same" tells whether the tokens are those of plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import heedful
from heedful.generate.draft import Drafter, DraftModel, PromptLookup
from heedful.generate.speculative import Statistics, speculate
from heedful.models.base import Batch

PARAGRAPH = (
    "The old lighthouse on the northern cape was built in 1871 by a crew of forty men, most of whom had come from the "
    "fishing villages along the coast. For more than ninety years its lamp was lit every evening by the keeper, who "
    "lived with his family in the small stone house beside the tower. When the lamp was made automatic in 1963 the "
    "last keeper, Henrik Dahl, moved to the harbour town, but he walked back to the cape every Sunday to see whether "
    "the glass was clean."
)
TASKS = {
    "edit": f"Repeat this paragraph word by word, but change the name Henrik Dahl to Anna Berg:\n\n{PARAGRAPH}",
    "write": "Write a short story about a lighthouse keeper and his cat.",
}

Completion = tuple[list[int], Statistics | None]


@torch.inference_mode()
def greedy_decode(model: object, prompt: list[int], n: int, stop: frozenset[int]) -> list[int]:
    """Plain greedy decoding, one step per token."""
    logits, state = model.start(Batch(torch.tensor([prompt])))
    tokens: list[int] = []
    while len(tokens) < n:
        token = int(logits.argmax())
        if token in stop:
            break
        tokens.append(token)
        if len(tokens) < n:
            logits = model.step(torch.tensor([token]), state)
    return tokens


def decoding_methods(args: argparse.Namespace, model: object, stop: frozenset[int]) -> dict[str, Callable]:
    def speculative(drafter: Drafter) -> Callable[[list[int]], Completion]:
        def decode(prompt: list[int]) -> Completion:
            batch = Batch(torch.tensor([prompt]))
            rows, counts = speculate(model, batch, drafter=drafter, max_tokens=args.tokens, stop_ids=stop)
            return rows[0], counts

        return decode

    found = {
        "plain": lambda prompt: (greedy_decode(model, prompt, args.tokens, stop), None),
        "prompt lookup": speculative(PromptLookup()),
    }
    if args.draft:
        found["draft model"] = speculative(DraftModel(heedful.load(args.draft, dtype=torch.float32).model))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a chat model: folder, GGUF file or name")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = heedful.load(args.model, dtype=torch.float32)
    methods = decoding_methods(args, loaded.model, frozenset(loaded.eos_ids))
    print(f"{loaded.name}, fp32, {args.threads} threads, {args.tokens} tokens, median of {args.repeat}")
    print(f"{'task':6} {'':14} {'tokens':>6} {'tokens/s':>8} {'gain':>6} {'per step':>8} {'accepted':>10}  same")
    for task, text in TASKS.items():
        prompt = loaded.tokenizer.chat([{"role": "user", "content": text}])
        times: dict[str, list[float]] = {name: [] for name in methods}
        answers: dict[str, Completion] = {}
        for turn in range(args.repeat + 1):
            for name, decode in methods.items():
                began = time.perf_counter()
                answers[name] = decode(prompt)
                if turn:  # the first is a warm-up
                    times[name].append(time.perf_counter() - began)
        rates = {name: len(answers[name][0]) / statistics.median(times[name]) for name in methods}
        for name, (tokens, counts) in answers.items():
            per_step = "1.00" if counts is None else f"{counts.tokens_per_step:.2f}"
            accepted = "" if counts is None else f"{counts.accepted}/{counts.proposed}"
            same = "yes" if tokens == answers["plain"][0] else "NO"
            print(
                f"{task:6} {name:14} {len(tokens):6} {rates[name]:8.1f} {rates[name] / rates['plain']:5.2f}x "
                f"{per_step:>8} {accepted:>10}  {same}"
            )
        print(f"       {loaded.tokenizer.decode(answers['plain'][0])[:200]!r}")


if __name__ == "__main__":
    main()
