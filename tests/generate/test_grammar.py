"""Structured output: every text is what its grammar allows, by the judgement of jsonschema and re."""

from __future__ import annotations

import json
import re
import string
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel, Field

import heedful
from heedful.generate import matcher
from heedful.generate.engine import Engine
from heedful.generate.grammar import Grammar
from heedful.generate.matcher import MAX_CHARACTERS, new_matcher
from heedful.generate.request import Request, Sampling
from heedful.generate.sampling import Sampler, sample
from heedful.models.base import DecoderModel, GenerativeModel
from heedful.text import byte_tokens, characters, train_unigram, words
from heedful.text.token_bytes import token_bytes
from heedful.text.tokenizer import Tokenizer
from support.families import CASES

GENERATING = [case for case in CASES if case.generates and "image" not in case.name]
FAMILIES = {re.match("[a-z_]+", case.name)[0]: case for case in reversed(GENERATING)}  # the first case of each
ALPHABET = string.ascii_lowercase + '{}[]":,. 0123'
COLOURS = {"enum": ["red", "green", "blue"]}
# Small schemas that bound all they allow, one for each feature; a random model ends each of them.
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": COLOURS}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": COLOURS}},  # nothing required
    {"type": "array", "items": COLOURS, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["null", "boolean"]},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": COLOURS}, "required": ["a"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"$defs": {"c": COLOURS}, "type": "object", "properties": {"d": {"$ref": "#/$defs/c"}}, "required": ["d"]},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "additionalProperties": False,
     "minProperties": 1, "maxProperties": 2},
    {"const": {"x": [1, 2, {"y": None}]}},
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}


@cache
def books() -> heedful.Loaded:
    return heedful.load("tiny-books")


@cache
def letters() -> Tokenizer:
    """As many characters as the tiny models have tokens."""
    return characters([ALPHABET], special=["<unk>", "</s>"])


def request_for(model: GenerativeModel[Any], grammar: Grammar | None, seed: int = 0, **more: Any) -> Request:
    inputs = {"prompt": (5, 7, 9)} if isinstance(model, DecoderModel) else {"source": (5, 7, 9)}
    options = {"max_tokens": 50, "stop_ids": frozenset([1])} | more
    return Request(**inputs, sampling=Sampling(seed=seed), grammar=grammar, **options)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES.values(), ids=lambda case: case.name)
def test_every_family_writes_what_the_schema_allows(case):
    model, grammar = case.model(), Grammar.json_schema(SCHEMAS[0])
    requests = [request_for(model, grammar, seed) for seed in range(2)] + [request_for(model, None)]
    engine = Engine(model, letters())
    *held, free = engine.run(requests)
    for result in held:
        jsonschema.validate(json.loads(result.choices[0].text), SCHEMAS[0])
        assert result.choices[0].finish_reason == "stop"
    assert (
        free.choices[0].tokens == engine.run([requests[-1]])[0].choices[0].tokens
    )  # one without a grammar beside them


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_every_feature_of_schemas_is_valid(schema):
    texts = [r.text for r in books().complete("As JSON: ", schema=schema, n=4, seed=3, max_tokens=50)[0].choices]
    for text in texts:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("pattern", ["[a-c]{3}[0-9]{2}", "(yes|no), (sir|madam)!", r"\d{4}-\d\d-\d\d", "é|日本|👍👍"])
def test_a_regular_expression_matches_all_of_it(pattern):
    for choice in books().complete("When?", regex=pattern, n=4, seed=0)[0].choices:
        assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"


def test_grammars_in_both_notations_and_choices():
    sums = 'start: NUMBER (" + " NUMBER){1,2}\nNUMBER: /[0-9]{1,2}/'
    gbnf = 'root ::= number " + " number\nnumber ::= [0-9] [0-9]?'
    for grammar in sums, gbnf, Grammar.lark(sums), Grammar.gbnf(gbnf):
        assert re.fullmatch(r"\d{1,2}( \+ \d{1,2}){1,2}", books().generate("One sum: ", grammar=grammar, seed=1))
    options = ['say "no"', "a/b\\c\n", "naïve"]
    assert books().generate("?", grammar=Grammar.choice(options), seed=1) in options


