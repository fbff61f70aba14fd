"""CBOW learns who keeps company with whom; neighbours and analogies in any embedding."""

import pytest
import torch

from heedful.models.base import Batch
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.nn.embed import analogy, nearest
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
