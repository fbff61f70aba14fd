"""Conversations for a small chat model, written by larger ones and by one that knows stories.

    python benchmarks/zoo_data/chats.py SmolLM2-135M-Instruct.Q4_1.gguf --out chats.jsonl [--minutes 8] [--seed 0]
    python benchmarks/zoo_data/chats.py stories15m --stories --out chats.jsonl [--minutes 1]

SmolLM2-135M-Instruct (Apache-2.0) answers requests: half are templates of chats.toml with words drawn into them, half
it invents itself, since it continues the beginning of a user's turn too (Magpie, Xu et al. 2024); a third of the
conversations go on with a second question. stories15M (MIT, of llama2.c) continues openings with drawn words; requests
that fit them are the questions. Texts are sampled (temperature 0.8, answers to questions 0.4; min-p 0.05), thousands at
once (batched.py): needs a GPU to be quick. One that is too long is cut at the end of a paragraph or sentence. Only
those are kept that are English, do not repeat themselves or the beginnings of others, and do not say who the model is;
that is told by a few answers of chats.toml. Lines are {"messages": [...]}, as `heedful train MODEL chats.jsonl` reads
them; one request in 50, with all its conversations, goes to a file for validation (chats.val.jsonl).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import tomllib
import zlib
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from batched import BatchedSampler, round_up

import heedful
from heedful.models.llama import Llama

Messages = list[dict[str, str]]
NOT_ITS_OWN = re.compile(r"SmolLM|Hugging ?Face|language model|\ban AI\b|OpenAI|\[(?!\d)[A-Za-z ]+\]", re.IGNORECASE)
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})
SYSTEM = "You are a helpful assistant. You answer in a few short and simple sentences."
MIN_P, LONGEST = 0.05, 256
INVENTED = 0.5  # of first requests
RUDE = re.compile(r"fuck|shit|\bsex|porn|rape|suicid|\bkill|nazi|nigg|bitch|murder|\bdrugs?\b", re.IGNORECASE)
LONGEST_OPENING = 48  # tokens
TEMPERATURES = {True: 0.4, False: 0.8}  # of the answers to questions, and of all others
LONGEST_CHAT = 448  # tokens of a conversation that goes on
MOST_ALIKE = 6  # answers with the same first 60 characters
MOST_EQUAL = 60  # short answers that are the same
N_ITSELF = 8  # conversations about the model, in every batch


class Requests:
    """Draws what a user might ask."""

    def __init__(self, path: Path, seed: int) -> None:
        self.spec = tomllib.loads(path.read_text(encoding="utf-8"))
        self.random = random.Random(seed)

    def fill(self, template: str) -> str:
        """A template with words in place of the names of lists, typed now and then as people do."""
        text = re.sub(r"\{(\w+)\}", lambda found: self.random.choice(self.spec["lists"][found[1]]), template)
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        text = text[0].upper() + text[1:]
        chance = self.random.random()
        if chance < 0.06:
            return text.rstrip(".!?")
        if chance < 0.10:
            return text.lower()
        if chance < 0.14:
            return f"Please {text[0].lower()}{text[1:]}" if text.endswith(".") else text
        return text

    def first(self) -> str:
        """The first request of a conversation."""
        kinds = list(self.spec["requests"].values())
        (_, templates) = self.random.choices(kinds, [weight for weight, _ in kinds])[0]
        return self.fill(self.random.choice(templates))

    def next(self) -> str:
        """A request that refers to the answer before."""
        return self.fill(self.random.choice(self.spec["follow_ups"]["any"]))

    def story(self) -> tuple[str, str]:
        """A request for a story, and how it may begin: both with the same words."""
        spec = self.random.choice(self.spec["stories"])
        drawn: dict[str, str] = {}

        def draw(found: re.Match[str]) -> str:
            words = [w for w in self.spec["lists"][found[1].rstrip("2")] if w not in drawn.values()]
            return drawn.setdefault(found[1], self.random.choice(words))

        opening = re.sub(r"\{(\w+)\}", draw, spec["opening"])
        request = re.sub(r"\{(\w+)\}", draw, self.random.choice(spec["requests"]))
        return self.fill(request), re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", opening)

    def about_itself(self) -> Messages:
        """A conversation about the model, which is not its own."""
        asked, answered = (self.random.choice(self.spec["itself"][part]) for part in ("questions", "answers"))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


class Selection:
    """Which answers are worth learning from."""

    def __init__(self) -> None:
        self.begins: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def accepts(self, text: str) -> bool:
        """Whether an answer is kept; why not is counted."""
        reason = self._problem(text)
        if reason:
            self.dropped[reason] += 1
        return not reason

    def _problem(self, text: str) -> str:
        if not text:
            return "has no end"
        if len(text) < 2 or not text.isascii() or NOT_ITS_OWN.search(text):
            return "not English, or about itself"
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if len(s) > 12]
        words = text.lower().split()
        fours = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        if len(set(lines)) < len(lines) or len(set(sentences)) < len(sentences) or len(set(fours)) < 0.9 * len(fours):
            return "repeats itself"
        begin = text[:60]
        self.begins[begin] += 1
        if self.begins[begin] > (MOST_ALIKE if len(text) > 60 else MOST_EQUAL):
            return "begins as others"
        return ""


def cut_at_end(text: str) -> str:
    """A text up to its last paragraph's end, or its last sentence's if that would cost more than a third; empty if it
    has none."""
    for pattern in (r"[.!?]\"?\n\n", r"[.!?]\"?(?=\s)"):
        ends = [found.end() for found in re.finditer(pattern, text)]
        if ends and ends[-1] > 2 / 3 * len(text):
            return text[: ends[-1]].strip()
    return ""


def render(conversation: Messages, role: str = "assistant") -> str:
    """SmolLM2's chat template with a system prompt that asks for short answers and gives no name, up to where a role
    begins to speak."""
    turns = [{"role": "system", "content": SYSTEM}, *conversation]
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return f"{text}<|im_start|>{role}\n"


def is_request(text: str) -> bool:
    """Whether a text that a model wrote as a user's may be asked: one short line that asks or tells to do something."""
    asks = text.endswith(("?", ".", "!")) and 12 <= len(text) <= 160 and "\n" not in text
    return asks and text.isascii() and not RUDE.search(text) and not NOT_ITS_OWN.search(text)


