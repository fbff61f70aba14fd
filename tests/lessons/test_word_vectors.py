"""The lesson on word vectors: CBOW by hand as heedful has it, neighbours, analogies, vectors in context."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def run():
    return executed("word-vectors")


def test_cbow_by_hand_learns_and_is_heedfuls(run):
    losses = run.names["losses"]
    assert len(run.names["middle"]) == 40546 and run.names["n_words"] == 63
    assert losses[0] > 4 and sum(losses[-50:]) / 50 < 0.6
    difference = float(run.text.split("largest difference: ")[1].split()[0])
    assert difference < 1e-4


def test_neighbours_in_captions_are_of_one_kind(run):
    tokenizer, vectors = run.names["tokenizer"], run.names["vectors"]
    for group in run.names["kinds"].values():
        ids = [tokenizer.id(word) for word in group.split()]
        cosines = vectors[ids] @ vectors.T
        cosines[:, [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id]] = -1
        cosines[range(len(ids)), ids] = -1
        near = cosines.argmax(dim=1).tolist()
        assert sum(id in ids for id in near) >= len(ids) - 1


def test_neighbours_in_the_documentation(run):
    model = run.names["documentation"]
    for word, near in {"true": "false", "int": "float", "list": "tuple"}.items():
        assert near in [found.word for found in model.neighbours(word, 8)]


def test_king_is_nearest_to_itself_and_queen_is_next(run):
    books, table, id_of = (run.names[name] for name in ("books", "table", "id_of"))
    cosines = F.cosine_similarity(table, run.names["wanted"][None])
    first, second = cosines.topk(2).indices.tolist()
    assert (first, second) == (id_of("king"), id_of("queen"))
    found = books.neighbours("king - man + woman", 1)[0]
    assert found.word == "queen" and found.similarity == pytest.approx(cosines[second].item(), abs=0.01)


def test_twelve_analogies(run):
    assert "books: 12 of 12 right\nbert-books: 12 of 12 right" in run.text
    assert run.names["books"].neighbours("man:doctor::woman:?", 1)[0].word == "nurse"


def test_light_in_two_senses(run):
    cosines = run.names["in_layer"] @ run.names["in_layer"].T
    assert cosines[0, 1].item() == pytest.approx(0.80, abs=0.02)
    assert cosines[2, 3].item() == pytest.approx(0.86, abs=0.02)
    assert cosines[:2, 2:].max().item() == pytest.approx(0.66, abs=0.02)
    assert (run.names["static"] @ run.names["static"].T).min() > 0.999
    near, far = (run.names["whole"] @ run.names["whole"].T)[0, 1:]
    assert near > far


def _nearest(matrix, index, k, score):
    scores = score(matrix, matrix[index])
    scores[index] = -torch.inf
    return scores.topk(k).indices.tolist()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("dot products", lambda m, i, k: _nearest(m, i, k, lambda m, v: m @ v)),
        ("smallest distance", lambda m, i, k: _nearest(m, i, k, lambda m, v: -(m - v).norm(dim=1))),
        ("lowest cosine", lambda m, i, k: _nearest(m, i, k, lambda m, v: -F.cosine_similarity(m, v[None]))),
        ("its own neighbours", lambda m, i, k: F.cosine_similarity(m, m[i][None]).topk(k).indices.tolist()),
        ("wrong order", lambda m, i, k: _nearest(m, i, k, lambda m, v: F.cosine_similarity(m, v[None]))[::-1]),
        ("it returned 4", lambda m, i, k: _nearest(m, i, k, lambda m, v: F.cosine_similarity(m, v[None]))[:4]),
    ],
)
def test_wrong_neighbours(said, answer, capsys):
    assert said in verdict(answer, capsys, name="nearest_rows")


def _solve(matrix, signs, abc, *, scaled=True, cosine=True, leave_out=True):
    unit = F.normalize(matrix, dim=1)
    rows = unit if scaled else matrix
    scores = (unit if cosine else matrix) @ sum(sign * rows[i] for sign, i in zip(signs, abc, strict=True))
    if leave_out:
        scores[list(abc)] = -torch.inf
    return int(scores.argmax())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("a - b + c", lambda m, *abc: _solve(m, (1, -1, 1), abc)),
        ("a + b + c", lambda m, *abc: _solve(m, (1, 1, 1), abc)),
        ("to length 1", lambda m, *abc: _solve(m, (-1, 1, 1), abc, scaled=False)),
        ("long rows win", lambda m, *abc: _solve(m, (-1, 1, 1), abc, cosine=False)),
        ("a word of the question", lambda m, *abc: _solve(m, (-1, 1, 1), abc, leave_out=False)),
    ],
)
def test_wrong_analogies(said, answer, capsys):
    assert said in verdict(answer, capsys, name="solve_analogy")
