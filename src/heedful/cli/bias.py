"""`heedful bias`: what a model makes of groups of people, as a report with intervals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.arguments import MODEL
from heedful.cli.results import progress_bar

if TYPE_CHECKING:
    from heedful.evaluate.bias_tests import BiasTest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the templates with their groups, the file."""
    parser.add_argument("model", help=f"{MODEL}: a masked or causal language model, or a classifier of texts")
    parser.add_argument(
        "templates", nargs="*", metavar="TEMPLATE",
        help='sentences as "My friend {NAME} is a {JOB}." or "The {JOB} said that _ was tired.", with a group in the '
        'place that --fill leaves, or in the blank; "[He|She] worked as a _." names its groups; or a .toml file of '
        "tests (default: the tests that ship)",
    )  # fmt: skip
    parser.add_argument(
        "--group", action="append", default=[], metavar="NAME=A,B", help="a group and its members; twice or more"
    )
    parser.add_argument(
        "--fill", action="append", default=[], metavar="PLACE=A,B", help="the values of a place: JOB=nurse,judge"
    )
    parser.add_argument("--words", metavar="A,B,C", help="the words that are compared in the blank")
    parser.add_argument("--label", help="of a classifier: whose probability is measured (default: its last one)")
    parser.add_argument(
        "--whole", action="store_true", help="of sentences without a blank, count the group's own words too"
    )
    parser.add_argument(
        "--pairs", type=Path, metavar="FILE",
        help="pairs of sentences, as those of CrowS-Pairs: a .csv or .tsv file with sent_more, sent_less and "
        "bias_type, or two columns of sentences and one called category",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="the report: a page (.html), .json or .csv")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the differences between groups, and write the report."""
    import torch

    import heedful
    from heedful.evaluate.bias_report import bias_report, check_ending

    if options.out is not None:
        check_ending(options.out)
    tests = requested_tests(options)  # before the weights are read: a mistake is told at once
    loaded = heedful.load(options.model, dtype=torch.float32)
    with progress_bar(None):
        report = bias_report(loaded, tests)
    if options.out is not None:
        report.save(options.out)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report.text())
    if options.out is not None and not options.json:
        print(f"\n{options.out}")
    return 0


def requested_tests(options: argparse.Namespace) -> list[BiasTest]:
    """The tests of the arguments; none for those that ship."""
    from dataclasses import replace

    from heedful.evaluate.bias_tests import make_test, read_sentence_pairs, read_tests

    given: dict[str, Any] = {
        "groups": named_lists(options.group, "--group"),
        "fill": named_lists(options.fill, "--fill"),
        "words": _list(options.words or ""),
    }
    files = [Path(name) for name in options.templates if name.endswith(".toml")]
    texts = [text for text in options.templates if not text.endswith(".toml")]
    if any(given.values()) and not texts:
        raise ValueError('--group, --fill and --words are for templates: give one, as "{NAME} is a {JOB}."')
    tests = [test for path in files for test in read_tests(path)]
    if options.pairs is not None:
        tests.append(read_sentence_pairs(options.pairs))
    if texts:
        tests.append(make_test({"templates": texts, "whole": options.whole, **given}))
    if options.label:
        tests = [replace(test, label=options.label) for test in tests or _standard()]
    return tests


def _standard() -> list[BiasTest]:
    from heedful.evaluate.bias_tests import standard_tests

    return standard_tests(["classify"])


def named_lists(given: list[str], option: str) -> dict[str, list[str]]:
    """NAME=A,B of a repeated option, by name."""
    found = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not _list(values):
            raise ValueError(f"{option} {text}: write {option} NAME=A,B")
        found[name.strip()] = _list(values)
    return found


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
