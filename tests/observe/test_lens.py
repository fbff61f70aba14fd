"""What layers know: the logit lens, embeddings by layer, nearest tokens, similarity before and after projecting."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.models.base import Batch
from heedful.observe.lens import FEATURES, embedding_matrix, features, hidden_states, logit_lens, nearest_tokens
from heedful.observe.positions import position_encoding
from heedful.observe.similarity import cosine_similarity, latent_semantic_indexing, projection_similarity
from support.families import CASES
from support.tiny import tiny

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["gpt1", "gpt2", "llama3", "gemma2", "bert-masked", "t5"])
def test_the_last_row_of_the_lens_is_what_the_model_says(name: str):
    case = BY_NAME[name]
    model, batch = case.model(), case.rows(case.batch())[0]
    found = logit_lens(model, batch, k=3)
    with torch.no_grad():
        chances = model(batch).logits[0].softmax(dim=-1)
    top = chances.topk(3, dim=-1)
    assert torch.equal(found.ids[-1], top.indices) and torch.allclose(found.probabilities[-1], top.values)
    assert torch.allclose(found.final[-1], top.values[:, 0]) and len(found.layers) == len(found.ids) == 3
    # The residual stream after the last layer, through norm and head, is the same: so the rows before are right too.
    from heedful.observe.capture import capture

    stack = model.encoder if name.startswith("bert") else model.decoder
    half = "encoder" if name.startswith("bert") else "decoder"
    with torch.no_grad(), capture(model, f"{half}.1.after") as acts:
        model(batch)
        x = acts[f"{half}.1.after"]
        logits = model.head(x if stack.norm is None else stack.norm(x))
    assert torch.allclose(logits[0].softmax(dim=-1), chances, atol=1e-6)


def test_the_lens_refuses_what_has_no_vocabulary():
    for model in (tiny("vit"), tiny("seq2seq")):
        with pytest.raises(ValueError, match="logit lens needs"):
            logit_lens(model, Batch(torch.tensor([[1]])))


def test_features_by_layer_are_made_of_the_references_hidden_states():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48, vocab_size=61)
    reference = BertModel(BertConfig(**sizes, max_position_embeddings=64)).eval()
    case = BY_NAME["bert-masked"]
    model = case.ours(reference)
    tokens = torch.tensor([[5, 6, 7, 8], [4, 9, 9, 4]])
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True).hidden_states
    expected = {
        "first": states[0],
        "last": states[-1],
        "second_to_last": states[-2],
        "sum_last_four": sum(states[-4:]),
        "concat_last_four": torch.cat([states[-1], states[-2], states[-3], states[-4]], dim=-1),
        "sum_all": sum(states[1:]),
    }
    assert set(expected) == set(FEATURES)
    for which, want in expected.items():
        assert torch.allclose(features(model, Batch(tokens), which), want, atol=1e-5), which
    assert hidden_states(model, Batch(tokens)).shape == (7, 2, 4, 32)
    with pytest.raises(ValueError, match="features can be"):
        features(model, Batch(tokens), "middle")
    with pytest.raises(ValueError, match="needs 4 layers"):
        features(tiny("bert"), Batch(tokens), "sum_last_four")


def test_the_nearest_token_of_an_embedding_is_itself():
    for family in ("gpt", "gemma", "t5", "seq2seq"):
        model = tiny(family)
        rows = embedding_matrix(model)
        found = nearest_tokens(model, rows[17], k=3)
        assert found[0][0] == 17 and found[0][1] == pytest.approx(1.0, abs=1e-5) and len(found) == 3
    with pytest.raises(ValueError, match="dimensions"):
        nearest_tokens(model, torch.zeros(3))
    with pytest.raises(ValueError, match="no embeddings of tokens"):
        embedding_matrix(tiny("vit"))


def test_users_without_a_film_in_common_are_alike_in_concept_space():
    """Users and movies (Leskovec et al., Mining of Massive Datasets, section 11.3): 0 before, 0.99 after."""
    table = torch.tensor(
        [
            [1, 1, 1, 0, 0],
            [3, 3, 3, 0, 0],
            [4, 4, 4, 0, 0],
            [5, 5, 5, 0, 0],
            [0, 2, 0, 4, 4],
            [0, 0, 0, 5, 5],
            [0, 1, 0, 2, 2],
        ],
        dtype=torch.float64,
    )
    space = latent_semantic_indexing(table, 2)
    users = torch.tensor([[5, 0, 0, 0, 0], [0, 4, 5, 0, 0]], dtype=torch.float64)
    assert cosine_similarity(users)[0, 1] == 0
    assert cosine_similarity(space.project(users))[0, 1] > 0.99
    assert space.strengths.tolist() == pytest.approx([12.48, 9.51], abs=0.01)  # the book's
    with pytest.raises(ValueError, match="concepts"):
        latent_semantic_indexing(table, 6)


def test_similarity_before_and_after_a_heads_projection():
    model = tiny("llama").eval()  # grouped queries: heads 0 and 1 share keys
    before, after = projection_similarity(model, Batch(torch.tensor([[5, 6, 7, 5]])), layer=0, head=1)
    assert before.shape == after.shape == (4, 4)
    assert torch.allclose(before.diagonal(), torch.ones(4), atol=1e-5)
    assert before[0, 3] == pytest.approx(1.0, abs=1e-5)  # the same token, no position added: rotary turns later
    assert after[0, 3] != pytest.approx(float(after[0, 0]), abs=1e-3)
    with pytest.raises(ValueError, match="no head 4"):
        projection_similarity(model, Batch(torch.tensor([[5, 6]])), layer=0, head=4)
    with pytest.raises(ValueError, match="no self-attention"):
        projection_similarity(model, Batch(torch.tensor([[5, 6]])), layer=2, head=0)


def test_positions_of_every_kind():
    found = position_encoding(tiny("transformer", max_len=None), 50)
    assert found.kind == "sinusoidal" and found.values.shape == (50, 32) and found.values.abs().max() <= 1
    assert torch.allclose(found.values[:, 0], torch.arange(50).float().sin(), atol=1e-6)
    assert (
        position_encoding(tiny("gpt"), 50).kind == "learned" and len(position_encoding(tiny("gpt"), 500).values) == 64
    )
    assert position_encoding(tiny("vit")).values.shape == (5, 32)
    assert position_encoding(tiny("llama"), 10).values[0].tolist() == [1.0] * 4
    bias = position_encoding(tiny("t5"), 6)
    assert bias.kind == "bias" and bias.values.shape == (4, 6)
    with pytest.raises(ValueError, match="no positions"):
        position_encoding(tiny("seq2seq"))
    with pytest.raises(ValueError, match="1 at least"):
        position_encoding(heedful.load("tiny").model, 0)
