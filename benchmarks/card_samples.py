"""Writes ten unedited samples into the cards of models that generate, in place of those that are there.

    python benchmarks/card_samples.py                  all that ship and generate
    python benchmarks/card_samples.py shakespeare      some
    python benchmarks/card_samples.py FOLDER           a folder with a README.md, as a model that will ship

Texts: seeds 0 to 9, temperature 0.8, 200 tokens, the same prompt. Chats: ten prompts, seed 0 to 9. Translations and
other tasks from text to text: ten sources written for this. Images: seeds 0 to 9, from the first pixel on, in
characters.
"""

from __future__ import annotations

import re
import sys

import torch

import heedful
from heedful.loaded import Loaded
from heedful.models.image_gpt import ImageGPT
from heedful.models.seq2seq import Seq2Seq
from heedful.weights.resolve import resolve_model, shipped_models

SEEDS = range(10)
N_TOKENS, TEMPERATURE = 200, 0.8
PROMPTS = {
    "shakespeare": "ROMEO:", "tiny": "The ", "books": "The old house", "tiny-books": "The old man", "sums": "12+34=",
}  # fmt: skip
USUAL_PROMPT = "Once upon a time"
CHATS = (
    "Write a short story about a dog who is afraid of the sea.", "What is the capital of France?",
    "Tell me a joke.", "Why is the sky blue?", "Write about a rainy day.", "Give me three names for a cat.",
    "What should I have for breakfast?", "Who are you?", "Write a poem of four lines about winter.",
    "Tom has three apples and eats one. How many are left?",
)  # fmt: skip
BOTH_WAYS = (
    "Ein Mann mit einem Hut steht vor einem Haus.", "Die Leute warten an einer Haltestelle auf den Bus.",
    "Eine Katze schläft auf dem Dach eines Autos.", "Ich habe heute keine Zeit.", "Guten Morgen, wie geht es dir?",
    "A little girl is eating an ice cream.", "An old man is selling fruit at the market.",
    "Where did you buy that?", "My brother works in a hospital.", "Anna and Paul are arguing about the tax return.",
)  # fmt: skip
TASKS = (
    "translate German to English: Ein Mann mit einem Hut steht vor einem Haus.",
    "translate German to English: Wir haben gestern im Garten gearbeitet.",
    "translate German to English: Warum schläft der Hund auf dem Sofa?",
    "sentiment: A warm and funny film that I would gladly see again.",
    "sentiment: The plot is dull and the actors look bored.",
    "question: Who is reading a book? context: A woman is reading a book in the garden. Two boys are playing soccer.",
    "question: Where is Anna waiting? context: Anna is waiting at the train station. Peter is buying a newspaper.",
    "question: What is the dog doing? context: The dog is sleeping under a table. A cat is sitting on the roof.",
    "correct: The old man waled slowly to his huose.",
    "correct: She opend the letter and red it with gret care.",
)
GREYS = " .:-=+*#%@"


def main(names: list[str]) -> None:
    for name in names or [name for name in shipped_models() if generates(heedful.load(name))]:
        folder = resolve_model(name)
        card = folder / "README.md"
        text = re.sub(r"\n## Samples\n.*", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
        card.write_text(f"{text.rstrip()}\n\n## Samples\n{samples(heedful.load(name))}", encoding="utf-8")
        print(f"{card}: written")


def generates(loaded: Loaded) -> bool:
    """Whether a model writes or draws something new; a recurrent model that reverses does not."""
    return isinstance(loaded.model, ImageGPT) or (
        "generate" in loaded.abilities and loaded.tokenizer is not None and not isinstance(loaded.model, Seq2Seq)
    )


def samples(loaded: Loaded) -> str:
    if isinstance(loaded.model, ImageGPT):
        shown = [picture(loaded, seed) for seed in SEEDS]
        return f"Seeds 0 to 9, temperature 1, unedited.\n{fenced(shown)}"
    if "translate" in loaded.abilities:
        sources = TASKS if loaded.model.family == "t5" else BOTH_WAYS
        shown = [f"{source}\n{loaded.translate(source)}" for source in sources]
        return f"Ten sentences of no data set, unedited.\n{fenced(shown)}"
    assert loaded.tokenizer is not None, "it generates text"
    options = {"max_tokens": N_TOKENS, "temperature": TEMPERATURE}
    told = f"{N_TOKENS} tokens at most, temperature {TEMPERATURE}, seeds 0 to 9, unedited."
    if loaded.tokenizer.chat_template is not None:
        shown = []
        for seed, prompt in zip(SEEDS, CHATS, strict=True):
            (result,) = loaded.complete([{"role": "user", "content": prompt}], chat=True, seed=seed, **options)
            shown.append(f"> {prompt}\n{result.choices[0].text.strip()}")
        return f"Ten prompts, {told}\n{fenced(shown)}"
    prompt = PROMPTS.get(loaded.name, USUAL_PROMPT)
    shown = [prompt + loaded.generate(prompt, seed=seed, **options) for seed in SEEDS]
    return f'The prompt "{prompt}", {told}\n{fenced(shown)}'


def fenced(texts: list[str]) -> str:
    """Each sample in a block of its own; a fence inside of one cannot end it."""
    return "".join(f"\n~~~~text\n{text.replace('~~~~', '~~~')}\n~~~~\n" for text in texts)


def picture(loaded: Loaded, seed: int) -> str:
    """A sampled image in characters, the lightest a space."""
    assert isinstance(loaded.model, ImageGPT)
    ids = loaded.complete_image(torch.zeros(0, dtype=torch.long), 1, seed=seed)[0]
    height, width = loaded.model.image_shape
    levels = loaded.model.config.vocab_size - 1
    rows = ids.view(height, width).tolist()
    return "\n".join("".join(GREYS[p * len(GREYS) // levels] * 2 for p in row).rstrip() for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
