"""The KV cache is exact, its operations and bytes are those of the formulas, and continuous batching's steps count."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("cache-and-batching")


def test_the_cache_changes_nothing(lesson):
    assert lesson.names["changed"] < 1e-4  # of keys and values
    assert lesson.names["cache_difference"] < 1e-5  # of probabilities
    assert lesson.names["together"] == lesson.names["alone"]


def test_operations_are_those_of_the_formula(lesson):
    for n, (whole, step) in lesson.names["flops"].items():
        assert whole == lesson.names["whole_pass"](n) == n * lesson.names["one_step"](n)
        assert step == lesson.names["one_step"](n)
    without, with_cache = lesson.names["total"]
    assert round(without / with_cache) == 130


def test_bytes_of_the_cache(lesson):
    assert all(in_memory == formula for in_memory, formula in lesson.names["shapes"].values())
    assert "4.72 MB per token,  9.66 GB for 2048" in lesson.text and "0.33 MB per token,  1.34 GB" in lesson.text
    attention = lesson.names["chat"].model.decoder.blocks[0].attention
    assert (attention.n_heads, attention.n_kv_heads) == (9, 3)


def test_continuous_batching(lesson):
    assert lesson.names["n_steps"] == {"a batch at a time": 37, "continuous": 22}
    tokens_of_steps, requests = lesson.names["tokens_of_steps"], lesson.names["requests"]
    assert sum(tokens_of_steps) == sum(requests) and len(tokens_of_steps) == 21
    for rows in (1, 2, 5):
        placed, _ = lesson.names["schedule"](requests, rows, True)
        by_row = [sorted((start, start + n) for row, start, n in placed if row == r) for r in range(rows)]
        assert all(a[1] <= b[0] for spans in by_row for a, b in pairwise(spans))  # none overlap


def attend(q, k, v, keys, values, *, scale=None, keep=True):
    all_keys, all_values = torch.cat([keys, k[:, None]], 1), torch.cat([values, v[:, None]], 1)
    seen = (all_keys, all_values) if keep else (keys, values)
    return F.scaled_dot_product_attention(q[:, None], *seen, scale=scale)[:, 0], all_keys, all_values


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("right", attend),
        ("attend to itself", lambda *given: attend(*given, keep=False)),
        ("divided by √D", lambda *given: attend(*given, scale=1.0)),
        ("at the front", lambda q, k, v, ks, vs: (q, torch.cat([k[:, None], ks], 1), torch.cat([v[:, None], vs], 1))),
        ("shape of the keys", lambda q, k, v, ks, vs: (attend(q, k, v, ks, vs)[0], ks, vs)),
        ("must return the output, the keys", lambda *given: attend(*given)[0]),
    ],
)
def test_a_wrong_step_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="attend_cached")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("keys and values are two", lambda n, g, d, t, rows=1, size=2: n * g * d * t * rows * size),
        ("every layer", lambda n, g, d, t, rows=1, size=2: 2 * g * d * t * rows * size),
        ("every row", lambda n, g, d, t, rows=1, size=2: 2 * n * g * d * t * size),
        ("not bytes", lambda n, g, d, t, rows=1, size=2: 2 * n * g * d * t * rows),
    ],
)
def test_a_wrong_size_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="cache_bytes")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("longest of their batch", lambda ns, rows: sum(max(ns[i : i + rows]) for i in range(0, len(ns), rows))),
        ("one text after another", lambda ns, rows: sum(ns)),
        ("cannot share a text", lambda ns, rows: -(-sum(ns) // rows)),
        ("changed the list", lambda ns, rows: ns.pop()),
    ],
)
def test_wrong_steps_are_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="continuous_steps")
