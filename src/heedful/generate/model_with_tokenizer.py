"""A model with its tokenizer: what it can do, which tokens begin and end its texts, and its prompts as token ids."""

from __future__ import annotations

from typing import Unpack

from heedful.models.base import DecoderModel, Model
from heedful.text.blank import is_blank
from heedful.text.chat import Messages, strings_in
from heedful.text.chat_answers import end_of_turn_id
from heedful.text.limits import check_characters
from heedful.text.prompt import PromptOptions, tokenize_prompt
from heedful.text.tokenizer import Tokenizer

Prompt = str | Messages  # a text, or with chat the turns of a conversation


class ModelWithTokenizer:
    """A model with its tokenizer (None if it has none) and its name; `heedful.load` returns one that does more."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that this model has, as "generate" or "classify"; its family and head decide."""
        return self.model.abilities

    def require(self, ability: str) -> None:
        """ValueError that says what the model is, unless it has the ability."""
        if ability not in self.abilities:
            kind, can = type(self.model).__name__, ", ".join(self.abilities)
            raise ValueError(f"{self.name} is a {kind} and cannot {ability}; it can: {can}")

    @property
    def continues_prompt(self) -> bool:
        """Whether it generates the continuation of its prompt, as decoders do; an encoder-decoder answers a source."""
        return isinstance(self.model, DecoderModel)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return next(iter(self._special_ids("bos")), None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text; a chat model often has several."""
        return self._special_ids("eos")

    @property
    def chat_eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer in a chat: those that end a text, and that of the chat template."""
        turn = None if self.tokenizer is None else end_of_turn_id(self.tokenizer)
        return self.eos_ids if turn is None or turn in self.eos_ids else (*self.eos_ids, turn)

    @property
    def pad_id(self) -> int | None:
        """The padding token, if the model has one."""
        return next(iter(self._special_ids("pad")), None)

    def _special_ids(self, role: str) -> tuple[int, ...]:
        value = self.model.special.get(f"{role}_token_id")
        if value is None and self.tokenizer is not None:
            value = getattr(self.tokenizer, f"{role}_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(i for i in ids if i >= 0)  # old LLaMA files say -1 for none

    @property
    def banned_ids(self) -> list[int]:
        """Tokens that the model's files forbid to generate (bad_words_ids), as Marian's padding; none of them ends a
        sequence."""
        words = self.model.generation.get("bad_words_ids") or ()
        return [ids[0] for ids in words if len(ids) == 1 and ids[0] not in self.eos_ids]

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, and reads no text")
        return self.tokenizer

    def _has_no_source(self, prompt: Prompt) -> bool:
        """Whether a prompt is an empty source, to which the answer is empty; a decoder continues an empty prompt."""
        return not self.continues_prompt and isinstance(prompt, str) and is_blank(prompt)

    def encode_prompt(
        self, prompt: Prompt, **options: Unpack[PromptOptions]
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The token ids that the decoder continues, and those that the encoder reads (None of a decoder)."""
        tokenizer = self._text_tokenizer
        if options.get("truncate_prompt_tokens") is None:
            check_characters(tokenizer, strings_in([prompt, options.get("tools")]), self.model.context_length)
        ids = tokenize_prompt(tokenizer, prompt, options) or self._empty_prompt()
        if not ids:
            raise ValueError("the prompt is empty, and this model has no token to begin a text with")
        return (tuple(ids), None) if self.continues_prompt else ((), tuple(ids))

    def _empty_prompt(self) -> list[int]:
        """Stands for an empty prompt: the token that begins a text, else one that ends it, else a line break, as in
        nanoGPT."""
        special = [i for i in (self.bos_id, *self.eos_ids) if i is not None]
        line = self._text_tokenizer.encode("\n")
        return special[:1] or (line if self._text_tokenizer.decode(line) == "\n" else [])
