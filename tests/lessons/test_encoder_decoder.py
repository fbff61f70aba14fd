"""B5: a trained Transformer by hand, its masks, cached decoding, and the paper's number of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lessons.support import executed, verdict


@pytest.fixture(scope="module")
def lesson():
    return executed("encoder-decoder")


def test_b5_the_forward_pass_by_hand_is_heedfuls(lesson):
    names = lesson.names
    assert names["difference"] < 1e-5
    assert names["logits"].numpy() == pytest.approx(names["reference"].numpy(), abs=1e-4)
    assert "right: False" not in lesson.text  # every word of the translation is the likeliest


def test_b5_a_decoder_layer_is_pytorchs(lesson):
    names, block = lesson.names, lesson.names["model"].decoder.blocks[0]
    layer = nn.TransformerDecoderLayer(256, 4, 1024, dropout=0.0, batch_first=True).eval()
    state = {}
    for theirs, ours in ("self_attn", block.attention), ("multihead_attn", block.cross):
        parts = [ours.query, ours.key, ours.value]
        state[f"{theirs}.in_proj_weight"] = torch.cat([part.weight for part in parts])
        state[f"{theirs}.in_proj_bias"] = torch.cat([part.bias for part in parts])
        state |= {f"{theirs}.out_proj.{name}": p for name, p in ours.output.named_parameters()}
    norms = [block.attention_norm, block.cross_norm, block.feedforward_norm]
    ordered = {f"norm{i}": norm for i, norm in enumerate(norms, 1)}
    ordered |= {"linear1": block.feedforward.up, "linear2": block.feedforward.down}
    state |= {f"{theirs}.{name}": p for theirs, ours in ordered.items() for name, p in ours.named_parameters()}
    layer.load_state_dict(state)
    x, memory, causal = names["embedded"](names["inputs"][0]), names["memory"], torch.ones(13, 13).tril().bool()
    with torch.no_grad():
        expected = layer(x[None], memory[None], tgt_mask=~causal)[0]
        x = block.attention_norm(x + names["attention"](block.attention, x, x, causal))
        x = block.cross_norm(x + names["attention"](block.cross, x, memory))
        x = block.feedforward_norm(x + names["feedforward"](block.feedforward, x))
    assert x.numpy() == pytest.approx(expected.numpy(), abs=1e-4)


def test_masks_do_not_leak(lesson):
    counts = [int(allowed.sum()) for allowed in lesson.names["masks"].values()]
    assert counts == [7 * 5, 6 * 7 // 2, 6 * 5]
    assert lesson.names["moved"].tolist() == [False] * 12 + [True]
    assert lesson.names["moved_all"].all()


def test_cached_decoding_is_decoding(lesson):
    names = lesson.names
    assert names["plain"] == names["cached"] == names["targets"][0].tolist()
    assert names["cached_scores"].numpy() == pytest.approx(names["plain_scores"].numpy(), abs=1e-4)
    assert torch.equal(names["cross_keys"], names["state"].cross[0].keys)
    assert names["computed"] == (91, 13)


def test_b5_the_papers_65_million(lesson):
    layers = 18_914_304 + 25_224_192
    assert lesson.names["counts"] == {"embedding": 37000 * 512, "encoder": 18_914_304, "decoder": 25_224_192}
    assert layers == pytest.approx(44.1e6, abs=5e4)
    low, high = lesson.names["common"]
    assert 40_900 < low < 41_000 < high < 41_200  # "about 41,000", in eight rows of table 3
    big = lesson.names["vocabulary"]["transformer-big"]
    assert big[0] < 36_000 < big[1]
    assert lesson.names["matched"].n_parameters() == pytest.approx(65e6, abs=5e5)
    assert 37000 * 512 / 63_082_496 == pytest.approx(0.30, abs=0.005)


def attend(q, k, v, scale=2.0, dim=-1):
    return (q @ k.T / scale).softmax(dim) @ v


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("made of the memory", lambda x, m, q, k, v: attend(x @ q, x @ k, x @ v)),
        ("shape is (5, 4), not (3, 4)", lambda x, m, q, k, v: attend(m @ q, x @ k, x @ v)),
        ("not divided", lambda x, m, q, k, v: attend(x @ q, m @ k, m @ v, 1)),
        ("root of the model's width", lambda x, m, q, k, v: attend(x @ q, m @ k, m @ v, math.sqrt(6))),
        ("over the queries", lambda x, m, q, k, v: attend(x @ q, m @ k, m @ v, dim=0)),
        ("swapped", lambda x, m, q, k, v: attend(x @ q, m @ v, m @ k)),
        (
            "no causal mask",
            lambda x, m, q, k, v: (
                ((x @ q @ (m @ k).T / 2).exp().tril() @ (m @ v))
                / (x @ q @ (m @ k).T / 2).exp().tril().sum(1, keepdim=True)
            ),
        ),
        ("right", lambda x, m, q, k, v: attend(x @ q, m @ k, m @ v)),
    ],
)
def test_wrong_cross_attention_is_told_why(said, answer, capsys):
    assert said in verdict(answer, capsys, name="cross_attention")


def count(d, d_ff, n, v, *, attentions=3, norms=5, bias=1, embeddings=1):
    layers = attentions * 4 * (d * d + bias * d) + 2 * (2 * d * d_ff + bias * (d_ff + d)) + norms * 2 * d
    return n * layers + embeddings * v * d


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("biases are missing", {"bias": 0}),
        ("norms are missing", {"norms": 0}),
        ("norm of cross-attention", {"norms": 4}),
        ("cross-attention is missing", {"attentions": 2}),
        ("its norm are missing", {"attentions": 2, "norms": 4}),
        ("embedding is missing", {"embeddings": 0}),
        ("twice", {"embeddings": 2}),
        ("three times", {"embeddings": 3}),
        ("right", {}),
    ],
)
def test_a_wrong_count_is_told_why(said, options, capsys):
    assert said in verdict(lambda *sizes: count(*sizes, **options), capsys, name="transformer_parameters")
