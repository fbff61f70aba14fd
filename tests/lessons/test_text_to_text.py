"""E1: T5's format, spans, buckets and missing scale; a slip of the pen in pieces and in bytes.

`t5-tasks` may be trained again, so what is asked of it here is easy.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from heedful.lessons.checks.text_to_text import corrupted
from heedful.nn.position import RelativeBias
from lessons.support import executed, verdict

RESULTS = Path(__file__).parents[2] / "RESULTS.md"


@pytest.fixture(scope="module")
def lesson():
    return executed("text-to-text")


def test_a_number_becomes_one_of_21_words(lesson):
    assert "2.57 becomes 2.6 - there are 21 such words" in lesson.text


def test_the_tasks_that_ship(lesson):
    translated, judged, answered, corrected = lesson.names["written"]
    assert "man" in translated.lower() and "house" in translated.lower()
    assert judged == "positive" and answered and corrected
    likeliest = {prefix: next(iter(tokens)) for prefix, tokens in lesson.names["first"].items()}
    assert likeliest["sentiment: "][0] in "pn"  # praise or blame
    assert lesson.names["first"]["translate German to English: "][likeliest["translate German to English: "]] > 0.5


def test_the_papers_example_of_corrupted_spans(lesson):
    assert "source: Thank you <X> me to your party <Y> week ." in lesson.text
    assert "target: <X> for inviting <Y> last <Z>\n" in lesson.text
    assert "568 tokens, 85 hidden in 28 spans" in lesson.text and "= 512" in lesson.text and "= 114" in lesson.text


def test_biases_depend_on_distance_alone(lesson):
    assert "the same along diagonals: True" in lesson.text
    assert lesson.names["moved"] < 1e-5
    assert len(lesson.names["bias"].weight) == 32
    assert "bucket  8: 8 to 11 steps back" in lesson.text and "bucket 14: 64 to 90 steps back" in lesson.text


def test_smaller_queries_do_what_the_division_does(lesson):
    for d, (plain, divided, small) in lesson.names["spread"].items():
        assert plain == pytest.approx(math.sqrt(d), rel=0.05)
        assert divided == pytest.approx(1, abs=0.05) and small == pytest.approx(1, abs=0.05)
    assert lesson.names["model"].encoder.blocks[0].attention.scale == 1


def test_slips_break_pieces_and_leave_bytes(lesson):
    losses, longer = lesson.names["losses"], lesson.names["longer"]
    assert losses["pieces"][-1] > 3 * losses["bytes"][-1] and losses["bytes"][-1] < 0.15
    assert longer["bytes"] == [1] * 5 and longer["pieces"][-1] > 1.3
    assert lesson.names["ratio"] > 3


def test_the_vocabularies_share_of_the_parameters(lesson):
    shares = lesson.names["vocabulary"]
    assert shares["t5-v1.1-small"] == pytest.approx(2 * 32128 * 512 / 76_961_152, abs=0.002)
    assert shares["byt5-small"] == pytest.approx(2 * 384 * 1472 / 299_637_760, abs=0.0002)
    assert "12 layers read, 4 write" in lesson.text


def test_the_table_of_spelling_is_that_of_results():
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    rows = {
        "| the text as it stands |": ("100 %", "17.8 %", "0.6 %"),
        "| `byt5-spelling` (": ("92.4 %", "39.2 %", "8.4 %"),
    }
    for begins, shares in rows.items():
        row = next(line for line in lines if line.startswith(begins)).split("|")[2:5]
        assert [cell.strip(" *").split(",")[0] for cell in row] == list(shares)


def by_token(tokens, hidden):
    gone = [i for i, is_hidden in enumerate(hidden) if is_hidden]
    source = [f"<{gone.index(i)}>" if i in gone else token for i, token in enumerate(tokens)]
    return source, [part for n, i in enumerate(gone) for part in (f"<{n}>", tokens[i])]


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("are exchanged", lambda source, target: (target, source)),
        ("no last sentinel", lambda source, target: (source, target[:-1] if target[-1][0] == "<" else target)),
        (
            "one sentinel too many",
            lambda source, target: (source, [*target, "<9>"] if target[-1][0] != "<" else target),
        ),
        ("has lost a token", lambda source, target: (source[1:], target)),
        ("two lists", lambda source, target: source),
        ("right", lambda source, target: (source, target)),
    ],
)
def test_wrong_spans_are_told_why(said, change, capsys):
    assert said in verdict(lambda t, h: change(*corrupted(t, h)), capsys, name="hide_spans")


def test_spans_token_by_token_are_told_why(capsys):
    assert "a sentinel of its own" in verdict(by_token, capsys, name="hide_spans")
    assert "still has a hidden token" in verdict(lambda t, h: (t, corrupted(t, h)[1]), capsys, name="hide_spans")


def bucket(distance):
    return RelativeBias(1, bidirectional=True).bucket(torch.tensor(distance)).item()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("sides are exchanged", lambda d: bucket(-d)),
        ("one bucket", lambda d: bucket(-abs(d))),
        ("not after itself", lambda d: bucket(d) if d else 16),
        ("below 8 have a bucket each", lambda d: bucket(d) if abs(d) > 7 else 16 * (d > 0)),
        ("15 is the last", lambda d: min(abs(d), 8) + int(max(0, 8 * math.log(max(abs(d), 8) / 8, 16))) + 16 * (d > 0)),
        ("logarithmic scale", lambda d: min(abs(d), 15) + 16 * (d > 0)),
        ("whole number", lambda d: float(bucket(d))),
        ("right", bucket),
    ],
)
def test_a_wrong_bucket_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="bias_bucket")
