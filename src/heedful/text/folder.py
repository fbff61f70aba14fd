"""Loading a tokenizer from the files of a model's folder.

    tokenizer.json                          any family, as the `tokenizers` library stores it
    vocab.json + merges.txt                 GPT-2 and families with its tokenizer; RoBERTa; Qwen; GPT-1
    vocab.txt                               BERT, DistilBERT (WordPiece)
    source.spm + target.spm + vocab.json    Marian
    tokenizer.model, spiece.model           LLaMA 2, Mistral, Gemma; T5 (SentencePiece)
    tokenizer_config.json                   ByT5, which needs no vocabulary

and beside them tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat template. Nothing outside
the folder is read, and no code that a file may name is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from heedful.text import backends, sentencepiece, special_tokens
from heedful.text.parse import parse_json
from heedful.text.tokenizer import ROLES, Tokenizer

MAX_BYTES = 1 << 28  # the largest published tokenizer.json has about 33 MB


class Folder:
    """A model's folder: reads the files in it, and only those."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder")
        self.path = path
        self._allowed = [path.resolve()]
        if path.parent.name == "snapshots":  # the hub's cache keeps the contents in blobs/ and links to them
            self._allowed.append((path.parent.parent / "blobs").resolve())

    def has(self, *names: str) -> bool:
        """Whether all these files are there."""
        return all((self.path / name).is_file() for name in names)

    def bytes(self, name: str) -> bytes:
        """A file's contents; ValueError if it is a link elsewhere or too large."""
        path = (self.path / name).resolve()
        if not any(path.is_relative_to(root) for root in self._allowed):
            raise ValueError(f"{name} in {self.path} is a link to a place outside the folder")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{name} in {self.path} has more than {MAX_BYTES:,} bytes")
        return path.read_bytes()

    def text(self, name: str) -> str:
        """A file's contents as UTF-8."""
        try:
            return self.bytes(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} in {self.path} is not UTF-8: {error}") from None

    def json(self, name: str) -> Any:
        """A file's contents as JSON."""
        try:
            return parse_json(self.text(name))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{name} in {self.path} is not JSON: {error}") from None

    def settings(self, name: str) -> dict[str, Any]:
        """A file's JSON object, empty if there is no such file."""
        if not self.has(name):
            return {}
        value = self.json(name)
        if not isinstance(value, dict):
            raise ValueError(f"{name} in {self.path} must be a JSON object")
        return value


def _token(value: Any) -> str | None:
    """The content of a token that is written as text, or as an object with its flags."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """The tokenizer in the folder `path`."""
    try:
        return _read(Folder(path))
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"the tokenizer files in {path} are not as they should be: {error!r}") from None


def _read(folder: Folder) -> Tokenizer:
    path = folder.path
    config = {**folder.settings("special_tokens_map.json"), **folder.settings("tokenizer_config.json")}
    model = folder.settings("config.json")
    family = _family(config, model)
    target: Tokenizer | None = None
    unknown_from = config.get("unknown_from")
    if folder.has("tokenizer.json"):
        backend = special_tokens.parse_backend(folder.text("tokenizer.json"))
        _drop_extra_spaces(backend)
        roles: dict[str, str] | None = None
        if folder.has("target/tokenizer.json"):
            target = tokenizer_from_folder(path / "target")
    elif folder.has("source.spm", "target.spm", "vocab.json"):
        vocab = folder.json("vocab.json")
        backend, unknown_from = backends.marian(vocab, sentencepiece.parse_model(folder.bytes("source.spm")))
        second, limit = backends.marian(vocab, sentencepiece.parse_model(folder.bytes("target.spm")))
        roles = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
        target = Tokenizer(second, roles=roles, unknown_from=limit)
    elif model_file := next((n for n in ("spiece.model", "tokenizer.model") if folder.has(n)), None):
        backend, roles = _sentencepiece(folder.bytes(model_file), model_file, config, family)
    elif folder.has("vocab.json", "merges.txt"):
        backend, roles = backends.bpe(folder.json("vocab.json"), folder.text("merges.txt"), config, family)
    elif folder.has("vocab.txt"):
        backend, roles = backends.wordpiece(folder.text("vocab.txt"), config)
    elif family == "byt5":
        backend, roles = backends.byt5(int(config.get("extra_ids", 125)))
    else:
        raise ValueError(
            f"no tokenizer in {path}: looked for tokenizer.json, vocab.json with merges.txt, vocab.txt, source.spm "
            "with target.spm and vocab.json, spiece.model, tokenizer.model, or a ByT5 tokenizer_config.json"
        )
    _add_tokens(backend, config, folder.settings("added_tokens.json"))
    named = {role: name for role in ROLES if (name := _token(config.get(f"{role}_token")))}
    if roles is not None or named:
        roles = {**(roles or {}), **named}
    return Tokenizer(
        backend,
        roles=roles,
        chat_template=_chat_template(folder, config),
        target=target,
        unknown_from=unknown_from,
    )


def _family(config: dict[str, Any], model: dict[str, Any]) -> str:
    """The tokenizer's family by tokenizer_class or model_type: "gpt2", "roberta", "byt5"; "" if neither is given."""
    name = config.get("tokenizer_class") or model.get("tokenizer_class") or ""
    name = str(name).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if name in ("", "pretrained", "tokenizersbackend"):
        name = str(model.get("model_type", "")).replace("-", "").replace("_", "").lower()
    return name


