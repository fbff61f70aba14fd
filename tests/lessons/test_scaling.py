"""Parameters, operations and costs, against the papers' own numbers; the measured curve."""

from __future__ import annotations

import math

import pytest

from heedful.lessons.checks.scaling import check_gpt_parameters
from heedful.models.registry import sizes
from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("scaling").names


def test_the_count_is_that_of_every_published_size(lesson):
    count = lesson["gpt_parameters"]
    every = {name: size for name, size in sizes().items() if name.startswith(("gpt2", "gpt3-"))}
    assert len(every) == 12
    for name, size in every.items():
        c = size.settings
        if "d_head" not in c:  # GPT-3 13B, whose heads do not fill its width
            assert count(c["n_layers"], c["d_model"], c["vocab_size"], c["max_len"]) == size.parameters, name
    check_gpt_parameters(count)


def test_operations(lesson):
    assert lesson["counted"].training / 1024 == 6 * lesson["matrices"] + lesson["attention"]
    assert lesson["counted"].training == 3 * lesson["counted"].forward
    assert f"{lesson['C3']:.3g}" == "3.14e+23"  # Brown et al. 2020, Table D.1
    assert lesson["C3"] / lesson["PF_DAY"] == pytest.approx(3640, rel=1e-3)


def test_the_measured_losses_fall(lesson):
    held_out = lesson["held_out"]
    assert held_out[0] > held_out[2] > held_out[4] and held_out[0] - held_out[4] > 0.25
    assert -0.06 < lesson["slope"] < -0.02
    assert lesson["STEPS"] * lesson["BATCH"] * lesson["CONTEXT"] == pytest.approx(164_000, rel=1e-3)


def test_what_the_formulas_say(lesson):
    assert 2 ** (1 / 0.076) == pytest.approx(9000, rel=0.02)
    n, d = lesson["best"]["Hoffmann et al. 2022"]
    assert round(n / 1e9) == 32 and round(d / n) == 93
    n, d = lesson["best"]["Besiroglu et al. 2024"]
    assert round(n / 1e9) == 72 and round(d / n) == 18
    for fit, (n, d) in lesson["best"].items():
        constants = lesson["FITS"][fit][1:]
        assert lesson["compute_optimal"](5.76e23, *constants) == pytest.approx((n, d), rel=0.01)
    ours = lesson["compute_optimal"](lesson["C3"], *lesson["FITS"]["Besiroglu et al. 2024"][1:])[0]
    assert ours / lesson["N3"] == pytest.approx(1 / 3, abs=0.04)  # "a third of its size"


def test_costs_are_the_published_ones(lesson):
    cost = lesson["training_cost"]
    assert cost(3.14e23, 24.6, 10_000, 330) == pytest.approx((14.8, 1287), rel=5e-3)  # Patterson et al. 2021, Table 4
    assert lesson["megatron"] == pytest.approx(34, abs=0.5)  # Narayanan et al. 2021
    days, energy = cost(lesson["C3"], 989 * 0.4, 1024, 700)
    assert round(days) == 9 and round(energy) == 170 and 400_000 < days * 24 * 1024 * 2 < 500_000


def test_memory(lesson):
    holding = lesson["holding"]
    gpus = {name: math.ceil(n / 80e9) for name, n in holding.items()}
    assert gpus["weights, bfloat16"] == 5 and gpus["training with Adam, 2+2+4+4+4 bytes"] == 35
    assert holding["KV cache of 2,048 tokens"] == pytest.approx(9.7e9, rel=5e-3)
    assert lesson["traced"] == pytest.approx(8, abs=0.01)  # two float32 numbers
    assert 5 * 3.35e12 / holding["weights, bfloat16"] == pytest.approx(48, abs=0.5)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("only the matrices", lambda n, d, v, t: 12 * n * d * d),
        ("biases and norms", lambda n, d, v, t: 12 * n * d * d + (v + t + 2) * d),
        ("head is counted", lambda n, d, v, t: n * (12 * d * d + 13 * d) + (2 * v + t + 2) * d),
        ("positions is missing", lambda n, d, v, t: n * (12 * d * d + 13 * d) + (v + 2) * d),
        ("last norm", lambda n, d, v, t: n * (12 * d * d + 13 * d) + (v + t) * d),
        ("one layer", lambda n, d, v, t: 12 * d * d + 13 * d + (v + t + 2) * d),
        ("4d wide", lambda n, d, v, t: n * (6 * d * d + 13 * d) + (v + t + 2) * d),
        ("an int", lambda n, d, v, t: n * (12 * d**2.0 + 13 * d) + (v + t + 2) * d),
        ("there are 30,220", lambda n, d, v, t: 1),
    ],
)
def test_a_wrong_count_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="gpt_parameters")


def optimum(c, a, b, alpha, beta, *, factor=None, exponent=None):
    factor = alpha * a / (beta * b) if factor is None else factor
    n = factor ** (1 / (alpha + beta)) * (c / 6) ** ((beta if exponent is None else exponent) / (alpha + beta))
    return n, c / 6 / n


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("changed places", lambda *given: optimum(*given)[::-1]),
        ("alpha's is for the tokens", lambda *given: optimum(*given, exponent=given[3])),
        ("factor alpha too", lambda *given: optimum(*given, factor=given[1] / given[2])),
        ("N D is C", lambda c, *given: optimum(6 * c, *given)),
        ("two numbers", lambda *given: optimum(*given)[0]),
        ("are equal", lambda c, *given: (math.sqrt(c / 6), math.sqrt(c / 6))),
        ("20 tokens", lambda c, *given: (math.sqrt(c / 120), 20 * math.sqrt(c / 120))),
        ("derivative to 0", lambda c, *given: (3e9, c / 18e9)),
        ("right", optimum),
    ],
)
def test_a_wrong_optimum_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="compute_optimal")
