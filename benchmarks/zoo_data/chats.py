"""Conversations for a small chat model, written by a larger one: SmolLM2-135M-Instruct (Apache-2.0) answers requests.

    python benchmarks/zoo_data/chats.py SmolLM2-135M-Instruct.Q4_1.gguf --out chats.jsonl [--minutes 10] [--seed 0]

A request is a template of chats.toml with words drawn into it; a third of the conversations go on with a second
question. Answers are sampled (temperature 0.7, top-p 0.95), many at once: needs a GPU to be quick. Only those are kept
that end by themselves, do not repeat a line, and do not say who the model is. Lines are {"messages": [...]}, as
`heedful train MODEL chats.jsonl` reads them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

import heedful
from heedful.loaded import Loaded
from heedful.models.base import Batch

Messages = list[dict[str, str]]
NOT_ITS_OWN = re.compile(r"SmolLM|Hugging ?Face|language model|as an AI", re.IGNORECASE)
SYSTEM = "You are a helpful assistant. You answer in a few short and simple sentences."
TEMPERATURE, TOP_P, LONGEST = 0.7, 0.95, 256


class Requests:
    """Draws what a user might ask."""

    def __init__(self, path: Path, seed: int) -> None:
        self.spec = tomllib.loads(path.read_text(encoding="utf-8"))
        self.random = random.Random(seed)

    def fill(self, template: str) -> str:
        """A template with words in place of the names of lists."""
        return re.sub(r"\{(\w+)\}", lambda found: self.random.choice(self.spec["lists"][found[1]]), template)

    def first(self) -> str:
        """The first request of a conversation."""
        kinds = list(self.spec["requests"].values())
        (_, templates) = self.random.choices(kinds, [weight for weight, _ in kinds])[0]
        return self.fill(self.random.choice(templates))

    def next(self) -> str:
        """A request that refers to the answer before."""
        return self.fill(self.random.choice(self.spec["follow_ups"]["any"]))


def render(conversation: Messages) -> str:
    """SmolLM2's chat template with a system prompt that asks for short answers and gives no name."""
    turns = [{"role": "system", "content": SYSTEM}, *conversation]
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


def sample_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Tokens (B,) by temperature and nucleus (Holtzman et al. 2020), logits (B, V)."""
    probabilities, order = (logits.float() / TEMPERATURE).softmax(-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before > TOP_P, 0)
    return order.gather(1, torch.multinomial(kept, 1))[:, 0]


@torch.inference_mode()
def answer(loaded: Loaded, conversations: list[Messages]) -> list[str | None]:
    """The model's next message in each; None where it did not end."""
    tokenizer, model, device = loaded.tokenizer, loaded.model, loaded.model.device
    assert tokenizer is not None
    prompts = [tokenizer.encode(f"{render(c)}<|im_start|>assistant\n", allow_special=True) for c in conversations]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    (end,) = loaded.chat_eos_ids
    logits, state = model.start(Batch(padded, lengths.to(device)), capacity=longest + LONGEST)  # type: ignore[operator]
    tokens = sample_tokens(logits)
    out, ended = [tokens], tokens == end
    for i in range(LONGEST - 1):
        if i % 16 == 0 and bool(ended.all()):
            break
        tokens = sample_tokens(model.step(tokens, state))  # type: ignore[operator]
        ended |= tokens == end
        out.append(tokens)
    rows = torch.stack(out, 1).tolist()
    return [tokenizer.decode(row[: row.index(end)]).strip() if end in row else None for row in rows]


def is_good(text: str | None) -> bool:
    """Whether an answer is worth learning from."""
    if not text or NOT_ITS_OWN.search(text) or not text.isascii():
        return False
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if len(s) > 12]
    return len(set(lines)) == len(lines) and len(set(sentences)) == len(sentences)


def main() -> None:
    """Write conversations until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {}
    loaded = heedful.load(options.model, **on_gpu)
    torch.manual_seed(options.seed)
    requests = Requests(Path(__file__).with_suffix(".toml"), options.seed)
    begin, n_kept, n_asked, n_characters = time.perf_counter(), 0, 0, 0
    with options.out.open("a", encoding="utf-8") as file:
        while time.perf_counter() - begin < 60 * options.minutes:
            asked: list[Messages] = [[{"role": "user", "content": requests.first()}] for _ in range(options.rows)]
            done: list[Messages] = []
            for turn in range(2):
                answers = answer(loaded, asked)
                n_asked += len(asked)
                good = [
                    [*messages, {"role": "assistant", "content": text}]
                    for messages, text in zip(asked, answers, strict=True)
                    if text is not None and is_good(text)
                ]
                cut = len(good) if turn else len(good) * 2 // 3
                done += good[:cut]
                asked = [[*messages, {"role": "user", "content": requests.next()}] for messages in good[cut:]]
                if not asked:
                    break
            for messages in done:
                file.write(json.dumps({"messages": messages}) + "\n")
            file.flush()
            n_kept += len(done)
            n_characters += sum(len(message["content"]) for messages in done for message in messages)
            seconds = time.perf_counter() - begin
            print(
                f"{n_kept:,} conversations, {n_asked:,} answers, {n_characters:,} characters, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
