"""The exercises of the lesson on fine-tuning: the best answer span, and entities from tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heedful.lessons.checking import require


def check_best_answer(answer: Callable[..., Any]) -> None:
    """The span with the highest sum of its two logits, not backwards and not too long."""
    generator = torch.Generator().manual_seed(3)
    for round in range(40):
        begins, ends = 2 * torch.randn(2, 15, generator=generator)
        if round % 2:  # the maxima are in the wrong order
            begins[12], ends[2] = 9.0, 9.0
        longest = 4
        made = answer(begins, ends, longest)
        require(isinstance(made, tuple | list) and len(made) == 2, "return two numbers, the first and the last token")
        first, last = (int(x) for x in made)
        require(0 <= first < 15 and 0 <= last < 15, f"the span {first} to {last} is not within the 15 tokens")
        require(last >= first, f"the span {first} to {last} ends before it begins")
        require(
            last - first < longest,
            f"the span {first} to {last} has {last - first + 1} tokens, and {longest} are allowed",
        )
        spans = {(i, j): float(begins[i] + ends[j]) for i in range(15) for j in range(i, min(15, i + longest))}
        best = max(spans, key=lambda span: spans[span])
        if spans[first, last] < spans[best] - 1e-6:
            short = max((s for s in spans if s[1] - s[0] < longest - 1), key=lambda span: spans[span])
            require((first, last) != short, f"a span of exactly {longest} tokens is allowed too")
            require(
                False,
                f"the span {first} to {last} sums to {spans[first, last]:.2f}, but {best[0]} to {best[1]} to "
                f"{spans[best]:.2f}: look at all pairs, not at the best beginning first",
            )


def check_entities_of(answer: Callable[..., Any]) -> None:
    """Entities of B-, I- and O tags, by CoNLL-2003's rule."""
    cases: tuple[tuple[str, list[tuple[str, int, int]], str], ...] = (
        ("O B-PER O", [("PER", 1, 1)], ""),
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)], "`last` is the entity's own last token"),
        ("O O B-ORG I-ORG I-ORG", [("ORG", 2, 4)], "an entity may end with the sentence"),
        ("B-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)], "B- begins a new entity, after one of its own label too"),
        ("B-PER I-LOC", [("PER", 0, 0), ("LOC", 1, 1)], "I- of another label begins an entity"),
        ("O I-LOC I-LOC", [("LOC", 1, 2)], "I- after O begins an entity"),
        ("B-LOC O I-LOC", [("LOC", 0, 0), ("LOC", 2, 2)], "an entity has no gap: O ends it"),
        ("O O", [], "no entity is an empty list"),
    )
    for text, expected, reason in cases:
        made = answer(text.split())
        require(made is not None, "it returned None: is there a `return`?")
        made = [tuple(entity) for entity in made]
        require(made == expected, f"of {text} it made {made}, not {expected}" + (f": {reason}" if reason else ""))
