"""Evaluations as text: a line for each score with its interval, tables of several models with paired tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from heedful.evaluate.bootstrap import RESAMPLES, PairedTest
from heedful.evaluate.evaluation import Evaluation, Score, compare
from heedful.text.plural import counted

MOST_LABELS = 12  # in a printed confusion matrix


def format_evaluation(result: Evaluation) -> str:
    """The scores of one model, signatures and confusion matrix, and where the items are."""
    lines = [f"{result.model}: {_about(result)}", ""]
    width = max(len(score.metric) for score in result.scores)
    lines += [f"{s.metric:<{width}}  {format_score(s):>10}   {format_interval(s)}" for s in result.scores]
    lines += _details(result)
    lines += ["", f"In brackets 95 % intervals: bootstrap over items, {RESAMPLES:,} resamples."]
    if result.folder is not None:
        lines.append(f"Every item: {result.folder / 'items.jsonl'}")
    return "\n".join(lines)


def format_comparison(results: Sequence[Evaluation]) -> str:
    """A table with a row for each metric and model, and a paired test of each model against the first."""
    first, *others = results
    lines = [f"{_about(first)}", ""]
    rows = [["metric", "model", "value", "95 % interval", "difference", "95 % interval", "p", "McNemar"]]
    notes: list[str] = []
    tests: dict[str, dict[str, PairedTest]] = {}
    for i, other in enumerate(others):
        try:
            tests[str(i)] = {test.metric: test for test in compare(first, other)}
        except ValueError as problem:
            notes.append(str(problem))
    for number, score in enumerate(first.scores):
        rows.append([score.metric, first.model, format_score(score), format_interval(score)])
        for i, other in enumerate(others):
            found = {s.metric: s for s in other.scores}.get(score.metric)
            if found is not None:
                test = tests.get(str(i), {}).get(score.metric)
                rows.append(["", other.model, format_score(found), format_interval(found), *_paired(test, score)])
        rows += [[]] * (number + 1 < len(first.scores) and len(others) > 1)
    lines += format_table(rows)
    lines.append("")
    if tests:
        exact = any(test.mcnemar is not None for found in tests.values() for test in found.values())
        how = f"the paired bootstrap ({RESAMPLES:,} resamples)" + ", and by McNemar's exact test" * exact
        lines.append(f"Differences are from {first.model}; p: of no difference, by {how}.")
    return "\n".join([*lines, *notes])


def format_saved(result: Mapping[str, Any], most: int = 3) -> str:
    """One line of a result as `Evaluation.to_dict` gives it: the task, its data and the first scores."""
    known: list[dict[str, Any]] = [
        {f.name: math.nan if s[f.name] is None else s[f.name] for f in fields(Score)} for s in result["scores"]
    ]
    scores = [Score(**one) for one in known[:most]]
    told = ", ".join(f"{s.metric} {format_score(s)} {format_interval(s)}" for s in scores)
    return f"{result['task']} on {result['data']}, {counted(result['n'], 'item')}: {told}"


def format_score(score: Score) -> str:
    """A value with its unit: 77.29 %, 41.35, 1.4508."""
    return f"{_number(score.value, score)} %" if score.unit == "%" else _number(score.value, score)


def format_interval(score: Score) -> str:
    """[low, high]"""
    return f"[{_number(score.low, score)}, {_number(score.high, score)}]"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text in columns, the first two on the left, numbers on the right; columns that are empty are left out."""
    n = max(len(row) for row in rows)
    full = [[*row, *[""] * (n - len(row))] for row in rows]
    kept = [c for c in range(n) if any(row[c] for row in full[1:])]
    widths = {c: max(len(row[c]) for row in full) for c in kept}
    return ["  ".join(f"{row[c]:{'<' if c < 2 else '>'}{widths[c]}}" for c in kept).rstrip() for row in full]


def _about(result: Evaluation) -> str:
    count = (
        counted(result.n, "item")
        if result.n == result.n_all
        else f"the first {result.n:,} of {counted(result.n_all, 'item')}"
    )
    return f"{result.task} on {result.data}, {count}"


def _number(value: float, score: Score) -> str:
    return f"{value:.2f}" if score.unit or abs(value) >= 10 else f"{value:.4f}"


def _paired(test: PairedTest | None, score: Score) -> list[str]:
    if test is None:
        return []
    digits = 2 if score.unit or abs(score.value) >= 10 else 4
    low, high = (f"{x:+.{digits}f}" for x in (test.low, test.high))
    exact = "" if test.mcnemar is None else _p(test.mcnemar)
    return [f"{test.difference:+.{digits}f}", f"[{low}, {high}]", _p(test.p), exact]


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def _details(result: Evaluation) -> list[str]:
    details, lines = result.details, list[str]()
    if signatures := details.get("signatures"):
        lines += ["", *(f"{name}: {signature}" for name, signature in signatures.items())]
    if "confusion" in details and len(details["labels"]) <= MOST_LABELS:
        names = details["labels"]
        rows = [["", "true \\ said", *names]]
        rows += [["", name, *map(str, row)] for name, row in zip(names, details["confusion"], strict=True)]
        lines += ["", *format_table(rows)]
    if "word accuracy" in details:
        lines += ["", f"{details['word accuracy']:.2f} % of the words have the right tag."]
    if "tokens" in details:
        lines += ["", f"{counted(details['tokens'], 'token')}, {counted(details['bytes'], 'byte')}."]
    return lines
