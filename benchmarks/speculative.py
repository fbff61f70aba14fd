"""Speculative decoding against plain decoding, in turns in one run: the same tokens, fewer steps of the model.

    python benchmarks/speculative.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/speculative.py --model BIG --draft SMALL      a draft model with the same vocabulary too

Two tasks, greedy: "edit" repeats a paragraph with one change, so that the answer can be looked up in the prompt;
"write" asks for a new text, where there is little to look up. Times are of a whole answer, the reading of the prompt
among it; each is the median of the repetitions. "same" says whether the tokens equal those of plain decoding.
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

Answer = tuple[list[int], Statistics | None]


@torch.inference_mode()
def plain(model: object, prompt: list[int], n: int, stop: frozenset[int]) -> list[int]:
    """One step per token, and nothing else."""
    logits, state = model.start(Batch(torch.tensor([prompt])))
    said: list[int] = []
    while len(said) < n:
        token = int(logits.argmax())
        if token in stop:
            break
        said.append(token)
        if len(said) < n:
            logits = model.step(torch.tensor([token]), state)
    return said


def contenders(args: argparse.Namespace, model: object, stop: frozenset[int]) -> dict[str, Callable]:
    def speculative(drafter: Drafter) -> Callable[[list[int]], Answer]:
        def speak(prompt: list[int]) -> Answer:
            batch = Batch(torch.tensor([prompt]))
            rows, counts = speculate(model, batch, drafter=drafter, max_tokens=args.tokens, stop_ids=stop)
            return rows[0], counts

        return speak

    found = {
        "plain": lambda prompt: (plain(model, prompt, args.tokens, stop), None),
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
    speakers = contenders(args, loaded.model, frozenset(loaded.eos_ids))
    print(f"{loaded.name}, fp32, {args.threads} threads, {args.tokens} tokens, median of {args.repeat}")
    print(f"{'task':6} {'':14} {'tokens':>6} {'tokens/s':>8} {'gain':>6} {'per step':>8} {'accepted':>10}  same")
    for task, text in TASKS.items():
        prompt = loaded.tokenizer.chat([{"role": "user", "content": text}])
        times: dict[str, list[float]] = {name: [] for name in speakers}
        answers: dict[str, Answer] = {}
        for turn in range(args.repeat + 1):
            for name, speak in speakers.items():
                began = time.perf_counter()
                answers[name] = speak(prompt)
                if turn:  # the first warms up
                    times[name].append(time.perf_counter() - began)
        rates = {name: len(answers[name][0]) / statistics.median(times[name]) for name in speakers}
        for name, (said, counts) in answers.items():
            per_step = "1.00" if counts is None else f"{counts.tokens_per_step:.2f}"
            accepted = "" if counts is None else f"{counts.accepted}/{counts.proposed}"
            same = "yes" if said == answers["plain"][0] else "NO"
            print(
                f"{task:6} {name:14} {len(said):6} {rates[name]:8.1f} {rates[name] / rates['plain']:5.2f}x "
                f"{per_step:>8} {accepted:>10}  {same}"
            )
        print(f"       {loaded.tokenizer.decode(answers['plain'][0])[:200]!r}")


if __name__ == "__main__":
    main()
