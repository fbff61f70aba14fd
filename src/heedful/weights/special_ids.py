"""The token ids that begin, end and pad a text, as config.json and generation_config.json have them.

transformers generates with the ids of generation_config.json alone, and not with the tokenizer's; for a key that is
missing its classes have defaults of their own (LLaMA's end is token 2, GPT-2's 50256), which in a model of characters
are letters, or no tokens at all. So both files have every id that counts here, and null where there is none.
"""

from __future__ import annotations

from typing import Any

from heedful.models.base import DecoderModel, GenerativeModel, Model
from heedful.text.chat_answers import end_of_turn_id
from heedful.text.tokenizer import Tokenizer

ENDS = ("bos", "eos", "pad")
LENGTH = 512  # tokens that an encoder-decoder without a limit of its own generates at most
COPIED = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")  # where the model's files have them


def special_ids(model: Model, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The special token ids of config.json: those of the model, where it has none those of its tokenizer, else None. A
    chat template's end of turn ends a text too."""
    if not isinstance(model, GenerativeModel):
        return dict(model.special)
    ids = {key: _within(value, model) for key, value in model.special.items()}
    for role in ENDS:
        key = f"{role}_token_id"
        if ids.get(key) is None:
            ids[key] = None if tokenizer is None else getattr(tokenizer, f"{role}_id")
    turn = None if tokenizer is None else end_of_turn_id(tokenizer)
    if turn is not None:
        eos = ids["eos_token_id"]
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ids["eos_token_id"] = eos if turn in ends else [*ends, turn]
    return ids


def generation_config(model: Model, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The contents of generation_config.json: what the model's own file has, with every special token id; empty for a
    model that does not generate text."""
    if not isinstance(model, GenerativeModel):
        return dict(model.generation)
    ids = special_ids(model, tokenizer)
    found = dict(model.generation) | {f"{role}_token_id": ids[f"{role}_token_id"] for role in ENDS}
    found |= {key: ids[key] for key in COPIED if key in ids}
    if not isinstance(model, DecoderModel):
        found["decoder_start_token_id"] = model.start_id
        if not {"max_length", "max_new_tokens"} & found.keys():  # transformers would stop after 20 tokens
            found["max_length"] = getattr(model.config, "max_len", None) or LENGTH
    return found


def _within(value: Any, model: Model) -> Any:
    """A special token id, or several, without those outside the vocabulary (old LLaMA files say -1 for none)."""
    size = max(model.config.vocab_size, getattr(model.config, "target_vocab_size", None) or 0)
    if isinstance(value, list):
        return [index for index in value if 0 <= index < size] or None
    return value if value is None or 0 <= value < size else None
