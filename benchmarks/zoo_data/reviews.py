"""Sentences of film reviews that praise or blame, written by a language model, for the recipes sentiment-lora and
t5-tasks.

    python benchmarks/zoo_data/reviews.py SmolLM2-135M-Instruct.Q4_1.gguf --out DATA/praise [--minutes 4] [--seed 0]

SmolLM2-135M-Instruct (Apache-2.0) goes on with a list of critics' sentences of one opinion, and two times of three with
an opening that has words of reviews.toml drawn into it; the opinion is the label. A small model does not always keep to
it. So it is asked the other way round: how likely is the sentence in a review by someone who loved the film, and in one
by someone who hated it? It is kept if that agrees with its label by some nats (MARGINS), counted from the median of the
batch (a noisy channel, Min et al. 2022). Those that speak of reviews, begin as many others do or are no English are
dropped.

Writes train.tsv, validation.tsv and test.tsv: a sentence and 1 (praise) or 0 (blame), as many of each. Sentences
with the same three first words are in the same part; one beginning in 50 is for validation, one for test.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import tomllib
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from batched import BatchedSampler
from chats import PLAIN, on_gpu

import heedful

SIDES = ("negative", "positive")  # by their labels
LOVED = "A sentence from a rave review, by someone who loved the film:\n"
HATED = "A sentence from a scathing review, by someone who hated the film:\n"
FEELINGS = (("hated", "were bored by", "warn you of"), ("loved", "were moved by", "recommend"))
MARGINS = (1.5, 0.5)  # nats, for sentences without and with an opening of ours
LONGEST, LONGEST_PROMPT = 48, 160  # tokens
TEMPERATURE, MIN_P = 0.9, 0.08
N_SHOWN = 4  # sentences before the one to be written
PLAIN_STARTS = 0.33  # of the sentences have no opening
MOST_ALIKE = 20  # sentences with the same first four words, of a thousand
ITS_TASK = re.compile(r"\b(reviews?|sentences?|critics?|http|rating|stars)\b|[#|\[\]{}<>]|\d{3}", re.IGNORECASE)


class ReviewPrompts:
    """Draws what the model goes on with: critics of one opinion, and how the next one begins."""

    def __init__(self, seed: int) -> None:
        spec = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
        self.words, self.openings, self.critics = spec["words"], spec["openings"]["praise_or_blame"], spec["critics"]
        self.random = random.Random(seed)

    def draw(self) -> tuple[str, str, int]:
        """A prompt, the opening at its end, and the label."""
        label = self.random.randrange(2)
        shown = "".join(f"- {text}\n" for text in self.random.sample(self.critics[SIDES[label]], N_SHOWN))
        kind, feeling = self.random.choice(self.words["kind"]), self.random.choice(FEELINGS[label])
        opening = self.opening(label)
        begin = f"- {opening}" if opening else "-"
        return (
            f"What critics wrote about films that they {feeling}. Now about a {kind}.\n\n{shown}{begin}",
            opening,
            label,
        )

    def opening(self, label: int) -> str:
        """How a sentence begins, with words of its label's side; empty for some."""
        if self.random.random() < PLAIN_STARTS:
            return ""
        own, others = ("praise", "blame") if label else ("blame", "praise")
        lists = self.words | {"good": self.words[own], "bad": self.words[others]}
        adjectives = {name: [word for word in lists[name] if " " not in word] for name in ("good", "bad")}

        def word(found: re.Match[str]) -> str:
            name = found[1].lower()
            last = found.end() == len(found.string) and found.string[: found.start()].endswith(" is ")
            text = self.random.choice((lists if last else lists | adjectives)[name])  # "is a waste of time"
            return text[0].upper() + text[1:] if found[1] != name else text

        text = re.sub(r"\{A\} ", "A ", self.random.choice(self.openings))
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", re.sub(r"\{(\w+)\}", word, text))


def tidy(text: str) -> str:
    """A sentence without quotation marks around it; empty if it is not one sentence that ended."""
    text = " ".join(text.translate(PLAIN).split()).strip('"*-').strip()
    if not text.isascii() or ITS_TASK.search(text) or not 4 <= len(text.split()) <= 40:
        return ""
    first = re.split(r"(?<=[a-z][.!?]) (?=[A-Z])", text)[0]
    return first if len(first.split()) >= 4 else ""


