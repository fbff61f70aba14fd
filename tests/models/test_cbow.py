"""CBOW learns who keeps company with whom; neighbours and analogies in any embedding."""

import random

import pytest
import torch

from heedful.models.base import Batch
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.nn.embed import analogy, nearest
from heedful.recipes import train
from heedful.train.objectives import classification
from heedful.weights.folder import load_folder
from heedful.weights.save import save


def test_words_in_the_same_company_come_together():
    """Words 0 and 1 stand between 4 and 5, words 2 and 3 between 6 and 7."""
    torch.manual_seed(0)
    rows = [[4, word, 5] for word in (0, 1)] + [[6, word, 7] for word in (2, 3)]
    tokens = torch.tensor(rows * 4)
    model = CBOW.create(CBOWConfig(vocab_size=8, d_model=12, window=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        classification(model, Batch(tokens, targets=tokens)).mean.backward()
        optimizer.step()
    for word, partner in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert nearest(model.vectors[:4], model.vectors[word], 1, but=[word])[0].item() == partner


ANIMALS, FRUITS = ("cat", "dog", "horse", "cow"), ("apple", "pear", "plum", "fig")


def sentences(n):
    """Function words are frequent; animals chase and fruits fall, and nothing else tells them apart."""
    draw = random.Random(0)
    for _ in range(n):
        animal, fruit = draw.choice(ANIMALS), draw.choice(FRUITS)
        yield draw.choice(
            [f"the {animal} of the farm chased the man .", f"the {fruit} of the tree fell on the ground ."]
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few seconds with few steps, as on a large text: the words are seen often enough, the steps are few."""
    folder = tmp_path_factory.mktemp("cbow")
    (folder / "farm.txt").write_text("\n".join(sentences(2000)), encoding="utf-8")
    changes = {
        "model": {"family": "cbow", "d_model": 32, "window": 4},
        "objective": {"name": "cbow"},
        "tokenizer": {"kind": "words", "vocab_size": 100},
        "data": {"length": 36},
        "train": {"steps": 60, "batch_size": 16, "eval_every": 60},
        "optimizer": {"name": "adamw", "lr": 0.01, "muon_lr": 0.02},
    }
    return train(folder / "farm.txt", changes, folder=folder / "run", quiet=True)


def test_vectors_do_not_collapse_into_one_direction(trained):
    vectors = torch.stack([trained.embed(word) for word in (*ANIMALS, *FRUITS, "the", "of", "chased", "fell")])
    cosines = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    others = cosines[~torch.eye(len(vectors), dtype=torch.bool)]
    assert others.mean() < 0.5
    assert cosines[0, 1:4].min() > cosines[0, 4:].max()  # a cat is nearer to all animals than to anything else


def test_a_words_embedding_is_its_vector_and_a_texts_their_mean(trained):
    tokenizer, vectors = trained.tokenizer, trained.model.vectors
    assert torch.equal(trained.embed("cat"), vectors[tokenizer.id("cat")])
    both = vectors[[tokenizer.id("cat"), tokenizer.id("dog")]].mean(dim=0)
    assert torch.allclose(trained.embed(["fig", "cat dog"])[1], both)


def test_fill_predicts_the_word_from_those_around_it(trained):
    farm, tree = trained.fill("the _ of the [farm|tree]", words=(*FRUITS, *ANIMALS)).probabilities
    assert farm[4:].sum() > 1.2 * farm[:4].sum() and tree[:4].sum() > 1.2 * tree[4:].sum()
    found = trained.fill("the [dog|pear] _ the", words=["of", "fell"])
    model, tokenizer = trained.model, trained.tokenizer
    for i, noun in enumerate(("dog", "pear")):
        around = vectors_of(trained, "the", noun, "the").mean(dim=0)
        logprobs = (model.head.weight @ around + model.head.bias).log_softmax(dim=0)
        wanted = logprobs[[tokenizer.id("of"), tokenizer.id("fell")]]
        assert torch.allclose(found.logprobs[i], wanted, atol=1e-5)
    with pytest.raises(ValueError, match="single words"):
        trained.fill("the _ of the farm", words=["man dog"])


def vectors_of(trained, *given):
    return trained.model.vectors[[trained.tokenizer.id(word) for word in given]]


def test_a_fresh_model_with_counts_is_the_unigram_model():
    model = CBOW.create(CBOWConfig(vocab_size=3, d_model=4, window=1))
    model.init_unigram(torch.tensor([7, 1, 0]))
    assert torch.allclose(model(torch.tensor([[0, 1]])).logits.softmax(-1)[0, 0], torch.tensor([8, 2, 1]) / 11)


def test_a_word_does_not_see_itself_nor_past_its_window():
    model = CBOW.create(CBOWConfig(vocab_size=9, d_model=4, window=2))
    taken = model.around(Batch(torch.arange(7)[None]))[0]
    assert taken[3].tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25, 0]
    assert taken[0].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0]


def test_the_window_stops_at_the_padding_and_between_documents():
    model = CBOW.create(CBOWConfig(vocab_size=9, d_model=4, window=2))
    tokens = torch.arange(6)[None]
    assert model.around(Batch(tokens, torch.tensor([3])))[0, 2].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    packed = Batch(tokens, documents=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    assert model.around(packed)[0, 3].tolist() == [0, 0, 0, 0, 0.5, 0.5]


def test_rows_may_have_windows_of_their_own():
    model = CBOW.create(CBOWConfig(vocab_size=9, d_model=4, window=2))
    taken = model.around(Batch(torch.arange(10).view(2, 5) % 9), torch.tensor([1, 2]))
    assert taken[0, 2].tolist() == [0, 0.5, 0, 0.5, 0] and taken[1, 2].tolist() == [0.25, 0.25, 0, 0.25, 0.25]


def test_a_word_alone_has_no_company():
    model = CBOW.create(CBOWConfig(vocab_size=9, d_model=4, window=2))
    assert model(torch.tensor([[3]])).hidden.abs().max() == 0


def test_saved_and_loaded_it_is_the_same(tmp_path):
    model = CBOW.create(CBOWConfig(vocab_size=9, d_model=4, window=3))
    save(model, tmp_path / "saved")
    again = load_folder(tmp_path / "saved")
    assert again.config == model.config and torch.equal(again.vectors, model.vectors)


def test_nearest_goes_by_direction_not_length():
    matrix = torch.tensor([[1.0, 0.0], [5.0, 0.5], [0.0, 9.0], [-1.0, 0.0]])
    rows, cosines = nearest(matrix, torch.tensor([0.1, 0.0]), 4)
    assert rows.tolist() == [0, 1, 2, 3]
    assert cosines[0].item() == pytest.approx(1) and cosines[3].item() == pytest.approx(-1)
    assert nearest(matrix, matrix[0], 2, but=[0])[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="3 rows"):
        nearest(matrix, matrix[0], 4, but=[0])


def test_king_is_to_man_as_queen_is_to_woman():
    # The columns: royal, male, female; an apple is none of it.
    matrix = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1], [-1, -1, -1]], dtype=torch.float32)
    man, king, woman, queen = range(4)
    rows, _ = analogy(matrix, man, king, woman, 2)
    assert rows[0].item() == queen and man not in rows and king not in rows
