"""How good a small chat model is, beside the model that taught it and beside one that writes stories alone.

    python benchmarks/chat.py chats.val.jsonl [--model chat] [--teacher smollm2-135m-instruct] [--conversations 200]
    python benchmarks/chat.py --stories stories15m [--model chat]

The first prints the bits per character of the answers of held-out conversations (zoo_data/chats.py holds one request in
50 apart), and for 50 new requests, "Write a short story about a ANIMAL and a OBJECT.", how many answers end by
themselves within 300 tokens, and in how many both words occur. The second prints what both models
make of five openings.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import tomllib
from pathlib import Path

import torch

import heedful
from heedful.data.chats import Chats, read_chats
from heedful.loaded import Loaded
from heedful.train.distributed import Processes
from heedful.train.objectives import causal
from heedful.train.trainer import LossModule, validate

N_REQUESTS, LONGEST, TEMPERATURE = 50, 300, 0.8
OPENINGS = (
    "Once upon a time, there was a little fox who was afraid of the dark.",
    "One day, Lily found a golden key in the garden.",
    "Once upon a time, an old man lived in a lighthouse with his cat.",
    "Tom and Anna wanted to build a boat.",
    "There was once a dragon who could not fly.",
)


def answer_loss(loaded: Loaded, data: Chats) -> float:
    """The mean loss of the assistant's tokens."""
    cpu = torch.device("cpu")
    module = LossModule(loaded.model, causal, "float32", cpu)
    return validate(module, data, batch_size=8, processes=Processes(cpu)).loss


def new_requests(n: int) -> list[tuple[str, str, str]]:
    """Requests for stories, each with the two words that it asks for."""
    lists = tomllib.loads((Path(__file__).parent / "zoo_data" / "chats.toml").read_text(encoding="utf-8"))["lists"]
    draw = random.Random(1)
    drawn = [(draw.choice(lists["animal"]), draw.choice(lists["object"])) for _ in range(n)]
    return [
        (re.sub(r"\b(a) (?=[aeiou])", r"\1n ", f"Write a short story about a {animal} and a {thing}."), animal, thing)
        for animal, thing in drawn
    ]


def follow_requests(loaded: Loaded) -> tuple[float, float]:
    """The shares of answers that end, and that have both words."""
    asked = new_requests(N_REQUESTS)
    options = {"max_tokens": LONGEST, "temperature": TEMPERATURE, "seed": 0}
    results = loaded.complete([request for request, *_ in asked], chat=True, **options)
    choices = [result.choices[0] for result in results]
    ended = sum(choice.finish_reason == "stop" for choice in choices)
    both = sum(
        all(word in choice.text.lower() for word in words) for choice, (_, *words) in zip(choices, asked, strict=True)
    )
    return ended / N_REQUESTS, both / N_REQUESTS


def compare(model: Loaded, teacher: Loaded, path: Path, n: int) -> None:
    """Print the scores of both. The teacher reads the same text by its own tokens: perplexities are per character of
    its answers, in bits, since the tokens differ."""
    assert model.tokenizer is not None and teacher.tokenizer is not None
    teacher.tokenizer.chat_template = model.tokenizer.chat_template
    for loaded in (model, teacher):
        assert loaded.tokenizer is not None
        tokens = read_chats(path, loaded.tokenizer)
        tokens = [tokens[i] for i in random.Random(0).sample(range(len(tokens)), min(n, len(tokens)))]
        data = Chats(tokens, model.model.context_length or 1024)
        mean = answer_loss(loaded, data)
        n_characters = sum(
            len(loaded.tokenizer.decode([i for i, own in zip(*pair, strict=True) if own])) for pair in tokens
        )
        bits = mean * data.n_learned / n_characters / math.log(2)
        ended, both = follow_requests(loaded)
        print(
            f"{loaded.name}: {bits:.3f} bits per character, perplexity {math.exp(mean):.2f} of {data.n_learned:,} "
            f"tokens in {len(tokens)} chats; of {N_REQUESTS} stories {ended:.0%} end, {both:.0%} have both words",
            flush=True,
        )


def side_by_side(model: Loaded, stories: Loaded) -> None:
    """Print continuations of the same openings."""
    for seed, opening in enumerate(OPENINGS):
        options = {"max_tokens": 200, "temperature": TEMPERATURE, "seed": seed}
        print(f"\n> {opening}\n\n{stories.name}:\n{opening}{stories.generate(opening, **options)}")
        asked = f"Continue this story: {opening}"
        print(f"\n{model.name}:\n{model.generate(asked, chat=True, **options)}", flush=True)


def main() -> None:
    """Compare with the teacher, or with a model of stories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="held-out conversations, .jsonl")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--teacher", default="smollm2-135m-instruct")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--stories", metavar="MODEL", help="a model that continues stories")
    options = parser.parse_args()
    model = heedful.load(options.model)
    if options.data is not None:
        compare(model, heedful.load(options.teacher), options.data, options.conversations)
    if options.stories:
        side_by_side(model, heedful.load(options.stories))


if __name__ == "__main__":
    main()
