"""Constrained decoding: which tokens may come next, so that a text matches its grammar, by llguidance.

A grammar is compiled once for a tokenizer; each sequence then has a `Matcher`, a parser that reads its tokens as they
are sampled and gives a bit for every token of the vocabulary: whether some text that matches begins like that
(Willard and Louf 2023; llguidance's parser is Earley's over a lexer of derivatives). Sampling sets the logits of the
others to -inf. Where the grammar fixes what follows, the tokenizer's own tokens for it are the only ones allowed.

A sequence ends when nothing more can follow. Where it may end or go on, the stop tokens are allowed beside the others:
the model chooses.

What a client may send is bounded: the size of a grammar, of its regular expressions, the work of a step and the memory
of a parser. Deep grammars are compiled on a deep stack, since llguidance recurses.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from heedful.generate.grammar import Grammar, Kind
from heedful.generate.json_schema import patterns_of, with_defaults
from heedful.text.token_bytes import strips_first_space, token_bytes
from heedful.text.tokenizer import Tokenizer

R = TypeVar("R")
NAMES: dict[Kind, str] = {
    "json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar", "gbnf": "GBNF grammar",
}  # fmt: skip
# Characters that a grammar may have; the time to compile some of them grows as their square.
MAX_SCHEMAS = 2**17
MAX_PATTERNS = 2**13  # of the regular expressions in schemas
MAX_CHARACTERS: dict[Kind, int] = {"json_schema": MAX_SCHEMAS, "regex": 2**13, "lark": 2**15, "gbnf": 2**15}
LIMITS = LLParserLimits(
    step_max_items=10_000, step_lexer_fuel=50_000, max_lexer_states=20_000, max_grammar_size=100_000,
    verbose_errors=False,
)  # fmt: skip
STACK = 2**27  # bytes for compiling
PROBED = 3  # tokens of a text that are tried, to find what is too complex before it runs
STUCK = "the model's vocabulary has no token with which the text could go on"
FEW_CORES = 8  # on fewer, threads for the masks of a batch cost more than they save
COMPILED = 32  # grammars that are kept compiled


class GrammarFailed(ValueError):
    """The grammars of these rows allow no token. Raised before any sampler has advanced."""

    def __init__(self, rows: list[int], problem: str) -> None:
        self.rows = rows
        super().__init__(problem)


class Matcher:
    """The parser of one sequence: the tokens that may be next, after those that were accepted.

    `complete` says that the text matches and nothing can follow, or that a stop token has ended it.
    """

    def __init__(self, state: LLMatcher, n_tokens: int, stop_ids: Collection[int]) -> None:
        self._state, self.n_tokens, self._stop_ids = state, n_tokens, stop_ids
        self.complete = False

    def copy(self) -> Matcher:
        """Another one that has accepted the same tokens."""
        other = Matcher(self._state.deep_copy(), self.n_tokens, self._stop_ids)
        other.complete = self.complete
        return other

    def accept(self, token: int) -> None:
        """Read the next token of the sequence. One that is not allowed makes the next mask fail."""
        if self.complete or token in self._stop_ids:
            self.complete = True
            return
        self._state.consume_token(token)
        if not self._state.is_error():
            self.complete = self._state.is_stopped() or (not self._stop_ids and self._only_ends())

    def _only_ends(self) -> bool:
        """Whether the text may end and no token can follow; there is no stop token to be sampled instead."""
        return self._state.is_accepting() and not _take_end(_words(self._state.compute_bitmask()), self.n_tokens)[0]

    def allowed(self, words: NDArray[np.uint32], n_logits: int, banned: Collection[int]) -> str | None:
        """Complete the parser's bits: stop tokens where the text may end, no `banned` token unless all are, none that
        has no logit. What is wrong if none is left."""
        if self._state.is_error():
            return _problem(self._state)
        _, ends = _take_end(words, self.n_tokens)
        if n_logits < self.n_tokens:
            words[n_logits >> 5] &= np.uint32((1 << (n_logits & 31)) - 1)
            words[(n_logits >> 5) + 1 :] = 0
        for token in self._stop_ids if ends else ():
            words[token >> 5] |= np.uint32(1 << (token & 31))
        if banned:
            left = words.copy()
            for token in banned:
                left[token >> 5] &= ~np.uint32(1 << (token & 31))
            words[:] = left if left.any() else words
        return None if words.any() else STUCK


def allowed_tokens(matchers: Sequence[Matcher], n_logits: int, banned: Sequence[Collection[int]]) -> NDArray[np.uint32]:
    """A bit for every token that each sequence may have next, 32 to a word: (B, words). `banned` tokens are not
    allowed unless there is no other."""
    masks = np.empty((len(matchers), matchers[0].n_tokens // 32 + 1), np.uint32)
    if len(matchers) == 1 or (os.cpu_count() or 1) < FEW_CORES:
        for matcher, words in zip(matchers, masks, strict=True):
            matcher._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    else:
        states = [(matcher._state, row) for row, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(states, masks.ctypes.data, masks.shape[1] * 4, len(masks))
    found = [matcher.allowed(words, n_logits, ids) for matcher, words, ids in zip(matchers, masks, banned, strict=True)]
    if wrong := {row: problem for row, problem in enumerate(found) if problem is not None}:
        problem = next(iter(wrong.values()))
        raise GrammarFailed(list(wrong), f"no token is allowed by the grammar: {problem}")
    return masks


def _words(bits: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(bits, np.uint32).copy()


def _take_end(words: NDArray[np.uint32], end: int) -> tuple[bool, bool]:
    """Clear the bit of the end: whether another one is left, and whether it was set."""
    bit = np.uint32(1 << (end & 31))
    ends = bool(words[end >> 5] & bit)
    words[end >> 5] &= ~bit
    return bool(words.any()), ends


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


# --- compiling -------------------------------------------------------------------------------------------------------


def new_matcher(tokenizer: object, grammar: Grammar, stop_ids: Collection[int], *, at_start: bool = False) -> Matcher:
    """The matcher of a new sequence. ValueError for a grammar that is wrong, too large, or not for this vocabulary.

    `at_start`: no text stands before it, as in an encoder-decoder's answer.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError("structured output needs the model's tokenizer: give the engine one")
    state = compile_grammar(tokenizer, grammar, at_start and strips_first_space(tokenizer))
    return Matcher(state.deep_copy(), tokenizer.vocab_size, stop_ids)


