"""The exercises of *Text to text*."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from heedful.lessons.checking import require
from heedful.nn.position import RelativeBias

Corrupted = tuple[list[str], list[str]]


def corrupted(tokens: Sequence[str], hidden: Sequence[bool]) -> Corrupted:
    """Source and target of span corruption; the first token is not hidden."""
    source, target, n = list[str](), list[str](), 0
    for i, token in enumerate(tokens):
        if hidden[i] and not hidden[i - 1]:
            source.append(f"<{n}>")
            target.append(f"<{n}>")
            n += 1
        (target if hidden[i] else source).append(token)
    return source, target if hidden[-1] else [*target, f"<{n}>"]


def check_hide_spans(answer: Callable[[list[str], list[bool]], Corrupted]) -> None:
    """One sentinel for a span, not for a token; the last sentinel, and no word lost."""
    cases = [("a b c d e f g", "..XX..X"), ("a b c d e f g", ".X.XX.."), ("p q r s t u", ".XXX..")]
    pattern = "." + "".join(random.choice(".X") for _ in range(11))
    for text, marks in [*cases, ("a b c d e f g h i j k l", pattern)]:
        tokens, hidden = text.split(), [mark == "X" for mark in marks]
        source, target = corrupted(tokens, hidden)
        given = f"of {text!r} with {marks} hidden"
        found = answer(list(tokens), list(hidden))
        require(found is not None, "it returned None: is there a `return`?")
        require(isinstance(found, tuple | list) and len(found) == 2, "it must return two lists: source and target")
        got, restored = list(found[0]), list(found[1])
        require([got, restored] != [target, source], "source and target are exchanged")
        each = [f"<{i}>" for i in range(sum(hidden))]
        per_token = [token for token in got if token.startswith("<")] == each and len(each) > marks.count(".X")
        require(not per_token, "each hidden token has a sentinel of its own: a span of several tokens is one sentinel")
        kept = [token for token in tokens if token in got]
        require(not any(token in got for token, gone in zip(tokens, hidden, strict=True) if gone),
                f"the source {given} still has a hidden token: {got}")  # fmt: skip
        require(len(kept) == hidden.count(False), f"the source {given} has lost a token that is not hidden: {got}")
        require(got == source, f"the source {given} is {got}, and should be {source}")
        require(not (marks[-1] == "." and restored == target[:-1]),
                f"the target {given} has no last sentinel, though text follows the last span")  # fmt: skip
        require(not (marks[-1] == "X" and restored[:-1] == target),
                f"the target {given} has one sentinel too many: no text follows the last span")  # fmt: skip
        require(restored == target, f"the target {given} is {restored}, and should be {target}")


def check_bias_bucket(answer: Callable[[int], int]) -> None:
    """Sides, single distances, the logarithm, and the last bucket, against T5's own."""
    bias = RelativeBias(1, bidirectional=True)
    distances = range(-300, 301)
    expected = dict(zip(distances, bias.bucket(torch.tensor(list(distances))).tolist(), strict=True))
    got = {distance: answer(distance) for distance in distances}
    require(got[-3] is not None, "it returned None: is there a `return`?")
    whole = all(isinstance(bucket, int) for bucket in got.values())
    require(whole, f"a bucket is a whole number, and that of -20 is {got[-20]!r}: round down with int")
    exchanged = got[-3] == expected[3] and got[3] == expected[-3]
    require(not exchanged, "the sides are exchanged: the 16 are added for keys after the query, distances above 0")
    require(got[3] != got[-3], "3 and -3 are in one bucket: keys after the query have 16 more")
    require(got[0] == 0, f"the bucket of 0 is {got[0]}, and should be 0: a word itself is not after itself")
    for n in range(1, 8):
        require(got[-n] == n, f"the bucket of {-n} is {got[-n]}: distances below 8 have a bucket each, {n}")
    beyond = max(got[-n] for n in range(128, 301))
    require(beyond <= 15, f"300 steps back are in bucket {got[-300]}: there are 16 for each side, 15 is the last")
    # Where a bucket begins exactly at a distance, rounding may put it into the one before.
    wrong = next((n for n in range(8, 301) if n not in (16, 32, 64) and got[-n] != expected[-n]), None)
    if wrong is not None:
        told = f"the bucket of {-wrong} is {got[-wrong]}, and should be {expected[-wrong]}"
        require(False, f"{told}: from 8 to 128 steps, 8 buckets on a logarithmic scale, rounded down")
    wrong = next((n for n in range(1, 301) if got[n] != 16 + got[-n]), None)
    require(wrong is None, f"the bucket of {wrong} must be 16 more than that of -{wrong}")
