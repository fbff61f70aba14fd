"""Folders whose head is another one than the usual, or none: what is known is loaded, and the rest is named."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    T5Config,
    T5EncoderModel,
)

import heedful
from heedful.models.base import Batch
from heedful.models.registry import for_hub
from heedful.text import train_bpe
from heedful.weights.folder import load_folder
from heedful.weights.load import LeftOutWarning
from support.case import VOCAB, error, randomize, real, text_batch
from support.cases import bert, gpt, llama, t5

LIMIT = 1e-5
DECODERS = {
    "llama": lambda: LlamaModel(LlamaConfig(**llama.TINY)),
    "gpt2-untied": lambda: GPT2Model(GPT2Config(**gpt.TINY, tie_word_embeddings=False)),
}


def folder_of(reference, path):
    randomize(reference).save_pretrained(path)
    return path


def change(folder, adding, removing=()):
    file = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith(tuple(removing))}
    save_file(tensors | adding, file, metadata={"format": "pt"})


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)
def test_a_decoder_without_a_head_embeds(make, tmp_path):
    reference = make()
    model, batch = load_folder(folder_of(reference, tmp_path)), text_batch()
    assert model.abilities == ("embed", "neighbours", "capture")
    mask = real(batch.lengths, *batch.tokens.shape)
    want = reference(input_ids=batch.tokens, attention_mask=mask.long()).last_hidden_state
    assert error(model(batch).hidden[mask], want[mask]) < LIMIT


def test_a_generating_model_that_was_saved_without_its_head_embeds(tmp_path):
    folder = folder_of(LlamaForCausalLM(LlamaConfig(**llama.TINY)), tmp_path)
    change(folder, {}, ["lm_head."])
    assert "generate" not in load_folder(folder).abilities
    with pytest.raises(ValueError, match=r"extra +lm_head\.wight"):
        change(folder, {"lm_head.wight": torch.zeros(VOCAB, 64)})
        load_folder(folder)


@torch.no_grad()
def test_an_encoder_of_t5_embeds(tmp_path):
    reference = T5EncoderModel(T5Config(**t5.TINY))
    model, batch = load_folder(folder_of(reference, tmp_path)), text_batch()
    assert model.abilities == ("embed", "neighbours", "capture")
    mask = real(batch.lengths, *batch.tokens.shape)
    want = reference(input_ids=batch.tokens, attention_mask=mask.long()).last_hidden_state
    source = Batch(source=batch.tokens, source_lengths=batch.lengths)
    assert error(model(source).hidden[mask], want[mask]) < LIMIT
    from heedful.weights.save import save

    save(model, tmp_path / "again")
    again = T5EncoderModel.from_pretrained(tmp_path / "again").eval()
    assert error(again(input_ids=batch.tokens[:1]).last_hidden_state, want[:1]) < LIMIT


@torch.no_grad()
def test_a_classifier_gives_the_labels_of_the_reference(tmp_path):
    tokenizer = train_bpe(["A good film. A bad film. Good, bad, all right!"] * 3, vocab_size=300)
    names = {0: "bad", 1: "good", 2: "so so"}
    config = LlamaConfig(**{**llama.TINY, "vocab_size": tokenizer.vocab_size}, id2label=names)
    folder = folder_of(LlamaForSequenceClassification(config), tmp_path)
    tokenizer.save(folder)
    loaded = heedful.load(folder)
    text = "A good film."
    ids = torch.tensor([tokenizer.encode(text, add_special=True)])
    want = AutoModelForSequenceClassification.from_pretrained(folder).eval()(ids).logits[0].softmax(-1)
    found = {label.name: label.score for label in loaded.classify(text)}
    assert found == pytest.approx({names[i]: p for i, p in enumerate(want.tolist())}, abs=LIMIT)
    assert loaded.embed(text).shape == (64,)
    assert len(loaded.classify(["good", "a bad film, so bad"])) == 2
    with pytest.raises(ValueError, match="generate"):
        loaded.generate(text)
    with pytest.raises(ValueError, match="continue a text"):
        loaded.evaluate("perplexity", [folder / "config.json"])


@torch.no_grad()
def test_other_heads_are_left_out_and_named(tmp_path):
    reference = BertForPreTraining(BertConfig(**bert.TINY))
    folder = folder_of(reference, tmp_path)
    own = {"sentiment.dense.weight": torch.zeros(4, 32), "ner.weight": torch.zeros(9, 32)}
    change(folder, own)
    with pytest.warns(LeftOutWarning, match=r"left out.*: ner\.weight, sentiment\.dense\.weight$"):
        model = load_folder(folder)
    batch = text_batch()
    row = Batch(batch.tokens[:1])
    assert error(model(row).logits, reference(input_ids=row.tokens).prediction_logits) < LIMIT
    change(folder, {"bert.encoder.layer.0.attention.self.query.scale": torch.ones(1)}, own)
    with pytest.raises(ValueError, match=r"extra +bert\.encoder\.layer\.0\.attention\.self\.query\.scale"):
        load_folder(folder)  # within the encoder it would change the numbers


@torch.no_grad()
@pytest.mark.parametrize("pooler", [True, False])
def test_a_head_that_is_not_known_leaves_the_encoder(pooler, tmp_path):
    reference = BertModel(BertConfig(**bert.TINY), add_pooling_layer=pooler)
    reference.config.architectures = ["BertForSentiment"]
    randomize(reference)
    config = reference.config.to_dict() | {"architectures": ["BertForSentiment"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.save_pretrained(tmp_path)
    import json

    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="BertForSentiment is not known"):
        model = load_folder(tmp_path)
    assert ("pooler" if pooler else "encoder") == model.config.head and "embed" in model.abilities
    tokens = text_batch().tokens
    assert error(model(tokens).hidden, reference(input_ids=tokens).last_hidden_state) < LIMIT


@pytest.mark.parametrize("key, value", [("router_jitter_noise", 0.1), ("output_router_logits", True)])
def test_what_matters_in_training_alone_is_no_reason_to_refuse(key, value):
    hub = MixtralConfig(**llama.TINY, **{key: value}).to_dict()
    for_hub(hub).load().config_class.from_hub(hub)


def test_dropout_rates_are_kept_for_training():
    hub = GPT2Config(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3).to_dict()
    config = for_hub(hub).load().config_class.from_hub(hub)
    assert (config.dropout, config.embed_dropout, config.attention_dropout) == (0.1, 0.2, 0.3)
    assert {k: v for k, v in config.to_hub().items() if k.endswith("pdrop")} == {
        "resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3,
    }  # fmt: skip
    from heedful.models.gpt import GPT

    with torch.device("meta"):
        model = GPT(config)
    block = model.decoder.blocks[0]
    assert (block.dropout.p, model.dropout.p, block.attention.dropout) == (0.1, 0.2, 0.3)


def test_every_activation_is_that_of_the_reference():
    from heedful.nn.feedforward import ACTIVATIONS

    x = torch.linspace(-8, 8, 101)
    for name, function in ACTIVATIONS.items():
        theirs = transformers.activations.ACT2FN[name]
        assert torch.allclose(function(x), theirs(x), atol=1e-6), name