def is_held_out(conversation: Messages) -> bool:
    """Whether a conversation is for validation: by its first request, without capitals and punctuation."""
    request = re.sub(r"[^a-z ]", "", conversation[0]["content"].lower()).removeprefix("please ")
    return zlib.crc32(request.encode()) % 50 == 0


class Generator:
    """Asks the model, keeps what is good, and collects conversations that go on."""

    def __init__(self, model: str, n_cached: int, seed: int) -> None:
        loaded = heedful.load(model, **on_gpu())
        torch.manual_seed(seed)
        assert loaded.tokenizer is not None
        self.tokenizer = loaded.tokenizer
        (end,) = loaded.chat_eos_ids
        self.sampler = BatchedSampler(loaded.model, end, n_cached, min_p=MIN_P, longest=LONGEST)  # type: ignore[arg-type]
        self.requests = Requests(Path(__file__).with_suffix(".toml"), seed)
        self.selection = Selection()
        self.going_on: list[Messages] = []
        self.invented: list[str] = []
        self.n_asked = self.n_tokens = 0

    def ask(self, n_rows: int, longest_prompt: int) -> list[Messages]:
        """A batch of conversations: the second turn of those that go on if there are enough, else first ones."""
        n = min(n_rows, self.sampler.n_cached // self.sampler.capacity(LONGEST_CHAT))
        if len(self.going_on) >= n:
            longest_prompt = LONGEST_CHAT
            asked, self.going_on = self.going_on[:n], self.going_on[n:]
        else:
            n = min(n_rows, self.sampler.n_cached // self.sampler.capacity(longest_prompt))
            asked = [[{"role": "user", "content": self._first(n)}] for _ in range(n)]
        done = []
        for conversation in self._answer(asked, longest_prompt):
            if len(conversation) == 2 and self.requests.random.random() < 0.4:
                more = [*conversation, {"role": "user", "content": self.requests.next()}]
                if len(self.tokenizer.encode(render(more), allow_special=True)) <= LONGEST_CHAT:
                    self.going_on.append(more)
                    continue
            done.append(conversation)
        return done

    def _first(self, n_rows: int) -> str:
        """The first request of a conversation, of a template or invented by the model."""
        if self.requests.random.random() >= INVENTED:
            return self.requests.first()
        if not self.invented:
            begin = self.tokenizer.encode(render([], "user"), allow_special=True)
            found = self.tokenizer.backend.decode_batch(self.sampler.sample([begin] * n_rows, [1.0] * n_rows, 96))
            self.invented = [text for text in (f.translate(PLAIN).strip() for f in found) if is_request(text)]
        return self.invented.pop() if self.invented else self.requests.first()

    def _answer(self, asked: list[Messages], longest_prompt: int) -> list[Messages]:
        prompts = self.tokenizer.encode_batch([render(messages) for messages in asked], allow_special=True)
        asked = [messages for messages, ids in zip(asked, prompts, strict=True) if len(ids) <= longest_prompt]
        prompts = [ids for ids in prompts if len(ids) <= longest_prompt]
        heat = [TEMPERATURES[messages[-1]["content"].endswith("?")] for messages in asked]
        answers = self.sampler.sample(prompts, heat, longest_prompt)
        self.n_asked += len(answers)
        texts = self.tokenizer.backend.decode_batch(answers)  # without the end, a special token
        kept = []
        for messages, ids, text in zip(asked, answers, texts, strict=True):
            plain = text.translate(PLAIN).strip()
            if ids[-1:] != [self.sampler.end]:
                plain = cut_at_end(plain)
            if self.selection.accepts(plain):
                kept.append([*messages, {"role": "assistant", "content": plain}])
                self.n_tokens += len(ids)
        return kept


def write_stories(model: str, path: Path, minutes: float, n_tokens: int, rows: int, seed: int) -> None:
    """Stories by a model that continues openings, as answers to requests for them."""
    loaded = heedful.load(model, **on_gpu())
    assert loaded.tokenizer is not None and isinstance(loaded.model, Llama) and loaded.tokenizer.bos_id is not None
    tokenizer, longest = loaded.tokenizer, (loaded.model.context_length or 256) - LONGEST_OPENING
    capacity = rows * round_up(LONGEST_OPENING + longest)
    sampler = BatchedSampler(loaded.model, tokenizer.bos_id, capacity, min_p=MIN_P, longest=longest)
    requests, selection = Requests(Path(__file__).with_suffix(".toml"), seed), Selection()
    begin, n_written, n_kept = time.perf_counter(), 0, 0
    with path.open("a", encoding="utf-8") as train, held_out_path(path).open("a", encoding="utf-8") as validation:
        while time.perf_counter() - begin < 60 * minutes and n_written < n_tokens:
            asked = [requests.story() for _ in range(rows)]
            prompts = [[sampler.end, *ids] for ids in tokenizer.encode_batch(opening for _, opening in asked)]
            fits = [len(ids) <= LONGEST_OPENING for ids in prompts]
            asked, prompts = list(compress(asked, fits)), list(compress(prompts, fits))
            answers = sampler.sample(prompts, [TEMPERATURES[False]] * len(prompts), LONGEST_OPENING)
            texts = tokenizer.backend.decode_batch([ids[1:] + more for ids, more in zip(prompts, answers, strict=True)])
            for (request, _), text, ids in zip(asked, texts, answers, strict=True):
                plain = text.translate(PLAIN).strip()
                plain = plain if ids[-1:] == [sampler.end] else cut_at_end(plain)
                if selection.accepts(plain):
                    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": plain}]
                    (validation if is_held_out(messages) else train).write(json.dumps({"messages": messages}) + "\n")
                    n_written += len(ids)
                    n_kept += 1
            seconds = time.perf_counter() - begin
            print(f"{seconds:.0f} s: {n_kept:,} stories, {n_written:,} tokens; {dict(selection.dropped)}", flush=True)


def on_gpu() -> dict[str, Any]:
    """How models are loaded."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length
    return {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {}


def held_out_path(path: Path) -> Path:
    """The file for validation beside that for training."""
    return path.with_suffix(".val" + path.suffix)


def main() -> None:
    """Write conversations until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=4096, help="conversations at once, at most")
    parser.add_argument("--cache", type=int, default=1_300_000, help="tokens of the KV cache, 23 KB each")
    parser.add_argument("--tokens", type=int, default=10**9, help="stop after so many tokens of answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stories", action="store_true", help="the model continues stories, as stories15m")
    options = parser.parse_args()
    if options.stories:
        return write_stories(options.model, options.out, options.minutes, options.tokens, options.rows, options.seed)
    begin = time.perf_counter()
    generator = Generator(options.model, options.cache, options.seed)
    n_kept = n_batches = 0
    with (
        options.out.open("a", encoding="utf-8") as train,
        held_out_path(options.out).open("a", encoding="utf-8") as validation,
    ):
        while time.perf_counter() - begin < 60 * options.minutes and generator.n_tokens < options.tokens:
            itself = [generator.requests.about_itself() for _ in range(N_ITSELF)]
            try:
                answered = generator.ask(options.rows, 96)
            except torch.OutOfMemoryError:  # others use this GPU too
                options.rows //= 2
                torch.cuda.empty_cache()
                continue
            for messages in [*answered, *itself]:
                (validation if is_held_out(messages) else train).write(json.dumps({"messages": messages}) + "\n")
                n_kept += 1
            train.flush()
            validation.flush()
            n_batches += 1
            print(
                f"{time.perf_counter() - begin:.0f} s: {n_batches} batches, {generator.n_asked:,} answers, "
                f"{n_kept:,} conversations kept, {generator.n_tokens:,} tokens; {dict(generator.selection.dropped)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
