"""Text to token ids and back: one class for every family.

A thin wrapper over a `tokenizers.Tokenizer` that adds the roles of special tokens (which one ends a text, which one
pads), chat templates, and one rule the library does not have: text is text. "<|endoftext|>" typed by
a user is thirteen ordinary characters unless `allow_special=True` says otherwise (see special_tokens.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from heedful.text import special_tokens
from heedful.text.byte_level import (
    CHAR_OF_BYTE,
    UTF8_BYTES,
    byte_fallback_bytes,
    byte_level_bytes,
    byte_scheme,
    keeps_text,
    pipeline_steps,
)
from heedful.text.chat import Messages, Rendered, render_chat
from heedful.text.sentencepiece import FOREIGN, SPACE

# The roles of special tokens, and the names by which they are recognised where no file gives them.
MAX_VOCABULARY = 2**24  # tokens, as of a model
ROLES: dict[str, tuple[str, ...]] = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}
UNREADABLE = "the tokenizer cannot encode this text"


class Tokenizer:
    """A tokenizer of any family. Make one with `from_folder`, `from_gguf` or a function of `heedful.text.train`.

    `roles` names the special tokens ({"eos": "</s>"}); without it they are recognised by the usual names.
    `lossless` promises decode(encode(x)) == x for every text without lone surrogates.
    `target` is the tokenizer of the other language where a translation model has two (Marian), else this one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        roles: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        target: Tokenizer | None = None,
        unknown_from: int | None = None,
    ) -> None:
        backend.no_truncation()  # a text is never cut in silence
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        self.chat_template = chat_template
        self.target = self if target is None else target
        self._unknown_from = unknown_from  # ids from here on have no place in the model and stand for <unk>
        self.roles = self._find_roles() if roles is None else dict(roles)
        self._mark_special(self.roles.values())
        self._prepare()

    def _find_roles(self) -> dict[str, str]:
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        found = {role: [name for name in names if name in known] for role, names in ROLES.items()}
        return {role: names[0] for role, names in found.items() if names}

    def _mark_special(self, names: Iterable[str]) -> None:
        """Make tokens with a role special, whatever the file says; one that is missing gets a new id."""
        present = {t.content for t in self.backend.get_added_tokens_decoder().values() if t.special}
        missing = [name for name in dict.fromkeys(names) if name and name not in present]
        self.backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])

    def _prepare(self) -> None:
        """Derive everything that is not saved from the backend."""
        vocab = self.backend.get_vocab()
        if (largest := max(vocab.values(), default=-1)) >= MAX_VOCABULARY:  # its JSON has all ids up to the largest
            raise ValueError(f"a token has the id {largest:,}, and a vocabulary has at most {MAX_VOCABULARY:,} tokens")
        spec: dict[str, Any] = json.loads(self.backend.to_str())
        self._plain = special_tokens.without_special_tokens(self.backend, spec)
        self.reads_special = False  # see `reading_special`
        self._special: tokenizers.Tokenizer | None = None
        added = self.backend.get_added_tokens_decoder()
        self.special_tokens = {t.content: index for index, t in sorted(added.items()) if t.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._size: int = 1 + largest
        self.longest_piece: int = max(map(len, vocab), default=1)  # characters; of byte-level pieces, bytes
        if self._unknown_from is not None:
            self._size = min(self._size, self._unknown_from)
        self.byte_scheme = byte_scheme(spec)
        self.lossless = self._is_lossless(spec)
        for role in ROLES:
            setattr(self, f"{role}_id", self.id(self.roles[role]) if role in self.roles else None)

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    mask_id: int | None
    cls_id: int | None
    sep_id: int | None

    def _is_lossless(self, spec: dict[str, Any]) -> bool:
        """Whether decode(encode(x)) == x: nothing normalized, no byte missing, no character dropped."""
        vocab = spec["model"]["vocab"]
        if self.byte_scheme != "level" or spec.get("normalizer") or not isinstance(vocab, dict):
            return False
        if not all(CHAR_OF_BYTE[byte] in vocab for byte in UTF8_BYTES) or spec["model"].get("dropout"):
            return False
        if not all(keeps_text(step) for step in pipeline_steps(spec.get("pre_tokenizer"))):
            return False
        ordinary = {i: t for i, t in self.backend.get_added_tokens_decoder().items() if not t.special}
        return all(not (t.lstrip or t.rstrip) and self.backend.decode([i]) == t.content for i, t in ordinary.items())

    # --- sizes and single tokens -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return self._size

    def token(self, id: int) -> str:
        """The raw piece of an id, as it is stored ("Ġthe", "##ing", "▁the")."""
        piece: str | None = self.backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if piece is None:
            raise ValueError(f"there is no token {id}; this tokenizer has {self.vocab_size} tokens")
        return piece

    def id(self, token: str) -> int | None:
        """The id of a raw piece, or None."""
        index: int | None = self.backend.token_to_id(token)
        return index if index is None or index < self.vocab_size else None

    @property
    def knows_bytes(self) -> bool:
        """Whether it has tokens for single bytes, and so for every text."""
        return self.byte_scheme is not None

    def __repr__(self) -> str:
        model = type(self.backend.model).__name__
        return f"Tokenizer({model}, {self.vocab_size} tokens, {len(self.special_tokens)} of them special)"

    # --- text to ids -----------------------------------------------------------------------------------------------

    def _encoder(self, allow_special: bool) -> tokenizers.Tokenizer:
        if not allow_special:
            return self._plain
        if self._special is None:
            special = special_tokens.parse_backend(self.backend.to_str())
            special.encode_special_tokens = False
            self._special = special
        return self._special

    def reading_special(self) -> Tokenizer:
        """A copy that recognises special tokens written in a text by default, for text that you wrote yourself."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._plain, other.reads_special = self._encoder(allow_special=True), True
        other.target = other if self.target is self else self.target.reading_special()
        return other

    def _ids(self, encoding: tokenizers.Encoding, *texts: str) -> list[int]:
        """The ids of an encoding; Marian's vocab.json differs from its SentencePiece model, so its ids are mapped."""
        ids: list[int] = encoding.ids
        if self._unknown_from is None:
            return ids
        assert self.unk_id is not None
        for place, (index, (start, end)) in enumerate(zip(ids, encoding.offsets, strict=True)):
            if index == self.unk_id:  # what this language's model does not know may be a piece of the other one
                text = texts[encoding.sequence_ids[place] or 0][start:end]
                piece = self.backend.normalizer.normalize_str(text).removeprefix(SPACE) if text else ""
                found = self.id(FOREIGN + piece)
                ids[place] = self.unk_id if found is None else found
            elif index >= self._unknown_from and index not in self._special_ids:
                ids[place] = self.unk_id
        return ids

    def encode(self, text: str, *, add_special: bool = False, allow_special: bool = False) -> list[int]:
        """The ids of `text`.

        `add_special` adds what the family puts around a text ([CLS] and [SEP], <s>, </s>); `allow_special` recognises
        special tokens written in the text, which is for text you wrote yourself, not for text from others.
        """
        encoding = self._encode(text, add_special=add_special, allow_special=allow_special)
        return self._ids(encoding, text)

    def _encode(
        self, first: str, second: str | None = None, *, add_special: bool, allow_special: bool = False
    ) -> tokenizers.Encoding:
        pair = None if second is None else _checked(second)
        with special_tokens.library_errors(UNREADABLE):
            return self._encoder(allow_special).encode(_checked(first), pair, add_special_tokens=add_special)

    def encode_batch(
        self, texts: Iterable[str], *, add_special: bool = False, allow_special: bool = False
    ) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        checked = [_checked(text) for text in texts]
        encoder = self._encoder(allow_special)
        encode = encoder.encode_batch_fast if self._unknown_from is None else encoder.encode_batch
        with special_tokens.library_errors(UNREADABLE):
            encodings = encode(checked, add_special_tokens=add_special)  # the fast one leaves offsets out
        return [self._ids(encoding, text) for encoding, text in zip(encodings, checked, strict=True)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Two texts as one input, [CLS] a [SEP] b [SEP] for BERT, and the segment (0 or 1) of every token."""
        encoding = self._encode(first, second, add_special=True)
        return self._ids(encoding, first, second), encoding.type_ids

    def encode_with_offsets(
        self, text: str, *, add_special: bool = False, allow_special: bool = False
    ) -> list[tuple[int, int, int]]:
        """(id, start, end) of every token: it stands for text[start:end]. Added tokens stand for nothing (0, 0)."""
        encoding = self._encode(text, add_special=add_special, allow_special=allow_special)
        ids = self._ids(encoding, text)
        return [(index, start, end) for index, (start, end) in zip(ids, encoding.offsets, strict=True)]

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of bytes that need not be UTF-8, for tokenizers that know bytes; see `decode_bytes`."""
        if self.byte_scheme is None:
            raise ValueError("this tokenizer has no tokens for single bytes")
        ids: list[int] = []
        run: list[str] = []
        for char in data.decode("utf-8", "surrogateescape") + "\udcff":
            if "\udc80" <= char <= "\udcff":  # a byte that is no UTF-8
                ids += self.encode("".join(run)) if run else []
                ids.append(self._byte_id(ord(char) - 0xDC00))
                run = []
            else:
                run.append(char)
        return ids[:-1]

    def _byte_id(self, byte: int) -> int:
        index = self.id(CHAR_OF_BYTE[byte] if self.byte_scheme == "level" else f"<0x{byte:02X}>")
        if index is None:
            raise ValueError(f"this tokenizer has no token for the byte {byte:#04x}")
        return index

    # --- ids to text -----------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Ids past the vocabulary (a model's padding rows) stand for nothing."""
        with special_tokens.library_errors("the tokenizer cannot decode these ids"):
            return str(self.backend.decode(_checked_ids(ids), skip_special_tokens=skip_special))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of `ids`, without special tokens; pieces of a character come out as they are."""
        if self.byte_scheme is None:
            raise ValueError("this tokenizer has no tokens for single bytes; use decode()")
        added = self.backend.get_added_tokens_decoder()
        piece_bytes = byte_level_bytes if self.byte_scheme == "level" else byte_fallback_bytes
        parts = []
        for index in _checked_ids(ids):
            if index in self._special_ids or index >= self.vocab_size:
                continue
            parts.append(added[index].content.encode() if index in added else piece_bytes(self.token(index)))
        return b"".join(parts)

    # --- conversations ---------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages,
        /,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation ([{"role": "user", "content": "Hello"}]) in the model's own chat format.

        Special tokens come from the template alone: what looks like one inside a message is ordinary text.
        `variables` go to the template (tools=[...], enable_thinking=False). With `continue_final_message` the last
        message stays open, for the model to continue.
        """
        rendered = self.render_messages(
            messages,
            add_generation_prompt and not continue_final_message,
            continue_final_message,
            **variables,
        )
        return [index for index, _, _ in self.encode_rendered(rendered)[0]]

    def render_messages(
        self, messages: Messages, add_generation_prompt: bool, continue_final_message: bool = False, /, **variables: Any
    ) -> Rendered:
        """The text of a conversation, as the chat template writes it."""
        if self.chat_template is None:
            raise ValueError('this model has no chat template; use a chat ("instruct") model, or plain text')
        names = {f"{role}_token": name for role, name in self.roles.items()}
        return render_chat(
            self.chat_template,
            messages,
            self.special_tokens,
            {"tools": None, "documents": None, **variables},
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            **names,
        )

    def encode_rendered(self, *chats: Rendered) -> list[list[tuple[int, int, int]]]:
        """(id, start, end) of each conversation's tokens; special tokens that a user typed become plain text."""
        with special_tokens.library_errors(UNREADABLE):
            encodings = self._encoder(True).encode_batch([_checked(r.text) for r in chats], add_special_tokens=False)
        found: list[list[tuple[int, int, int]]] = [[] for _ in chats]
        for tokens, rendered, encoding in zip(found, chats, encodings, strict=True):
            for index, (start, end) in zip(self._ids(encoding, rendered.text), encoding.offsets, strict=True):
                if index in self._special_ids and rendered.user_made(start, end):
                    tokens += [(piece, start, end) for piece in self.encode(rendered.text[start:end])]
                else:
                    tokens.append((index, start, end))
        return found

    # --- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer in a model's folder, from whichever files its family uses."""
        from heedful.text.folder import tokenizer_from_folder

        return tokenizer_from_folder(Path(folder))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer inside a GGUF file, from its metadata as plain values."""
        from heedful.text.gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(fields)

    def save(self, folder: str | Path, **model: Any) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `from_folder` and transformers read.

        `model` says which model it is for, in the arguments of heedful.text.tokenizer_config.
        """
        from heedful.text.tokenizer_config import tokenizer_config

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = tokenizer_config(self, **model)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if self._unknown_from is not None:
            config["unknown_from"] = self._unknown_from
        _write(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
        if self.target is not self:
            self.target.save(folder / "target", **model)

    def __getstate__(self) -> dict[str, Any]:
        target = None if self.target is self else self.target
        return {
            "backend": self.backend.to_str(),
            "roles": self.roles,
            "chat_template": self.chat_template,
            "target": target,
            "unknown_from": self._unknown_from,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend = special_tokens.parse_backend(state.pop("backend"))
        self.__init__(backend, **state)  # type: ignore[misc]


def _write(path: Path, text: str) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text is half of a surrogate pair, which is no character; "
            "for bytes that are not UTF-8 use encode_bytes()"
        ) from None
    return text


def _checked_ids(ids: Sequence[int]) -> list[int]:
    checked = [int(index) for index in ids]
    if checked and min(checked) < 0:
        raise ValueError(f"token ids are not negative, got {min(checked)}")
    return checked
