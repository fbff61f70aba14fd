"""What of a model learns: adapters, the head alone, what is named; merged, it runs as before."""

import pytest
import torch
from torch import nn

from heedful.kernels.accelerate import accelerate, n_bytes
from heedful.models.base import Batch
from heedful.nn.lora import adapted
from heedful.train import optimizers
from heedful.train.adapters import adapt, merge
from heedful.train.objectives import causal
from heedful.train.recipe import OptimizerSettings
from heedful.weights.folder import load_folder
from heedful.weights.save import save
from support.adapters import lora_settings as settings
from support.adapters import stir, tiny
from support.case import error
from support.families import CASES

CASE = {case.name: case for case in CASES}


def tokens(seed=0):
    return torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(seed))


def test_only_the_adapter_learns():
    model = tiny()
    before = {n: p.clone() for n, p in model.named_parameters()}
    names = adapt(model, settings())
    optimizer = optimizers.make_optimizer(model, OptimizerSettings(lr=0.01))
    for _ in range(5):
        loss = causal(model, Batch(tokens()))
        loss.mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.mean < causal(tiny(), Batch(tokens())).mean
    for name, parameter in model.named_parameters():
        if "lora" in name:
            assert parameter.requires_grad and parameter.any(), name
        else:
            assert torch.equal(parameter, before[name]) and parameter.grad is None, name
    assert len(names) == 2 * 6, "query, key, value, output, up and down of both blocks"


def test_a_model_in_four_bits_is_small_counts_all_and_stays_exact_when_cast():
    plain = tiny(d_model=128)
    small = tiny(d_model=128)
    adapt(small, settings("qlora", rank=1))
    n_adapter = sum(p.numel() for n, p in small.named_parameters() if "lora" in n)
    assert small.n_parameters() == plain.n_parameters() + n_adapter
    assert n_bytes(small) < 0.3 * n_bytes(plain)
    stored = next(iter(adapted(small).values())).stored
    before = stored.dense()
    small.bfloat16()
    assert torch.equal(stored.dense(), before)


def test_qlora_learns_and_is_merged_as_it_ran(tmp_path):
    model = tiny()
    adapt(model, settings("qlora"))
    optimizer = optimizers.make_optimizer(model, OptimizerSettings(lr=0.01))
    losses = []
    for _ in range(20):
        loss = causal(model, Batch(tokens()))
        loss.mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.mean.item())
    assert losses[-1] < losses[0] - 0.3
    ran = model(tokens()).logits
    save(merge(model), tmp_path / "merged")
    assert error(load_folder(tmp_path / "merged")(tokens()).logits, ran) < 1e-5


def test_targets_by_pattern_and_a_head_that_learns_in_full():
    model = tiny("bert", head="classify", n_labels=3, d_ff=64)
    names = adapt(model, settings(targets=["attention.query", "blocks.1.feedforward.*"], trainable=["head"]))
    assert names == [
        "encoder.blocks.0.attention.query",
        "encoder.blocks.1.attention.query",
        "encoder.blocks.1.feedforward.up",
        "encoder.blocks.1.feedforward.down",
    ]
    learning = {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert learning == {f"head.{m}.{p}" for m in ("pooler.dense", "classifier") for p in ("weight", "bias")}


def test_routers_are_not_adapted_unless_named():
    model = tiny("mixtral", n_kv_heads=2, d_ff=8, n_experts=2, n_chosen=1)
    assert not any("router" in name for name in adapt(model, settings()))


def test_the_head_alone():
    model = tiny("bert", head="classify", n_labels=3, d_ff=64)
    names = adapt(model, settings("head"))
    assert names == [f"head.{m}.{p}" for m in ("pooler.dense", "classifier") for p in ("weight", "bias")]
    assert [n for n, p in model.named_parameters() if p.requires_grad] == names


def test_a_tied_head_cannot_learn_alone():
    with pytest.raises(ValueError, match="table of embeddings too"):
        adapt(tiny(), settings("head"))


def test_freezing_all_but_what_is_named():
    model = tiny()
    names = adapt(model, settings("freeze", trainable=["decoder.blocks.1.attention", "*norm*"]))
    assert names == [n for n, p in model.named_parameters() if p.requires_grad]
    assert all("blocks.1.attention" in n or "norm" in n for n in names)
    assert sum("norm" in n for n in names) == 10


@pytest.mark.parametrize(
    "wrong, message",
    [
        (settings(targets=["attention.qeury"]), "no linear layer is called 'attention.qeury'"),
        (settings(targets=["embed"]), "no linear layer is called 'embed'"),
        (settings(trainable=["haed"]), "no parameter is called 'haed'"),
        (settings(trainable=["attention.query"]), "both be adapted and learn in full"),
        (settings("freeze"), "nothing to learn"),
        (settings(trainable=["decoder.norm.bias"]), "whole modules: decoder.norm.weight must learn too"),
    ],
)
def test_patterns_that_say_nothing_or_too_much(wrong, message):
    with pytest.raises(ValueError, match=message):
        adapt(tiny(), wrong)


def test_adapting_twice_or_packed_weights_is_refused():
    model = tiny()
    adapt(model, settings())
    with pytest.raises(ValueError, match="adapters already"):
        adapt(model, settings())
    with pytest.raises(ValueError, match="packed"):
        adapt(accelerate(tiny(), "inference", precision="float32"), settings())


def test_a_model_without_blocks_is_adapted_where_it_says():
    model = CASE["seq2seq-lstm-bi-additive"].model()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with pytest.raises(ValueError, match=f"name `targets` among {linear[0]}"):
        adapt(model, settings())
    assert adapt(model, settings(targets=linear[:1])) == linear[:1]
    without = CASE["seq2seq-lstm-uni-none"].model()
    with pytest.raises(ValueError, match="no linear layers"):
        adapt(without, settings())


def test_watching_attention_and_hooks_work_on_adapted_layers():
    model = tiny()
    adapt(model, settings())
    stir(model)
    plain = model(tokens()).logits
    attention = model.decoder.blocks[1].attention
    seen = {}
    attention.query.register_forward_hook(lambda _m, _i, out: seen.update(query=out))
    attention.watch.weights.register_forward_hook(lambda _m, _i, out: seen.update(weights=out))
    attention.watch.on = True
    torch.testing.assert_close(model(tokens()).logits, plain)
    assert seen["query"].shape == (2, 9, 32)
    torch.testing.assert_close(seen["weights"].sum(-1), torch.ones(2, 2, 9))


def test_adapters_are_neither_packed_nor_saved_whole_until_merged(tmp_path):
    model = tiny()
    adapt(model, settings())
    stir(model)
    with pytest.raises(ValueError, match="is not packed: merge them first"):
        accelerate(model, "inference", precision="float32")
    with pytest.raises(ValueError, match="is not saved whole: merge them first"):
        save(model, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    with torch.no_grad():
        ran = model(tokens()).logits
        merge(model)
        assert all(p.requires_grad for p in model.parameters()) and not adapted(model)
        assert error(accelerate(model, "inference", precision="float32")(tokens()).logits, ran) < 1e-5
