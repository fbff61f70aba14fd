"""Structured output: how many texts are valid, and what a schema costs.

    python benchmarks/structured.py --schemas FOLDER [--each 5] [--model smollm2-135m-instruct] [--rounds 5]
        [--tokens 128] [--max-tokens 1024] [--count]

FOLDER has JSON schemas, one in a file (*.json), as those of JSONSchemaBench (Geng et al. 2025, arXiv 2501.10868;
github.com/guidance-ai/jsonschemabench, folder data), which have licences of their own and are not part of this project.

accepted    how many of the schemas can be followed; with --count nothing else is measured. Names begin with the part of
            the collection and a hyphen; --each takes so many of each part, in the order of a hash of their paths.
valid       a completion for each schema, sampled, with a frequency penalty, without which a small model repeats itself
            in a string or number that has no bound; jsonschema is the judge. A schema that cannot be followed is
            refused, and a completion that --max-tokens cut is no JSON: both are counted on their own.
speed       tokens per second of completions of --tokens tokens, greedy, under a schema that goes on for longer, and
            without one; 1 and 8 at a time. Rounds alternate; the loss is the median of the rounds' ratios.
first token the time from a request to its first token with a schema that was never seen, and without one; alternating,
            medians. The tokenizer's own tables are built before, by the first schema of all.
same        whether a grammar that allows every text leaves all tokens as they are, greedy and sampled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

import heedful
from heedful.generate.engine import Engine
from heedful.generate.grammar import Grammar
from heedful.generate.matcher import new_matcher
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate_as_stored

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "city", "colour"],
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}
ANYTHING = Grammar.regex(r"(.|\n)*")
PROMPTS = [
    "Make up some people, as JSON.",
    "Who lives in this town? Answer with a list in JSON.",
    "Tell me about the sea.",
    "What is a lighthouse?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, help="without it, validity is not measured")
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--count", action="store_true", help="count the schemas that are accepted, and end")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=1024)
    options = parser.parse_args()
    loaded = heedful.load(options.model)
    accelerate_as_stored(loaded.model)
    print(f"{loaded}\n", flush=True)
    chosen = [] if options.schemas is None else accepted(loaded, options.schemas, options.each)
    if options.count:
        return
    loaded.generate("x", schema=PERSON, max_tokens=1)  # builds the tokenizer's tables
    measure_same(loaded)
    measure_first_token(loaded, options.rounds)
    for n_rows in 1, 8:
        measure_speed(loaded, n_rows, options.rounds, options.tokens)
    if chosen:
        measure_validity(loaded, sorted(chosen), options.max_tokens)


def accepted(loaded: heedful.Loaded, folder: Path, each: int) -> list[Path]:
    """Count the schemas that can be followed; the first ones of each part."""
    assert loaded.tokenizer is not None
    in_collection = {path: f"data/{path.name.replace('-', '/', 1)}" for path in folder.glob("*.json")}
    paths = sorted(in_collection, key=lambda path: hashlib.sha256(in_collection[path].encode()).hexdigest())
    parts: dict[str, list[Path]] = {}
    for path in paths:
        try:
            new_matcher(loaded.tokenizer.target, Grammar.json_schema(path.read_text()), ())
            parts.setdefault(path.name.split("-")[0], []).append(path)
        except ValueError as error:
            print(f"  {path.name}: refused: {str(error)[:100]}")
    print(f"accepted: {sum(map(len, parts.values()))} of {len(paths)} schemas", flush=True)
    return [path for found in parts.values() for path in found[:each]]


def make_request(loaded: heedful.Loaded, text: str, grammar: Grammar | None, max_tokens: int, **more: Any) -> Request:
    ids, source = loaded.encode_prompt([{"role": "user", "content": text}], chat=True)
    sampling = Sampling(**{"temperature": 0.0, **more})
    ends = frozenset(loaded.chat_eos_ids)
    return Request(ids, source, max_tokens, sampling, stop_ids=ends, min_tokens=0, grammar=grammar)


def seconds_per_token(loaded: heedful.Loaded, requests: Sequence[Request]) -> float:
    """Seconds for a token of every row, after the first."""
    engine = Engine(loaded.model, loaded.tokenizer, chunk=4096)
    for request in requests:
        engine.add(request)
    n, begin = 0, 0.0
    while engine.busy:
        engine.step()
        begin = begin or time.perf_counter()
        n += 1
    return (time.perf_counter() - begin) / (n - 1)


def measure_speed(loaded: heedful.Loaded, n_rows: int, rounds: int, n_tokens: int) -> None:
    people = Grammar.json_schema(PEOPLE)
    free, held = [], []
    for i in range(rounds + 1):  # the first is a warm-up
        prompts = [f"{PROMPTS[0]} Town {i * n_rows + row}." for row in range(n_rows)]
        for grammar, times in ((None, free), (people, held))[:: -1 if i % 2 else 1]:
            requests = [make_request(loaded, prompt, grammar, n_tokens) for prompt in prompts]
            if grammar is None:
                requests = [
                    Request(r.prompt, r.source, n_tokens, r.sampling) for r in requests
                ]  # goes on like the others
            times.append(seconds_per_token(loaded, requests))
    lost = statistics.median(1 - a / b for a, b in zip(free[1:], held[1:], strict=True))
    rates = [n_rows / statistics.median(times[1:]) for times in (free, held)]
    print(
        f"speed, {n_rows} at a time: {rates[0]:,.1f} tokens/s without a schema, {rates[1]:,.1f} with one: "
        f"{100 * lost:.1f} % lost (at most 5)",
        flush=True,
    )


def measure_first_token(loaded: heedful.Loaded, rounds: int) -> None:
    free, held = [], []
    for i in range(4 * rounds + 1):
        new = {**PERSON, "properties": {**PERSON["properties"], f"field{i}": {"type": "number"}}}
        for grammar, times in ((None, free), (Grammar.json_schema(new), held))[:: -1 if i % 2 else 1]:
            request = make_request(loaded, f"{PROMPTS[1]} Number {i}.", grammar, 1)
            engine = Engine(loaded.model, loaded.tokenizer)
            begin = time.perf_counter()
            engine.run([request])
            times.append(time.perf_counter() - begin)
    a, b = (1e3 * statistics.median(times[1:]) for times in (free, held))
    print(f"first token: {a:.1f} ms without, {b:.1f} ms with a new schema: {b - a:+.1f} ms (at most +50)", flush=True)


def measure_same(loaded: heedful.Loaded) -> None:
    engine, alike, total = Engine(loaded.model, loaded.tokenizer), 0, 0
    for text in PROMPTS:
        for sampling in {}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "seed": 2}:
            pair = [make_request(loaded, text, grammar, 48, **sampling) for grammar in (None, ANYTHING)]
            one, other = (engine.run([request])[0].choices[0] for request in pair)
            total += 1
            alike += (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
    print(f"same: {alike} of {total} texts where the grammar allows every text", flush=True)


def measure_validity(loaded: heedful.Loaded, files: Sequence[Path], max_tokens: int) -> None:
    outcomes: Counter[str] = Counter()
    for file in files:
        schema = json.loads(file.read_text())
        about = schema.get("title") or schema.get("description") or file.stem
        outcome = complete(loaded, schema, str(about)[:200], max_tokens)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome != "valid":
            print(f"  {file.name}: {outcome[:150]}", flush=True)
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    written = len(files) - outcomes["refused"]
    print(f"valid: {100 * outcomes['valid'] / max(1, written):.0f} % of {written} schemas ({counts})")


def complete(loaded: heedful.Loaded, schema: dict[str, Any], about: str, max_tokens: int) -> str:
    """What came of a completion: valid, cut, invalid, or refused with the reason."""
    text = f"Give an example, as short as possible, in JSON: {about}"
    try:
        how = {"temperature": 0.7, "frequency_penalty": 0.5, "seed": 0}
        request = make_request(loaded, text, Grammar.json_schema(schema), max_tokens, **how)
        (choice,) = Engine(loaded.model, loaded.tokenizer).run([request])[0].choices
    except ValueError as problem:
        return f"refused: {problem}"
    if choice.finish_reason == "length":
        return f"cut: {choice.text[-60:]!r}"
    try:
        kind = jsonschema.validators.validator_for(schema)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(choice.text))
    except (ValueError, jsonschema.ValidationError) as problem:
        return f"invalid: {str(problem).splitlines()[0]} in {choice.text[-60:]!r}"
    return "valid"


if __name__ == "__main__":
    main()
