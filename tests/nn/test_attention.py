"""Attention against the paper's formula written out, in numpy or torch, and the fused path against the explicit one."""

import math

import numpy as np
import pytest
import torch

from heedful.nn.attention import Attention, AttentionInfo, Watch, attend, attend_explicit
from heedful.nn.mask import Mask
from heedful.nn.norm import RMSNorm
from heedful.nn.state import CrossCache, KeyValueState

B, T, S, D = 2, 5, 7, 8


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(n_heads=4, n_kv_heads=4, n_queries=T, n_keys=S):
    return (
        draw(B, n_heads, n_queries, D, seed=1),
        draw(B, n_kv_heads, n_keys, D, seed=2),
        draw(B, n_kv_heads, n_keys, D, seed=3),
    )


def by_hand(q, k, v, mask=None, bias=None, scale=None):
    """softmax(q·k scale + bias) v, one query at a time in float64; returns the output and the weights."""
    groups = q.shape[1] // k.shape[1]
    out, weights = torch.zeros(q.shape).double(), torch.zeros(*q.shape[:3], k.shape[2]).double()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keys, values = k[b, h // groups].double(), v[b, h // groups].double()
                scores = keys @ q[b, h, t].double() * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
                if bias is not None:
                    scores = scores + bias.expand(*weights.shape)[b, h, t]
                e = torch.exp(scores - scores.max())
                if mask is not None:
                    e = e * mask.expand(*weights.shape)[b, h, t]
                weights[b, h, t] = e / e.sum()
                out[b, h, t] = weights[b, h, t] @ values
    return out, weights


MASKS = {
    "none": None,
    "padding": (torch.arange(S) < torch.tensor([[S], [3]]))[:, None, None, :],
    "band": torch.ones(T, S).tril(2).triu(-1).bool()[None, None],
    "per head": torch.rand(B, 4, T, S, generator=torch.Generator().manual_seed(4)) < 0.5,
}
MASKS["per head"][..., 0] = True  # nobody is left with nothing to see
BIASES = {"no bias": None, "bias": draw(1, 4, T, S, seed=5), "bias by row": draw(B, 1, T, S, seed=6)}


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_both_paths_are_the_formula(mask, bias, n_kv_heads, scale):
    q, k, v = qkv(4, n_kv_heads)
    given = dict(mask=MASKS[mask], bias=BIASES[bias], scale=scale)
    want, _ = by_hand(q, k, v, **given)
    fused, explicit = attend(q, k, v, **given), attend_explicit(q, k, v, **given)
    assert (fused - want).abs().max() < 1e-5
    assert (explicit - want).abs().max() < 1e-5


@pytest.mark.parametrize("bias", [None, draw(1, 4, S, S, seed=7)], ids=["no bias", "bias"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_the_causal_flag_is_the_triangle(n_kv_heads, bias):
    q, k, v = qkv(4, n_kv_heads, n_queries=S)
    want, _ = by_hand(q, k, v, torch.ones(S, S).tril()[None, None], bias)
    for path in (attend, attend_explicit):
        assert (path(q, k, v, bias=bias, causal=True) - want).abs().max() < 1e-5


def test_gradients_of_both_paths_agree():
    given = dict(mask=MASKS["band"], bias=BIASES["bias"], scale=0.5)
    found = []
    for path in (attend, attend_explicit):
        inputs = [x.clone().requires_grad_() for x in qkv(4, 2)]
        path(*inputs, **given).square().sum().backward()
        found.append([x.grad for x in inputs])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def watched(q, k, v, **given):
    """The explicit path's weights, as a hook sees them."""
    watch, seen = Watch(), []
    watch.weights.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    attend_explicit(q, k, v, watch=watch, **given)
    return seen[0]


def test_causal_weights_are_exactly_zero_ahead_and_sum_to_one():
    q, k, v = qkv(n_queries=S)
    weights = watched(q * 10, k, v, causal=True)
    assert (weights.triu(1) == 0).all()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert (weights[:, :, 0, 0] == 1).all()


def test_padding_gets_exactly_no_weight():
    q, k, v = qkv()
    weights = watched(q, k, v, mask=MASKS["padding"])
    assert (weights[1, ..., 3:] == 0).all() and (weights[0] > 0).all()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert (weights - by_hand(q, k, v, MASKS["padding"])[1]).abs().max() < 1e-6


def test_a_watch_may_replace_the_weights():
    q, k, v = qkv()
    watch = Watch()
    watch.weights.register_forward_hook(lambda _module, _inputs, out: torch.full_like(out, 1 / S))
    assert torch.allclose(attend_explicit(q, k, v, watch=watch), v.mean(2, keepdim=True).expand_as(q), atol=1e-6)


def test_the_soft_cap_bounds_the_scores():
    q, k, v = qkv()
    watch, seen = Watch(), []
    watch.scores.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    attend_explicit(q * 100, k, v, softcap=5.0, watch=watch)
    want = 5 * torch.tanh(q * 100 @ k.mT / math.sqrt(D) / 5)
    assert torch.allclose(seen[0], want, atol=1e-5) and seen[0].abs().max() <= 5


def test_huge_scores_stay_finite():
    q, k, v = qkv(n_queries=S)
    for path in (attend, attend_explicit):
        assert torch.isfinite(path(q * 1e4, k * 1e4, v, causal=True)).all()


def test_cat_in_the_cat_sat_on_the_mat():
    """The lecture's worked example: every word's vector is its own query, key and value."""
    words = np.array(
        [[0.2, 0.5, 0.3], [0.7, 0.1, 0.4], [0.6, 0.9, 0.2], [0.3, 0.4, 0.7], [0.1, 0.8, 0.5], [0.9, 0.3, 0.6]]
    )
    scores = words @ words[1] / np.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum()
    assert abs(weights.sum() - 1) < 1e-12  # the slide's sum to 0.81
    assert weights.argmax() == 5  # "cat" looks most at "mat", then at itself
    x = torch.tensor(words, dtype=torch.float32)[None, None]
    np.testing.assert_allclose(watched(x, x, x)[0, 0, 1], weights, atol=1e-6)
    np.testing.assert_allclose(attend(x, x, x)[0, 0, 1], weights @ words, atol=1e-6)


def layer(**settings):
    made = Attention(16, 4, **settings).eval()
    for i, p in enumerate(made.parameters()):
        p.data = draw(*p.shape, seed=10 + i) * 0.3
    return made


def split(x, n_heads):
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_kv_heads": 2},
        {"d_head": 3},
        {"bias": False},
        {"bias": False, "output_bias": True},
        {"scale": 1.0},
        {"window": 3},
        {"n_kv_heads": 1, "d_head": 6, "scale": 0.2, "window": 2, "bias": False},
    ],
    ids=str,
)
def test_the_layer_is_project_split_attend_join_project(settings):
    """MultiHead(x) = Concat(head_1, ..., head_h) W_O (section 3.2.2)."""
    attention, x = layer(**settings), draw(B, T, 16)
    n_kv_heads, window = settings.get("n_kv_heads", 4), settings.get("window", T)
    q, k, v = (
        split(attention.query(x), 4),
        split(attention.key(x), n_kv_heads),
        split(attention.value(x), n_kv_heads),
    )
    mask = torch.ones(T, T).tril().triu(1 - window)[None, None]
    out, weights = by_hand(q, k, v, mask, scale=settings.get("scale"))
    want = attention.output(out.float().transpose(1, 2).flatten(2))
    info = AttentionInfo(Mask(T, T, causal=True))
    assert (attention(x, info) - want).abs().max() < 1e-5

    seen = []
    attention.watch.on = True
    attention.watch.weights.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    assert (attention(x, info) - want).abs().max() < 1e-5
    assert (seen[0] - weights).abs().max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_changes_nothing(window):
    attention, x = layer(window=window), draw(B, T, 16)
    whole = attention(x, AttentionInfo(Mask(T, T, causal=True)))
    state = KeyValueState(1, B)
    parts = []
    for first, last in [(0, 2), (2, 3), (3, 5)]:
        mask = Mask(last - first, last, causal=True, starts=first)
        parts.append(attention(x[:, first:last], AttentionInfo(mask), state.caches[0]))
        state.advance(last - first)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-6


@torch.no_grad()
def test_cross_attention_reads_the_memory_once():
    attention, x, memory = layer(), draw(B, T, 16), draw(B, S, 16, seed=1)
    lengths = torch.tensor([S, 3])
    info = AttentionInfo(Mask(T, S, causal=False, lengths=lengths))
    heads = [split(p(y), 4) for p, y in ((attention.query, x), (attention.key, memory), (attention.value, memory))]
    out, _ = by_hand(*heads, (torch.arange(S) < lengths[:, None])[:, None, None])
    want = attention.output(out.float().transpose(1, 2).flatten(2))
    cache = CrossCache()
    with_memory = AttentionInfo(info.mask, memory=memory)
    assert (attention(x, with_memory) - want).abs().max() < 1e-5
    assert (attention(x, with_memory, cache) - want).abs().max() < 1e-5
    assert (attention(x, info, cache) - want).abs().max() < 1e-5  # the memory is no longer needed


@torch.no_grad()
@pytest.mark.parametrize("width", [4, 16])
def test_query_and_key_norms_act_on_a_head_or_on_all(width):
    """A norm as wide as a head acts on each (Qwen 3), one as wide as all heads before they are split (OLMo 2)."""
    attention, x = layer(query_norm=RMSNorm(width), key_norm=RMSNorm(width)), draw(B, T, 16)
    normed = []
    for project, norm in ((attention.query, attention.query_norm), (attention.key, attention.key_norm)):
        y = project(x).unflatten(-1, (-1, width))
        y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        normed.append(split(y.flatten(-2), 4))
    out, _ = by_hand(*normed, split(attention.value(x), 4), torch.ones(T, T).tril()[None, None])
    want = attention.output(out.float().transpose(1, 2).flatten(2))
    assert (attention(x, AttentionInfo(Mask(T, T, causal=True))) - want).abs().max() < 1e-5


def test_dropout_acts_in_training_alone():
    attention, x = layer(dropout=0.5), draw(B, T, 16)
    info = AttentionInfo(Mask(T, T, causal=True))
    assert torch.equal(attention(x, info), attention(x, info))
    torch.manual_seed(0)
    attention.train()
    assert not torch.equal(attention(x, info), attention(x, info))


def test_impossible_heads_are_named():
    with pytest.raises(ValueError, match="set d_head"):
        Attention(10, 4)
    with pytest.raises(ValueError, match="n_kv_heads 3"):
        Attention(16, 4, n_kv_heads=3)
