"""T5: what a user notices beyond the numbers of the parity suite."""

import pytest
import torch
from transformers import T5Config as HubConfig
from transformers import T5ForConditionalGeneration

import heedful
from heedful.models.base import Batch
from heedful.models.t5 import T5, T5Config
from heedful.weights.describe import describe_model
from heedful.weights.folder import load_folder
from heedful.weights.load import DictSource, load_tensors
from heedful.weights.save import save

TINY = dict(d_model=32, n_layers=2, n_heads=4, d_head=6, d_ff=48, vocab_size=61)
GATED = dict(act="gelu_new", gated=True, tied=False)


def tiny(**changes) -> T5:
    torch.manual_seed(0)
    return T5.create(T5Config(**{**TINY, **changes})).eval()


def ids(*shape, seed=0):
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [{}, GATED], ids=["tied", "untied"])
def test_the_head_is_the_embedding_or_its_own_and_stays_so(settings, tmp_path):
    model = tiny(**settings)
    save(model, tmp_path / "model")
    again = load_folder(tmp_path / "model")
    assert again.config == model.config
    for one in model, again:
        assert (one.head.weight is one.embed.weight) == one.config.tied
    assert torch.equal(again.head.weight, model.head.weight)
    batch = Batch(ids(1, 4), source=ids(1, 5))
    assert torch.equal(again(batch).logits, model(batch).logits)


def test_only_a_tied_head_is_scaled():
    hidden = torch.randn(1, 2, 32)
    tied, untied = tiny(), tiny(**GATED)
    torch.testing.assert_close(tied.head(hidden), hidden @ tied.embed.weight.T / 32**0.5)
    torch.testing.assert_close(untied.head(hidden), hidden @ untied.head.weight.T)


def test_the_encoder_is_run_once():
    model, runs = tiny(), []
    model.encoder.register_forward_hook(lambda *_: runs.append(1))
    logits, state = model.start(Batch(source=ids(2, 7)))
    for _ in range(4):
        logits = model.step(logits.argmax(-1), state)
    assert len(runs) == 1


def test_a_text_may_be_longer_than_any_distance_it_was_trained_on():
    model = tiny(n_buckets=8, max_distance=10)
    assert model.context_length is None
    assert torch.isfinite(model(Batch(ids(1, 3), source=ids(1, 300))).logits).all()


def test_dropout_is_where_the_reference_has_it():
    """Embeddings and end of both halves, scores, feed-forward and sublayers: none is left in training mode."""
    model = tiny(dropout=0.999)
    batch = Batch(ids(1, 4), source=ids(1, 5))
    model.train()
    torch.manual_seed(0)
    assert (model.hidden(batch) == 0).float().mean() > 0.9
    assert (model.encode(batch) == 0).float().mean() > 0.9
    block = model.decoder.blocks[0]
    assert block.attention.dropout == block.cross.dropout == block.feedforward.dropout.p == 0.999


PUBLISHED = {
    "t5-small": dict(feed_forward_proj="relu"),
    "t5 without the key": dict(),
    "flan-t5": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "flan-t5, later": dict(
        feed_forward_proj="gated-gelu", dense_act_fn="gelu_new", is_gated_act=True, tie_word_embeddings=False
    ),
    "exact gelu": dict(feed_forward_proj="gated-gelu", dense_act_fn="gelu", tie_word_embeddings=False),
    "gated silu": dict(feed_forward_proj="gated-silu"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_means_what_the_reference_reads_in_it(name):
    theirs = HubConfig(**PUBLISHED[name])
    ours = T5Config.from_hub({"model_type": "t5", **PUBLISHED[name]})
    assert (ours.act, ours.gated) == (theirs.dense_act_fn, theirs.is_gated_act)
    assert ours.tied == theirs.scale_decoder_outputs
    again = HubConfig(**{k: v for k, v in ours.to_hub().items() if k not in ("model_type", "architectures")})
    assert (again.dense_act_fn, again.is_gated_act) == (theirs.dense_act_fn, theirs.is_gated_act)
    assert again.scale_decoder_outputs == theirs.scale_decoder_outputs
    assert T5Config.from_hub(ours.to_hub()) == ours


def test_an_untied_model_saved_anew_by_the_reference_is_still_untied():
    hub = HubConfig(feed_forward_proj="gated-gelu", tie_word_embeddings=False).to_dict()
    assert hub["tie_word_embeddings"] is True, "the reference forgets it, and says scale_decoder_outputs"
    assert not T5Config.from_hub(hub).tied


@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}])
def test_a_new_model_of_the_reference_is_loaded_and_saved(changes, tmp_path):
    """Its v1.1 is tied and not scaled, which its config.json does not tell from untied: the tensors do."""
    torch.manual_seed(0)
    settings = dict(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=40, decoder_start_token_id=0)
    reference = T5ForConditionalGeneration(HubConfig(**settings, **changes)).eval()
    reference.save_pretrained(tmp_path / "theirs")
    loaded = heedful.load(tmp_path / "theirs")
    assert loaded.model.n_parameters() == reference.num_parameters()
    assert f"parameters    {reference.num_parameters():,}\n" in describe_model(str(tmp_path / "theirs"))
    source, target = torch.randint(3, 40, (1, 7)), torch.randint(3, 40, (1, 5))
    with torch.no_grad():
        wanted = reference(input_ids=source, decoder_input_ids=target).logits
        assert (loaded.model(Batch(target, source=source)).logits - wanted).abs().max() < 1e-5
        loaded.save(tmp_path / "ours")
        again = T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
        assert (again(input_ids=source, decoder_input_ids=target).logits - wanted).abs().max() < 1e-5
    assert heedful.load(tmp_path / "ours").model.config == loaded.model.config


def test_old_files_repeat_tensors_that_carry_nothing():
    model = tiny()
    tensors = dict(_hub_tensors(model))
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    tensors |= {name: tensors["shared.weight"] for name in copies}
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    with torch.device("meta"):
        again = T5(model.config)
    load_tensors(again, DictSource(tensors))
    assert torch.equal(again.embed.weight, model.embed.weight) and again.head.weight is again.embed.weight


def _hub_tensors(model):
    from heedful.models.mapping import to_hub

    return to_hub(model.weight_map(), {n: p.detach() for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    "hub, message",
    [
        (dict(feed_forward_proj="gated-swoosh"), "swoosh"),
        (dict(is_encoder_decoder=False), "is_encoder_decoder"),
        (dict(num_decoder_layers=10**6), "n_decoder_layers"),
        (dict(relative_attention_num_buckets=30), "buckets"),
        (dict(relative_attention_max_distance=16), "buckets"),
        (dict(decoder_start_token_id=99999), "start_id"),
    ],
)
def test_what_a_config_may_not_ask_for(hub, message):
    with pytest.raises(ValueError, match=message):
        with torch.device("meta"):
            T5(T5Config.from_hub({"model_type": "t5", **hub}))