@lru_cache(maxsize=COMPILED)
def compile_grammar(tokenizer: Tokenizer, grammar: Grammar, with_space: bool = False) -> LLMatcher:
    """A parser at its begin; `with_space` it may read a space first, which decoding leaves out. ValueError as above."""
    return _on_deep_stack(lambda: _compile(tokenizer, grammar, with_space))


def _compile(tokenizer: Tokenizer, grammar: Grammar, with_space: bool) -> LLMatcher:
    name = NAMES[grammar.kind]
    try:
        _check_size(grammar)
        parts = {"grammars": [_definition(grammar)]}
    except Exception as error:
        raise ValueError(f"the {name} cannot be used: {error}") from None
    if with_space:
        parts["grammars"] = [{"lark_grammar": 'start: " "? @text'}, {"name": "text", **parts["grammars"][0]}]
    state = LLMatcher(_llguidance_tokenizer(tokenizer), json.dumps(parts), log_level=0, limits=LIMITS)
    if state.is_error():
        raise ValueError(f"the {name} cannot be used: {_problem(state)}")
    _probe(state.deep_copy(), name, tokenizer.vocab_size)
    return state


def _check_size(grammar: Grammar) -> None:
    """ValueError for more characters than may be compiled. Schemas inside a Lark grammar (%json) count as schemas."""
    schemas = [json.loads(grammar.text)] if grammar.kind == "json_schema" else []
    n_other, n_schemas = len(grammar.text), 0
    for place in re.finditer(r"%json\s*", grammar.text) if grammar.kind == "lark" else ():
        schema, end = json.JSONDecoder().raw_decode(grammar.text, place.end())
        schemas.append(schema)
        n_schemas += end - place.end()
    counts = (
        ("it has", n_other - n_schemas, MAX_CHARACTERS[grammar.kind]),
        ("its schemas have", n_schemas, MAX_SCHEMAS),
        ("the patterns of its schemas have", sum(map(len, patterns_of(schemas))), MAX_PATTERNS),
    )
    for what, n, most in counts:
        if n > most:
            raise ValueError(f"{what} {n:,} characters, and may have {most:,}: make it smaller")


def _definition(grammar: Grammar) -> dict[str, Any]:
    """The grammar in llguidance's form."""
    match grammar.kind:
        case "json_schema":
            return {"json_schema": with_defaults(json.loads(grammar.text))}
        case "regex":
            (definition,) = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"]
            return {"lark_grammar": definition["lark_grammar"]}
        case "gbnf":
            return {"lark_grammar": gbnf_to_lark(grammar.text)}
    return {"lark_grammar": grammar.text}


def _probe(state: LLMatcher, name: str, end: int) -> None:
    """ValueError if a text cannot even begin."""
    for place in range(PROBED):
        words = _words(state.compute_bitmask())
        more, ends = _take_end(words, end)
        if not more and ends and not state.is_error():
            if place:
                return
            raise ValueError(f"the {name} allows the empty text alone")
        if more:
            first = int(np.flatnonzero(words)[0])
            state.consume_token(first * 32 + (int(words[first]) & -int(words[first])).bit_length() - 1)
        if state.is_error() and _problem(state) != STUCK:
            raise ValueError(f"the {name} is too complex: {_problem(state)}")
        if state.is_error() or not more:
            raise ValueError(f"the model's vocabulary has no tokens for a text that the {name} allows")


def _problem(state: LLMatcher) -> str:
    """An error of llguidance in one line, without the place in a text that it made itself."""
    error = state.get_error().replace("<non-verbose/>", "")
    if "NoExtension" in error or "doesn't satisfy" in error:
        return STUCK
    lines = [line.strip() for line in error.splitlines()]
    found = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), " ".join(lines[:2]))
    return found.strip()[:300]


class _Spelling:
    """A tokenizer as llguidance wants it: the bytes of every token, and the tokens of a text. The token after the last
    one stands for the end of a text, whichever the stop tokens are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.bos_token_id, self.eos_token_id = tokenizer, None, tokenizer.vocab_size
        self.tokens = [*token_bytes(tokenizer), b"<end>"]
        self.special_token_ids = [*tokenizer.special_tokens.values(), self.eos_token_id]
        self.greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """The tokenizer's own tokens, the longest that fit where those stand for another text (one with a space before
        it, one in lower case); none where the text cannot be written."""
        for encode in self.tokenizer.encode, self.greedy:
            ids = [] if encode is None else encode(text)
            if b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return []


@lru_cache(maxsize=8)
def _llguidance_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    spelling = _Spelling(tokenizer)
    built = LLTokenizer(TokenizerWrapper(spelling))
    spelling.greedy = built.greedy_tokenize
    return built


def _on_deep_stack(function: Callable[[], R]) -> R:
    """The result of a function that may recurse deeply, from a thread with room for it."""
    outcome: list[R | BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="compile a grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