def test_a_pydantic_class_a_json_text_and_a_stream():
    class Person(BaseModel):
        name: str = Field(max_length=12)
        age: int = Field(ge=0, le=99)

    text = books().generate("Someone: ", schema=Person, seed=4)
    assert Person.model_validate_json(text)
    assert text == books().generate("Someone: ", schema=json.dumps(Person.model_json_schema()), seed=4)
    assert text == "".join(books().stream("Someone: ", schema=Person, seed=4))
    assert json.loads(text).keys() == {"name", "age"}  # no others, which JSON Schema itself would allow
    loose = {**PERSON, "additionalProperties": True}
    texts = [c.text for c in books().complete("Someone: ", schema=loose, seed=4, n=6, max_tokens=40)[0].choices]
    assert any(re.match(r'\{"name": ".*", "age": \d+, ', text) for text in texts)


# --- beside other options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.8}, {"top_k": 9}])
def test_where_all_is_allowed_the_text_is_the_same(options):
    options |= {"seed": 5, "max_tokens": 40, "logprobs": 2, "repetition_penalty": 1.1}
    (free,) = books().complete("The king", **options)
    (held,) = books().complete("The king", regex=r"(.|\n)*", **options)
    assert held.choices == free.choices


def test_a_batch_is_the_same_as_one_by_one():
    grammars = [Grammar.json_schema(PERSON), Grammar.regex("[a-z ]{5,30}"), None, Grammar.json_schema(SCHEMAS[2])] * 2
    ids, _ = books().encode_prompt("A person, or a text: ")
    requests = [
        Request(ids, None, 40, Sampling(seed=i), stop_ids=frozenset(books().eos_ids), grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]
    engine = Engine(books().model, books().tokenizer)
    together = [result.choices for result in engine.run(requests)]
    assert together == [engine.run([request])[0].choices for request in requests]


def test_scores_are_the_models_own_and_answers_rank_by_them():
    (result,) = books().complete("Yes or no? ", regex="yes|no", logprobs=3, seed=0, n=1, best_of=3)
    (choice,) = result.choices
    ids, _ = books().encode_prompt("Yes or no? ")
    with torch.no_grad():
        logits = books().model(heedful.models.base.Batch(torch.tensor([ids]))).logits[0, -1]
    assert choice.scores[0].logprob == pytest.approx(float(logits.log_softmax(-1)[choice.tokens[0]]), abs=1e-4)
    assert choice.scores[0].top[0][1] > choice.scores[0].logprob  # what the model would have said


def test_lengths_stops_and_bans_keep_their_meaning():
    complete = books().complete
    (cut,) = complete("Tell: ", schema=PERSON, max_tokens=4, seed=0)
    assert cut.choices[0].finish_reason == "length" and len(cut.choices[0].tokens) == 4
    (stopped,) = complete("Tell: ", schema=PERSON, stop='"age"', seed=0)
    assert stopped.choices[0].text.endswith('", ') and stopped.choices[0].finish_reason == "stop"
    (long,) = complete("Tell: ", regex="[ab]+", min_tokens=20, max_tokens=30, seed=0)
    assert 20 <= len(long.choices[0].tokens) <= 30 and set(long.choices[0].text) <= set("ab")
    (short,) = complete("Tell: ", regex="ab", min_tokens=20, seed=0)  # the grammar comes first
    assert short.choices[0].text == "ab"
    (again,) = complete("Tell: ", regex="(na ){6}", no_repeat_ngram_size=2, seed=0)
    assert again.choices[0].text == "na " * 6
    (biased,) = complete("Tell: ", regex="a|b", logit_bias={books().tokenizer.id("b"): 100.0}, seed=0)
    assert biased.choices[0].text == "b"


def test_it_ends_without_a_stop_token():
    (result,) = books().complete("x", regex="[a-c]{4}", ignore_eos=True, seed=0, max_tokens=30)
    assert re.fullmatch("[a-c]{4}", result.choices[0].text) and result.choices[0].finish_reason == "stop"


def test_drafts_say_the_same_and_beams_refuse():
    options = {"schema": PERSON, "temperature": 0, "max_tokens": 60}
    plain = books().generate("A person: ", **options)
    assert books().generate("A person: ", draft="lookup", **options) == plain
    assert books().generate("A person: ", draft=books(), **options) == plain
    drawn = books().generate("A person: ", draft="lookup", schema=PERSON, seed=2)
    jsonschema.validate(json.loads(drawn), PERSON)
    with pytest.raises(ValueError, match="beam search and regex do not go together"):
        books().generate("x", regex="a", beams=3)
    assert heedful.load("translator").generate("Ein Hund.", regex="[a-z]{4} dog")[-4:] == " dog"  # without beams then


# --- tokenizers -------------------------------------------------------------------------------------------------------

TEXTS = ["the cat sees a dog", 'they say {"a": [1, 2]}, and so on. ' * 3, "a b c d e f"] * 4


def gpt1() -> Tokenizer:
    from heedful.text import backends

    pieces = [c for c in ALPHABET if c != " "]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *pieces, *(f"{p}</w>" for p in pieces), "th", "the</w>"])}
    backend, roles = backends.gpt1(vocab, [("t", "h"), ("th", "e</w>")])
    return Tokenizer(backend, roles=roles)