@torch.inference_mode()
def log_likelihoods(loaded: heedful.Loaded, begin: str, texts: list[str]) -> torch.Tensor:
    """The log-probability (N,) of each text after a beginning."""
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    device = next(model.parameters()).device
    first = tokenizer.encode(begin)
    found = []
    for i in range(0, len(texts), 512):
        rows = [first + ids for ids in tokenizer.encode_batch(texts[i : i + 512])]
        n = max(map(len, rows))
        ids = torch.tensor([row + [0] * (n - len(row)) for row in rows], device=device)
        logits = model(ids).logits[:, len(first) - 1 : -1].float()
        picked = logits.log_softmax(-1).gather(2, ids[:, len(first) :, None])[..., 0]  # (B, T)
        lengths = torch.tensor([len(row) - len(first) for row in rows], device=device)
        inside = torch.arange(picked.shape[1], device=device) < lengths[:, None]
        found.append((picked * inside).sum(1))
    return torch.cat(found)


def part_of(text: str) -> str:
    """Where a sentence goes: all with the same first three words to the same part."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(" ".join(text.lower().split()[:3]).encode()) % 50, "train")


class Writer:
    """Lets the model write sentences and keeps those that agree with their labels."""

    def __init__(self, model: str, n_cached: int, seed: int) -> None:
        self.loaded = heedful.load(model, **on_gpu())
        torch.manual_seed(seed)
        assert self.loaded.tokenizer is not None
        self.tokenizer = self.loaded.tokenizer
        (end,) = self.tokenizer.encode("\n")
        self.sampler = BatchedSampler(self.loaded.model, end, n_cached, min_p=MIN_P, longest=LONGEST)  # type: ignore[arg-type]
        self.prompts = ReviewPrompts(seed)
        self.begins: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.dropped: Counter[str] = Counter()
        self.n_asked = 0

    def ask(self, n_rows: int) -> list[tuple[str, int]]:
        """Sentences that were kept, and their labels."""
        drawn = [self.prompts.draw() for _ in range(n_rows)]
        ids = self.tokenizer.encode_batch([prompt for prompt, _, _ in drawn])
        drawn = [row for row, prompt in zip(drawn, ids, strict=True) if len(prompt) <= LONGEST_PROMPT]
        ids = [prompt for prompt in ids if len(prompt) <= LONGEST_PROMPT]
        answers = self.sampler.sample(ids, [TEMPERATURE] * len(ids), LONGEST_PROMPT)
        self.n_asked += len(ids)
        ended = [answer[-1:] == [self.sampler.end] for answer in answers]
        written = self.tokenizer.backend.decode_batch(answers)
        texts = [tidy(row[1] + text) if end else "" for row, text, end in zip(drawn, written, ended, strict=True)]
        found = [(text, row) for row, text in zip(drawn, texts, strict=True) if self.is_new(text)]
        texts = [text for text, _ in found]
        loved = log_likelihoods(self.loaded, LOVED, texts) - log_likelihoods(self.loaded, HATED, texts)
        loved = loved - loved.median()  # half of them praise; the model itself is kinder
        agreed = []
        for (text, (_, opening, label)), gain in zip(found, loved.tolist(), strict=True):
            if (gain if label else -gain) < MARGINS[bool(opening)]:
                self.dropped["does not agree with its label"] += 1
            else:
                agreed.append((text, label))
        return agreed

    def is_new(self, text: str) -> bool:
        begin = " ".join(text.split()[:4])
        reason = ""
        if not text:
            reason = "no single sentence"
        elif text.lower() in self.seen or self.begins[begin] > MOST_ALIKE + len(self.seen) * MOST_ALIKE // 1000:
            reason = "begins as others"
        self.seen.add(text.lower())
        self.begins[begin] += 1
        self.dropped[reason] += bool(reason)
        return not reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cache", type=int, default=1_000_000, help="tokens of the KV cache, 23 KB each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    writer = Writer(options.model, options.cache, options.seed)
    found: dict[str, list[list[str]]] = {part: [[], []] for part in ("train", "validation", "test")}
    while time.perf_counter() - begin < 60 * options.minutes:
        for text, label in writer.ask(options.rows):
            found[part_of(text)][label].append(text)
        n = {part: [len(texts) for texts in sides] for part, sides in found.items()}
        print(f"{time.perf_counter() - begin:.0f} s: {writer.n_asked:,} asked, {n}; {dict(writer.dropped)}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for part, sides in found.items():
        rows = [(text, label) for label, texts in enumerate(sides) for text in islice(texts, min(map(len, sides)))]
        random.Random(part).shuffle(rows)
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (options.out / f"{part}.tsv").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
