"""Rewards by a rule: whether a completion is right, 1 or 0, without a judge. White space around it does not count.

exact         it is the answer
contains      the answer is a part of it
regex         the answer is a regular expression that all of it matches
json_schema   the answer is a JSON schema that allows it, with properties in its order, as structured output has them
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from heedful.text.parse import parse_json


def is_exactly(completion: str, answer: str) -> float:
    """1 if the completion is the answer."""
    return float(completion.strip() == answer.strip())


def contains_answer(completion: str, answer: str) -> float:
    """1 if the answer is a part of the completion."""
    return float(answer.strip() in completion)


def matches_pattern(completion: str, answer: str) -> float:
    """1 if the regular expression matches all of the completion."""
    return float(_pattern(answer).fullmatch(completion.strip()) is not None)


def is_json_of_schema(completion: str, answer: str) -> float:
    """1 if the completion is JSON that the schema allows."""
    tokenizer, grammar = _schema(answer)
    from llguidance import LLMatcher

    matcher, tokens = LLMatcher(tokenizer, grammar), tokenizer.tokenize_bytes(completion.strip().encode())
    return float(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


RULES: dict[str, Callable[[str, str], float]] = {
    "exact": is_exactly,
    "contains": contains_answer,
    "regex": matches_pattern,
    "json_schema": is_json_of_schema,
}


def check_reward_answer(rule: str, answer: str) -> None:
    """ValueError if a rule cannot use this answer."""
    if not answer.strip():
        raise ValueError(f"the rule {rule!r} compares with an answer, and this one is empty")
    if rule == "regex":
        _pattern(answer)
    elif rule == "json_schema":
        _schema(answer)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as problem:
        raise ValueError(f"{text!r} is no regular expression: {problem}") from None


@cache
def _schema(text: str) -> tuple[Any, str]:
    """A tokenizer of bytes and the grammar of a schema."""
    from llguidance import LLMatcher, LLTokenizer

    try:
        grammar: str = LLMatcher.grammar_from_json_schema(parse_json(text))
    except ValueError as problem:
        raise ValueError(f"the schema {text[:80]!r} is not JSON: {problem}") from None
    tokenizer = LLTokenizer("byte")
    if wrong := LLMatcher.validate_grammar(grammar, tokenizer):
        raise ValueError(f"the schema {text[:80]!r} is not understood: {wrong}")
    return tokenizer, grammar