@pytest.mark.parametrize(
    "make",
    [byte_tokens, lambda: characters(TEXTS), lambda: words(TEXTS), lambda: train_unigram(TEXTS, 60), gpt1],
    ids=["bytes", "characters", "words", "unigram", "gpt1"],
)
def test_tokens_add_the_text_that_decoding_shows(make):
    tokenizer = make()
    texts, special = token_bytes(tokenizer), set(tokenizer.special_tokens.values())
    draw = torch.Generator().manual_seed(0)
    ids = [i for i in range(len(tokenizer)) if i not in special and texts[i].isascii()]
    for _ in range(20):
        chosen = [ids[i] for i in torch.randint(len(ids), (9,), generator=draw).tolist()]
        assert tokenizer.decode(chosen).strip() == b"".join(texts[i] for i in chosen).decode().strip()


def test_words_begin_without_a_space():
    """An encoder-decoder's answer begins with a word; the mask knows that its space is not shown."""
    tokenizer = words(["a b c", "c b a"])
    first = new_matcher(tokenizer, Grammar.regex("a b"), (), at_start=True)
    sampler = Sampler(Sampling(temperature=0), matcher=first)
    said = []
    while not first.complete:
        said += sample(torch.zeros(1, len(tokenizer)), [sampler])
    assert tokenizer.decode(said) == "a b"
    with pytest.raises(ValueError, match="vocabulary has no tokens"):
        new_matcher(tokenizer, Grammar.json_object(), ())


def test_a_vocabulary_that_cannot_is_named():
    shakespeare = heedful.load("shakespeare")
    with pytest.raises(ValueError, match="vocabulary has no tokens for a text that the JSON schema allows"):
        shakespeare.generate("ROMEO:", schema={"type": "object"})
    with pytest.raises(ValueError, match="no token with which the text could go on"):
        shakespeare.generate("ROMEO:", regex="[a-z]{5}[é]")


# --- what is refused --------------------------------------------------------------------------------------------------

CHAIN = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "x" * 9000}, "9,000 characters, and may have 8,192"),
        ({"regex": "a?" * 3000}, "too complex"),
        ({"regex": "()"}, "the empty text alone"),
        ({"regex": ""}, "a regular expression is a text"),
        ({"schema": {"type": "text"}}, "Invalid type: text"),
        ({"schema": {"not": {"type": "string"}}}, "not"),
        ({"schema": {"type": "string", "pattern": "a" * 9000}}, "patterns of its schemas have 9,000"),
        ({"schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
        ({"schema": "{"}, "the schema is not JSON"),
        ({"schema": [1]}, "a JSON schema is an object"),
        ({"schema": {"$ref": "https://example.com/schema.json"}}, "example.com"),
        ({"schema": '{"items":' * 500 + "{}" + "}" * 500}, "recursion"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": "root ::= " + "(" * 3000}, "GBNF grammar cannot be used"),
        ({"schema": {}, "regex": "a"}, "do not go together"),
    ],
)
def test_what_cannot_be_followed_is_a_mistake_with_its_reason(options, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        books().stream("x", **options)  # before anything is generated


def test_a_deep_chain_of_references_does_not_end_the_process():
    schema = {"$defs": {**CHAIN, "d2000": {"type": "null"}}, "$ref": "#/$defs/d0"}
    assert new_matcher(books().tokenizer, Grammar.json_schema(schema), ()) is not None
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(2500))
    assert new_matcher(books().tokenizer, Grammar.lark(f'start: r0\n{rules}\nr2500: "a"'), ()) is not None


def test_schemas_inside_a_grammar_count_as_schemas():
    many = {"type": "object", "properties": {f"name{i}": {"enum": ["a" * 30]} for i in range(900)}, "required": []}
    text = f"start: %json {json.dumps({**many, 'required': list(many['properties'])})}"
    assert len(text) > MAX_CHARACTERS["lark"]
    assert new_matcher(books().tokenizer, Grammar.lark(text), ()) is not None


def test_compiled_grammars_are_kept_for_a_while():
    before = matcher.compile_grammar.cache_info()
    for _ in range(3):
        books().generate("x", regex="[xyz]{2}", seed=0)
    after = matcher.compile_grammar.cache_info()
    assert after.misses - before.misses <= 1 and after.maxsize == 32
