"""Bounds checks of token ids from outside: an index beyond the embedding is undefined behaviour."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 20  # ids in an error message


def vocab_sizes(model: object) -> tuple[int | None, int | None]:
    """The sizes of a model's input and output vocabularies, which may differ in an encoder-decoder; None if it has
    none."""
    config = getattr(model, "config", None)
    inputs: int | None = getattr(config, "vocab_size", None)
    return inputs, getattr(config, "n_target", inputs)


def check_token_ids(ids: Sequence[int], vocab_size: int | None, where: str, name: str = "") -> None:
    """ValueError for ids outside of 0 to vocab_size - 1; its message says `where` they are, and the model's `name`."""
    if vocab_size is None or not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = [(i, id) for i, id in enumerate(ids) if not 0 <= id < vocab_size]
    place, first = wrong[0]
    others = [str(id) for id in dict.fromkeys(id for _, id in wrong) if id != first][:MAX_LISTED]
    more = f" (nor has it {', '.join(others)})" if others else ""
    vocabulary = f"the vocabulary of {name}" if name else "the vocabulary"
    raise ValueError(f"token {first} (at {place} of {where}): {vocabulary} is 0 to {vocab_size - 1}{more}")
