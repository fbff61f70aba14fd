"""Translation by an encoder-decoder: what `translate` adds to `generate`.

    length       at most the source's tokens + 50 (Vaswani et al. 2017, section 6.1)
    repetition   no n-gram twice, where n is longer than what the source itself repeats (after Paulus et al. 2018)
    sentence     a model that was trained on whole sentences alone has never seen a source without its full stop, and
                 then writes without end. Its generation_config.json says so ("sentence_end": "."): such a source is
                 read with a full stop, which is taken off the translation again

What the caller asks for, and what the model's files say about repetition, counts above these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from heedful.generate.request import Request, Result
from heedful.models.base import Model
from heedful.text.blank import is_blank

EXTRA_TOKENS = 50  # that a translation may have more than its source
SHORTEST_REPEAT = 5  # shorter n-grams may be repeated: "in the", "of the European Union"
SENTENCE_END = "sentence_end"  # in generation_config.json
TERMINATORS = ".!?…。！？"
CLOSING = "\"'”’»«“)]"  # may follow the end of a sentence
OPEN_ENDS = ",;:–- "  # end a fragment; the full stop comes before them
USUAL = 0.99  # the share of training sentences that end so
MAX_REPEAT = 64  # tokens


def split_end(text: str, end: str) -> tuple[str, str | None]:
    """A source as the model is used to it, and what replaces `end` in its translation (None: nothing does)."""
    bare = text.rstrip()
    if not end or is_blank(text) or bare.rstrip(CLOSING).endswith(tuple(TERMINATORS)):
        return text, None
    body = bare.rstrip(OPEN_ENDS)
    return (body + end, bare[len(body) :].rstrip()) if body else (text, None)


def restore_end(translation: str, end: str, replacement: str | None) -> str:
    """The translation of a source that `split_end` gave."""
    if replacement is None or not translation.endswith(end):
        return translation
    return translation.removesuffix(end) + replacement


def sentence_end(model: Model) -> str:
    """What every sentence ends with that the model was trained on; "" for a model of all kinds of text."""
    end = model.generation.get(SENTENCE_END) or ""
    if not isinstance(end, str) or len(end) > 4:
        raise ValueError(f"generation_config.json: {SENTENCE_END} must be a short text such as '.', got {end!r:.50}")
    return end


def sentence_end_of(texts: Sequence[str]) -> str:
    """ "." if nearly all texts that a model is trained on are whole sentences; else ""."""
    bare = [text.rstrip().rstrip(CLOSING) for text in texts]
    whole = sum(text.endswith(tuple(TERMINATORS)) for text in bare)
    stops = sum(text.endswith(".") for text in bare)
    return "." if whole >= USUAL * len(bare) and 2 * stops > len(bare) else ""


def limit_request(request: Request, asked: Mapping[str, Any], longest: int | None) -> Request:
    """A request with the limits of a translation where the caller asked for none; `longest` is the model's own."""
    source = request.source or ()
    if asked.get("max_tokens") is None:
        limit = len(source) + EXTRA_TOKENS
        limit = max(request.min_tokens, limit if longest is None else min(limit, longest))
        request = replace(request, max_tokens=limit)
    if asked.get("no_repeat_ngram_size") is None and not request.sampling.no_repeat_ngram_size:
        size = max(SHORTEST_REPEAT, 2 * longest_repeat(source) + 1)
        request = replace(request, sampling=replace(request.sampling, no_repeat_ngram_size=size))
    return request


def longest_repeat(tokens: Sequence[int]) -> int:
    """The length of the longest n-gram that occurs twice, at most MAX_REPEAT; 0 if no token does."""
    for size in range(1, MAX_REPEAT + 1):
        ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        if len(set(ngrams)) == len(ngrams):
            return size - 1
    return MAX_REPEAT


def restore_ends(results: Sequence[Result], end: str, replacements: Sequence[str | None]) -> list[Result]:
    """The results with `restore_end` of their texts."""
    return [
        replace(result, choices=[replace(c, text=restore_end(c.text, end, replacement)) for c in result.choices])
        for result, replacement in zip(results, replacements, strict=True)
    ]