def _drop_extra_spaces(backend: tokenizers.Tokenizer) -> None:
    """T5's published tokenizer.json keeps a space at the end of a text, which its SentencePiece model drops."""
    unigram = isinstance(backend.model, models.Unigram) and backend.token_to_id("<extra_id_0>") is not None
    if unigram and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])


def _sentencepiece(
    data: bytes, name: str, config: dict[str, Any], family: str
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if data[:4].isascii() and b" " in data[:64] and data[:64].split(b" ")[1][:1].isdigit():
        raise ValueError(f"{name} is a tiktoken vocabulary; use the tokenizer.json that comes with the model")
    model = sentencepiece.parse_model(data)
    if family in ("t5", "mt5"):
        count = int(config.get("extra_ids", 100))
        names = [f"<extra_id_{index}>" for index in reversed(range(count))]
        model.pieces += [sentencepiece.Piece(text, 0.0, sentencepiece.CONTROL) for text in names]
    backend = sentencepiece.to_backend(model, prefix_first_only=config.get("legacy") is False)
    ids = {"bos": model.bos_id, "eos": model.eos_id, "pad": model.pad_id, "unk": model.unk_id}
    roles = {role: piece for role, index in ids.items() if (piece := model.piece(index))}
    unigram = model.kind == sentencepiece.UNIGRAM
    before = roles.get("bos") if config.get("add_bos_token", not unigram) else None
    after = roles.get("eos") if config.get("add_eos_token", unigram) else None
    backends.wrap_with_special_tokens(backend, before, after)
    return backend, roles


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], legacy: dict[str, Any]) -> None:
    """Tokens that were added to the vocabulary later, at the ids that the files give."""
    wanted: dict[int, AddedToken] = {}
    for content, index in legacy.items():
        wanted[int(index)] = AddedToken(content, normalized=True, special=False)
    for key, flags in (config.get("added_tokens_decoder") or {}).items():
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        chosen = {name: bool(flags[name]) for name in names if name in flags}
        wanted[int(key)] = AddedToken(flags["content"], **chosen)
    present = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for index, token in sorted(wanted.items(), key=lambda entry: entry[0]):
        if present.get(token.content, not token.special) == token.special and token.content in present:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != index:
            got = backend.token_to_id(token.content)
            raise ValueError(f"the added token {token.content!r} should have id {index} but would get {got}")
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    contents = [_token(value) for value in (extra.values() if isinstance(extra, dict) else extra)]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [content for content in contents if content and content not in special]
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def _chat_template(folder: Folder, config: dict[str, Any]) -> str | None:
    if folder.has("chat_template.jinja"):
        return folder.text("chat_template.jinja")
    template = config.get("chat_template", folder.settings("chat_template.json").get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
