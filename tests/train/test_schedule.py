"""Learning rates against the papers' formulas and another implementation."""

import math

import pytest
import torch

from heedful.train.recipe import ScheduleSettings
from heedful.train.schedule import factor

NAMES = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_is_a_straight_line_to_the_full_rate(name):
    settings = ScheduleSettings(name=name, warmup=40)
    assert [factor(settings, s, 1000) for s in range(40)] == [(s + 1) / 40 for s in range(40)]


@pytest.mark.parametrize("name", NAMES)
def test_without_warm_up_the_first_step_has_the_full_rate(name):
    assert factor(ScheduleSettings(name=name, warmup=0), 0, 100) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_decay_ends_exactly_at_its_final_share(name):
    settings = ScheduleSettings(name=name, warmup=10, final=0.25)
    assert factor(settings, 200, 200) == 0.25
    assert factor(settings, 250, 200) == 0.25, "beyond its end it stays"


def test_cosine_is_half_way_in_the_middle():
    settings = ScheduleSettings(name="cosine", warmup=100, final=0.1)
    assert factor(settings, 550, 1000) == pytest.approx(0.55)


def test_inverse_sqrt_is_the_papers_equation_3():
    """d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), with steps counted from 1; ours has the highest at 1."""
    settings = ScheduleSettings(name="inverse_sqrt", warmup=4000)
    highest = 512**-0.5 * 4000**-0.5
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert factor(settings, step - 1, 100_000) * highest == pytest.approx(paper, rel=1e-12)


def test_wsd_is_flat_until_its_last_share_of_the_steps():
    settings = ScheduleSettings(name="wsd", warmup=50, final=0.0, decay=0.2)
    assert all(factor(settings, s, 1000) == 1.0 for s in range(50, 801))
    assert factor(settings, 900, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_training_shorter_than_its_warm_up_has_a_rate_for_every_step(name):
    settings = ScheduleSettings(name=name, warmup=100)
    rates = [factor(settings, s, 5) for s in range(5)]
    assert rates == [(s + 1) / 100 for s in range(5)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_after_warm_up_as_transformers_schedules(name):
    transformers = pytest.importorskip("transformers", reason="the other implementation is not installed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, 20, 200),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, 20, 200),
        "wsd": lambda: transformers.get_wsd_schedule(optimizer, 20, 40, num_training_steps=200, decay_type="linear"),
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, 20),
    }[name]()  # fmt: skip
    settings = ScheduleSettings(name=name, warmup=20, final=0.0, decay=0.2)
    for step in range(20, 200):
        assert factor(settings, step, 200) == pytest.approx(theirs.lr_lambdas[0](step), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_rate_is_positive_and_at_most_the_full_one(name):
    settings = ScheduleSettings(name=name, warmup=10, final=0.0)
    for step in range(100):
        rate = factor(settings, step, 100)
        assert 0 < rate <= 1 and math.isfinite(rate)
