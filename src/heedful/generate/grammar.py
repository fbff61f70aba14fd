"""What a completion must match, as plain data: a JSON schema, a regular expression or a context-free grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from heedful.text.parse import parse_json

GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

MAX_CHOICES = 4096  # more take long to compile

Kind = Literal["json_schema", "regex", "lark", "gbnf"]


@dataclass(frozen=True)
class Grammar:
    """What a completion must match, and where it may end. Make one with a method of the class."""

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Any) -> Grammar:
        """JSON that a schema allows: a dict, its JSON text, or a class with `model_json_schema` (pydantic's).
        Properties come in the order of the schema."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = parse_json(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the schema is not JSON: {error}") from None
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that all of a regular expression matches (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", _text("a regular expression", pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in Lark's notation, with llguidance's additions (%json, special tokens)."""
        return cls("lark", _text("a grammar", text))

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """A context-free grammar in llama.cpp's notation."""
        return cls("gbnf", _text("a grammar", text))

    @classmethod
    def cfg(cls, text: str) -> Grammar:
        """A context-free grammar in either notation: GBNF has rules with ::=, Lark with a colon."""
        return cls.gbnf(text) if GBNF_RULE.search(_text("a grammar", text)) else cls.lark(text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if not isinstance(texts, list | tuple) or not texts:
            raise ValueError(f"a choice is one of several texts, as a list, not {texts!r:.100}")
        if len(texts) > MAX_CHOICES:
            raise ValueError(f"a choice has at most {MAX_CHOICES:,} texts, and these are {len(texts):,}")
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"a choice is one of several texts, none of them empty, not {texts!r:.100}")
        return cls.lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is a text, not {value!r:.100}")
    return value
