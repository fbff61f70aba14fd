"""What benchmarks/classification.py and the grammar of captions compute, against definitions and school grammar."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(Path(name).stem, BENCHMARKS / name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, Path(name).stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_calibration_error_is_the_gap_between_confidence_and_accuracy(monkeypatch):
    measure = script("classification.py", monkeypatch)
    chances = np.array([[0.9, 0.1]] * 10 + [[0.4, 0.6]] * 10)
    labels = np.array([0] * 7 + [1] * 3 + [1] * 6 + [0] * 4)  # 70 % of the sure ones are right, 60 % of the others
    assert measure.expected_calibration_error(chances, labels) == pytest.approx(0.5 * 0.2)
    sure = np.array([[0.99, 0.01]] * 100)
    right = np.array([0] * 80 + [1] * 20)
    temperature = measure.fit_temperature(sure, right)
    assert temperature > 1 and measure.heated(sure, temperature)[0, 0] == pytest.approx(0.8, abs=0.02)


def test_near_duplicates_are_in_one_part(monkeypatch):
    measure = script("classification.py", monkeypatch)
    assert len({measure.part_of(t) for t in ("Call 0800 now!", "call 0900 NOW", "CALL now...")}) == 1
    parts = [measure.part_of(f"{chr(97 + i % 26)} {chr(97 + i // 26)}") for i in range(600)]
    assert 0.6 < parts.count("train") / 600 < 0.8 and 0.1 < parts.count("test") / 600 < 0.3


def test_captions_are_declined_as_german_is(monkeypatch):
    captions = script("zoo_data/captions.py", monkeypatch)
    grammar = captions.Grammar(random.Random(0))
    few = [noun for noun in captions.NOUNS["person"] if noun.singular in ("Mann", "Frau", "Kind", "Junge")]
    with monkeypatch.context() as patch:
        patch.setitem(captions.NOUNS, "person", few)
        patch.setitem(captions.ADJECTIVES, "person", [("alt", "alt", "old")])
        forms = [(case, det, n) for case in captions.CASES for det in ("ein", "der", "kein") for n in (True, False)]
        said = {grammar.noun_phrase("person", *form).german for form in forms for _ in range(150)}
    assert {"ein alter Mann", "einen alten Mann", "einem alten Mann", "der alte Mann", "keine alte Frau"} <= said
    assert {
        "einen Jungen",
        "dem alten Jungen",
        "ein altes Kind",
        "den Kindern",
        "die alten Frauen",
        "alte Frauen",
    } <= said
    assert {"zwei alte Männer", "einigen alten Männern", "einer alten Frau", "keinen alten Kindern"} <= said
    assert not {"einen Junge", "den Junge", "einen Frau", "den Kinder", "ein alte Kind", "zwei alten Männer"} & said
    clauses = dict(grammar.sentence() for _ in range(4000))
    assert all(german[-1] in ".?" and german[-1] == english[-1] for german, english in clauses.items())
    assert not any(", ," in german or "  " in german or " ." in german for german in clauses)
    assert any(german.startswith("Während") and english.startswith("While") for german, english in clauses.items())
    assert any(" hat " in g and g.endswith("gelesen.") and " read " in e for g, e in clauses.items())
