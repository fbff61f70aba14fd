"""The bounds of token ids, checked here wherever ids come from outside: beyond an embedding's table, an index is
undefined behaviour."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 20  # ids in a message


def vocab_sizes(model: object) -> tuple[int | None, int | None]:
    """How many token ids a model reads, and how many it predicts: an encoder-decoder may have a vocabulary for each
    side. None where it has none."""
    config = getattr(model, "config", None)
    inputs: int | None = getattr(config, "vocab_size", None)
    return inputs, getattr(config, "n_target", inputs)


def check_token_ids(ids: Sequence[int], vocab_size: int | None, where: str, name: str = "") -> None:
    """ValueError for ids outside of 0 to vocab_size - 1; its message says `where` they are, and the model's `name`."""
    if vocab_size is None or not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = [i for i, id in enumerate(ids) if not 0 <= id < vocab_size]
    found = list(dict.fromkeys(str(ids[i]) for i in wrong))
    tokens = f"token {found[0]} (" if len(found) == 1 else f"tokens {', '.join(found[:MAX_LISTED])} (the first "
    vocabulary = f"the vocabulary of {name}" if name else "the vocabulary"
    raise ValueError(f"{tokens}at {wrong[0]} of {where}): {vocabulary} is 0 to {vocab_size - 1}")
