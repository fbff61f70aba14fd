"""What fine-tuned models do for their users: classify a text or an image, answer from a passage, tag words, complete an
image. `heedful.load` gives them as methods of a loaded model.

    B windows or texts, T tokens, L labels
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from heedful.data.dataset import IGNORED, Draw
from heedful.data.special_tokens import SpecialTokenTemplate
from heedful.data.squad import Question, SquadWindows
from heedful.data.tagging import tokenize_tagged_words
from heedful.generate.engine import generate_batch
from heedful.generate.request import Sampling
from heedful.models.base import Batch, Model
from heedful.models.encoder import EncoderModel
from heedful.models.image_gpt import ImageGPT
from heedful.models.vit import ViT
from heedful.observe.reading import tells_apart
from heedful.text.tokenizer import Tokenizer

LONGEST_ANSWER = 30  # tokens, as in BERT's code
STRIDE = 128  # tokens that windows over a long passage have in common


@dataclass(frozen=True)
class Label:
    name: str
    score: float  # a probability; of a regression, the number itself


@dataclass(frozen=True)
class Span:
    """A piece of a text: text[begin:end]."""

    text: str
    begin: int
    end: int
    score: float  # a probability
    label: str = ""


@torch.no_grad()
def classify(model: Model, tokenizer: Tokenizer | None, what: str | Tensor, second: str | None = None) -> list[Label]:
    """Every label with its probability, likeliest first; `what` is a text, or an image (C, height, width), -1 to 1."""
    if isinstance(model, ViT):
        if not isinstance(what, Tensor):
            raise ValueError("a vision model classifies images: give a tensor (channels, height, width) from -1 to 1")
        batch = Batch(images=what[None].to(model.device))
    else:
        if not isinstance(what, str):
            raise ValueError("this model classifies texts, not tensors")
        batch = _text(model, tokenizer, what, second)
    logits = model(batch).logits
    assert logits is not None, "the ability promises a head"
    config = model.config
    names = config.labels or [str(i) for i in range(config.n_labels)]
    if config.problem == "regression":
        return [Label(name, value) for name, value in zip(names, logits[0].tolist(), strict=True)]
    several = config.problem == "multi_label_classification"
    chances = logits[0].float().sigmoid() if several else logits[0].float().softmax(dim=-1)
    return [Label(names[i], float(chances[i])) for i in chances.argsort(descending=True, stable=True).tolist()]


def _text(model: Model, tokenizer: Tokenizer | None, text: str, second: str | None) -> Batch:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give it token ids yourself")
    segments = None
    if second is None:
        ids = tokenizer.encode(text, add_special=True)
    else:
        ids, sides = tokenizer.encode_pair(text, second)
        segments = torch.tensor([sides], device=model.device) if tells_apart(model) and any(sides) else None
    model.check_length(len(ids))
    return Batch(torch.tensor([ids], device=model.device), segments=segments)


@torch.no_grad()
def answer(model: EncoderModel, tokenizer: Tokenizer, question: str, passage: str) -> Span:
    """The piece of the passage that answers; a long passage is read in windows, and the best piece of all is taken.

    The score is the probability of its beginning times that of its end, among the tokens of its window. That there may
    be no answer (SQuAD 2) is not considered.
    """
    if not question.strip() or not passage.strip():
        raise ValueError("give a question and a passage to find its answer in")
    asked = Question("", question, 0, (), None, None)
    longest = min(384, model.longest)
    stride, segments = min(STRIDE, longest // 4), tells_apart(model)
    windows = SquadWindows([passage], [asked], tokenizer, max_length=longest, stride=stride, segments=segments)
    best, told = Span("", 0, 0, 0.0), -torch.inf
    before = windows.passage_offset(0)
    for i, (_, first, last) in enumerate(windows.windows.tolist()):
        batch = windows.batch([Draw(0, i)], seed=0)
        batch = Batch(batch.ids.to(model.device), segments=_moved(batch.segments, model.device))
        logits = model(batch).logits
        assert logits is not None, "the ability promises a head"
        begins, ends = logits[0].float().log_softmax(dim=0).T  # (T,) each
        begins, ends = begins[before : before + last - first], ends[before : before + last - first]
        pairs = begins[:, None] + ends[None]
        allowed = torch.ones_like(pairs).triu().tril(LONGEST_ANSWER - 1).bool()
        pairs = pairs.masked_fill(~allowed, -torch.inf)
        score = float(pairs.max())
        if score > told:
            begin, end = divmod(int(pairs.argmax()), len(ends))
            a, b = int(windows.begins[0][first + begin]), int(windows.ends[0][first + end])
            best, told = Span(passage[a:b], a, b, float(torch.tensor(score).exp())), score
    return best


def _moved(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


@torch.no_grad()
def tag(model: EncoderModel, tokenizer: Tokenizer, text: str) -> list[Span]:
    """The entities of a text, or with tags of another kind every word, each with its label and probability."""
    found = list(re.finditer(r"\w+|[^\w\s]", text))
    if not found:
        return []
    ids, words = tokenize_tagged_words(tokenizer, [m.group() for m in found], list(range(len(found))))
    frame = SpecialTokenTemplate(tokenizer)
    row = frame.wrap(ids).tolist()
    model.check_length(len(row))
    logits = model(Batch(torch.tensor([row], device=model.device))).logits
    assert logits is not None, "the ability promises a head"
    chances, best = logits[0].float().softmax(dim=-1).max(dim=-1)
    names = model.config.labels or tuple(str(i) for i in range(model.config.n_labels))
    spans: list[Span] = []
    last = -1
    for place, word in enumerate(words):
        if word == IGNORED:
            continue
        at = place + len(frame.before)
        name, chance, match = names[int(best[at])], float(chances[at]), found[word]
        kind = name.removeprefix("B-").removeprefix("I-")
        if name == "O":
            continue
        if name.startswith("I-") and spans and spans[-1].label == kind and last == word - 1:
            start = spans[-1].begin
            spans[-1] = Span(text[start : match.end()], start, match.end(), min(spans[-1].score, chance), kind)
        else:
            spans.append(Span(match.group(), match.start(), match.end(), chance, kind))
        last = word
    return spans


def complete_image(
    model: ImageGPT, begun: Tensor, n: int = 1, *, temperature: float = 1.0, seed: int | None = 0
) -> Tensor:
    """n ways to go on with the first pixels (N,) of an image, N may be 0: whole images as colours (n, max_len)."""
    most, colours = model.config.max_len, model.config.vocab_size - 1
    if begun.ndim != 1 or len(begun) >= most:
        raise ValueError(f"give the first pixels of an image in one row, fewer than {most}, not {tuple(begun.shape)}")
    if n < 1 or (len(begun) and not 0 <= int(begun.min()) <= int(begun.max()) < colours):
        raise ValueError(f"pixels are colours from 0 to {colours - 1}, and n is 1 or more")
    rows = []
    for i in range(n):
        how = Sampling(temperature=temperature, seed=None if seed is None else seed + i)
        batch = model.prompt(begun.long()[None].to(model.device))
        rows.append([*begun.tolist(), *generate_batch(model, batch, most - len(begun), how)[0]])
    return torch.tensor(cast(list[list[int]], rows))
