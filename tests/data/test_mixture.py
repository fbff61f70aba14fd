"""Sources in shares, each without replacement in epochs of its own."""

from collections import Counter

import numpy as np
import pytest
import torch

from heedful.data.corpus import Corpus, TokenWindows
from heedful.data.dataset import IGNORED, Draw
from heedful.data.loader import BatchLoader
from heedful.data.mixture import Mixture, concatenate_batches
from heedful.models.base import Batch
from support.numbers import Numbers


def found(mixture, n_steps, batch_size, seed=1):
    """(source, epoch, index) of all draws of the steps."""
    loader = BatchLoader(mixture, batch_size=batch_size, seed=seed)
    draws = [draw for step in range(n_steps) for draw in loader.sampler(step)]
    source, own = mixture.find(draws, seed)
    return [(k, draw.epoch, draw.index) for k, draw in zip(source.tolist(), own, strict=True)]


def test_shares_and_own_epochs():
    mixture = Mixture([(Numbers(1000), 1.0), (Numbers(100), 2.0), (Numbers(30), 1.0)])
    assert len(mixture) == 1130
    draws = found(mixture, 2 * 113, 20)  # four epochs of the mixture
    counts = Counter(k for k, _, _ in draws)
    assert [round(counts[k] / len(draws), 2) for k in range(3)] == [0.25, 0.5, 0.25]
    assert len(set(draws)) == len(draws)  # nothing twice in one epoch of its source
    for k, n in enumerate((1000, 100, 30)):
        epochs = Counter(epoch for source, epoch, _ in draws if source == k)
        whole = [epoch for epoch, count in epochs.items() if count == n]
        assert set(whole) == set(range(counts[k] // n))
        assert len(epochs) - len(whole) <= 1  # all but the last are complete


def test_each_epoch_of_a_source_is_shuffled_anew():
    mixture = Mixture([(Numbers(1000), 1.0), (Numbers(10), 9.0)])
    large = [index for k, _, index in found(mixture, 1, 1010) if k == 0]
    assert len(large) == 101 and max(large) > 500 and large != sorted(large)
    assert found(mixture, 3, 20, seed=1) != found(mixture, 3, 20, seed=2)


def test_shares_hold_within_a_short_stretch():
    draws = found(Mixture([(Numbers(5000), 3.0), (Numbers(5000), 1.0)]), 10, 100)
    assert abs(sum(k == 0 for k, _, _ in draws) / 1000 - 0.75) < 0.05


def test_a_late_step_is_as_cheap_as_an_early_one():
    mixture = Mixture([(Numbers(50), 1.0), (Numbers(7), 2.0)])
    made = []
    shuffle = mixture._permutation
    mixture._permutation = lambda *key: made.append(key) or shuffle(*key)
    loader = BatchLoader(mixture, batch_size=8, seed=1)
    loader.step(10)
    early, made[:] = len(made), []
    loader.step(10**6)
    assert len(made) <= early + 2
    assert max(key[2] for key in made) > 10**5


def test_weights_by_size_are_one_after_the_other():
    mixture = Mixture([(Numbers(4), 4), (Numbers(6), 6)])
    source, own = mixture.find([Draw(2, i) for i in range(10)], seed=1)
    assert source.tolist() == [0] * 4 + [1] * 6
    assert {draw.epoch for draw in own} == {2}
    assert sorted(draw.index for draw in own[4:]) == list(range(6))


def test_rows_come_back_in_their_order_with_the_right_targets():
    low, high = (Corpus.of([np.arange(a, a + 101)], 300) for a in (0, 1000))
    mixture = Mixture([(TokenWindows(low, 10), 1.0), (TokenWindows(high, 5), 1.0)])
    loader = BatchLoader(mixture, batch_size=10, seed=1)
    draws = loader.sampler(0)
    source, _ = mixture.find(draws, 1)
    batch = mixture.batch(draws, 1)
    assert ((batch.ids[:, 0] >= 1000).numpy() == (source == 1)).all()
    assert batch.lengths.tolist() == [5 if k else 10 for k in source]
    for tokens, targets, n in zip(batch.ids, batch.targets, batch.lengths.tolist(), strict=True):
        assert (targets[:n] == tokens[:n] + 1).all() and (targets[n:] == IGNORED).all()
    assert mixture.bytes_per_token == pytest.approx(300 / 101)
    assert Mixture([(Numbers(4), 1)]).bytes_per_token is None


def test_joining_batches():
    packed = Batch(tokens=torch.ones(1, 3).long(), documents=torch.tensor([[0, 0, 1]]), targets=torch.ones(1, 3).long())
    plain = Batch(tokens=torch.ones(2, 2).long(), targets=torch.ones(2, 2).long())
    both = concatenate_batches([packed, plain], torch.tensor([1, 0, 2]))
    assert both.documents.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert both.lengths.tolist() == [2, 3, 2]
    same = concatenate_batches([plain, plain], torch.arange(4))
    assert same.lengths is None and same.documents is None
    with pytest.raises(ValueError, match="only some have tokens"):
        concatenate_batches([plain, Batch(images=torch.ones(1, 1, 2, 2))], torch.arange(3))
    with pytest.raises(ValueError, match="their targets have other shapes"):
        concatenate_batches([plain, Batch(tokens=plain.tokens, targets=torch.ones(2).long())], torch.arange(4))


def test_mixtures_that_cannot_be():
    for sources in ([], [(Numbers(3), 0.0)], [(Numbers(3), 1.0), (Numbers(3), float("nan"))]):
        with pytest.raises(ValueError):
            Mixture(sources)
    with pytest.raises(ValueError, match="leave a source without"):
        Mixture([(Numbers(3), 1.0), (Numbers(3), 1000.0)])


def test_fingerprints_differ_with_weights():
    a, b = Numbers(3), Numbers(3)
    assert Mixture([(a, 1), (b, 1)]).fingerprint != Mixture([(a, 1), (b, 2)]).fingerprint


def test_what_two_sources_hold_out_is_validated_whole(tmp_path, monkeypatch):
    from heedful.recipes.inputs import load_data
    from heedful.text import characters
    from heedful.train.recipe import Recipe

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = {"a": "ab" * 500, "b": "cd" * 300}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [{"path": str(tmp_path / f"{name}.txt"), "weight": 1.0} for name in texts]
    recipe = Recipe.from_dict({"data": {"source": sources, "length": 20, "share": 0.2}})
    tokenizer = characters(texts.values(), special=("<unk>",))
    validation = load_data(recipe, tokenizer).validation
    batch = validation.batch([Draw(0, i) for i in range(len(validation))], seed=0)
    seen = tokenizer.decode(batch.targets[batch.targets >= 0].tolist())
    # The last fifth of each; the first character of each is read and not foreseen.
    assert Counter(seen) == {"a": 99, "b": 100, "c": 59, "d": 60}
