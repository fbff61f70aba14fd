"""BERT, RoBERTa and DistilBERT as a user meets them: heads, segments, packing, labels, old files, real weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, DistilBertConfig, DistilBertModel, RobertaModel
from transformers import RobertaConfig as HubRobertaConfig

from heedful.models.base import Batch
from heedful.models.bert import Bert
from heedful.models.bert import BertConfig as OurConfig
from heedful.models.distilbert import DistilBert
from heedful.models.distilbert import DistilBertConfig as OurDistilConfig
from heedful.models.mapping import to_hub
from heedful.models.registry import for_hub
from heedful.models.roberta import RobertaConfig
from heedful.weights.folder import load_folder
from heedful.weights.load import DictSource, load_tensors
from heedful.weights.save import save
from support.case import error, randomize, real, text_batch
from support.cases import bert, distilbert, roberta
from support.real import real_model

LIMIT = 1e-5
TINY = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=61, max_len=64)


def tiny(head="masked", **changes):
    torch.manual_seed(0)
    return randomize(Bert.create(OurConfig(**{**TINY, "head": head, **changes})))


def filled(hub, tensors):
    family = for_hub(hub).load()
    with torch.device("meta"):
        model = family(family.config_class.from_hub(hub))
    load_tensors(model, DictSource(tensors))
    return model.eval()


# --- the bare encoder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BertModel, BertConfig(**bert.TINY)),
        (RobertaModel, HubRobertaConfig(**roberta.TINY)),
        (DistilBertModel, DistilBertConfig(**distilbert.TINY)),
    ],
    ids=["bert", "roberta", "distilbert"],
)
def test_the_bare_encoder_equals_the_reference(kind, config, pooler, tmp_path):
    pools = kind is not DistilBertModel
    if pooler and not pools:
        pytest.skip("DistilBERT has no pooler")
    torch.manual_seed(0)
    more = {"add_pooling_layer": pooler} if pools else {}
    reference = randomize(kind(config, **more))
    hub = config.to_dict() | {"architectures": [kind.__name__], **more}
    ours = filled(hub, {n: p.detach().clone() for n, p in reference.named_parameters()})
    batch = text_batch()
    seen = real(batch.lengths, *batch.tokens.shape)
    output = ours(batch)
    theirs = reference(input_ids=batch.tokens, attention_mask=seen.long())
    assert output.logits is None
    assert error(output.hidden[seen].detach(), theirs.last_hidden_state[seen].detach()) < LIMIT
    assert ("pooled" in output.extra) == (pooler and pools)
    loss, wanted = output.hidden[seen].sin().sum(), theirs.last_hidden_state[seen].sin().sum()
    if pooler and pools:
        assert error(output.extra["pooled"].detach(), theirs.pooler_output.detach()) < LIMIT
        loss, wanted = loss + output.extra["pooled"].sum(), wanted + theirs.pooler_output.sum()
    loss.backward()
    wanted.backward()
    gradients = dict(to_hub(ours.weight_map(), {n: p.grad for n, p in ours.named_parameters()}))
    for name, p in reference.named_parameters():
        assert error(gradients[name], p.grad) < LIMIT, name

    save(ours, tmp_path / "saved")
    again = kind.from_pretrained(tmp_path / "saved", **more)
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in reference.named_parameters())
    assert load_folder(tmp_path / "saved").config == ours.config


# --- heads -------------------------------------------------------------------------------------------------------


def test_segments_matter_and_are_all_a_without_them():
    model, batch = tiny(), text_batch()
    plain = model(batch).logits
    batch.segments = torch.zeros_like(batch.tokens)
    assert error(model(batch).logits, plain) < 1e-6
    batch.segments[:, 4:] = 1
    assert error(model(batch).logits, plain) > 0.01


def test_a_model_without_segments_refuses_them():
    model = DistilBert.create(OurDistilConfig(**TINY))
    batch = text_batch()
    batch.segments = torch.zeros_like(batch.tokens)
    with pytest.raises(ValueError, match="sentence A"):
        model(batch)


def test_pretraining_says_words_pairs_and_a_vector():
    output = tiny("pretraining")(text_batch())
    assert output.logits.shape == (3, 13, 61)
    assert output.extra["next_sentence"].shape == (3, 2)
    assert output.extra["pooled"].shape == (3, 32)


def test_the_vocabulary_is_tied_to_the_embedding():
    model = tiny()
    assert model.head.vocabulary.weight is model.embed.weight
    assert model.n_parameters() == sum(p.numel() for p in set(model.parameters()))


def test_packed_documents_equal_separate_ones_with_padding_behind():
    model, batch = tiny(), text_batch()
    rows = [batch.tokens[i, :n] for i, n in enumerate(batch.lengths)]
    padding = torch.full((4,), 9)
    documents = torch.cat([torch.full((len(r),), i) for i, r in enumerate([*rows, padding])])[None]
    documents[documents == 3] = 2  # the padding has the last document's number: its length says what is real
    lengths = torch.tensor([sum(len(r) for r in rows)])
    packed = model(Batch(torch.cat([*rows, padding])[None], lengths, documents=documents)).logits[0]
    assert torch.isfinite(packed).all()
    alone = torch.cat([model(r[None]).logits[0] for r in rows])
    assert error(packed[: len(alone)], alone) < LIMIT


def test_a_head_that_pools_refuses_packing():
    tokens = torch.full((1, 6), 5)
    with pytest.raises(ValueError, match="pack"):
        tiny("classify")(Batch(tokens, documents=torch.zeros_like(tokens)))


def test_choices_do_not_see_each_other():
    model = tiny("choose")
    tokens = torch.randint(3, 61, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    before = model(Batch(tokens)).logits
    assert before.shape == (2, 3)
    tokens[:, 2] = 5
    assert error(model(Batch(tokens)).logits[:, :2], before[:, :2]) < 1e-6
    with pytest.raises(ValueError, match="choices"):
        model(Batch(tokens[:, 0]))


def test_a_text_too_long_is_refused():
    with pytest.raises(ValueError, match="64"):
        tiny()(torch.full((1, 65), 5))


# --- configs -----------------------------------------------------------------------------------------------------


def test_labels_survive(tmp_path):
    names = ("negative", "neutral", "positive")
    model = tiny("classify", n_labels=3, labels=names, problem_type="multi_label_classification")
    save(model, tmp_path / "saved")
    hub = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert hub["id2label"] == {"0": "negative", "1": "neutral", "2": "positive"}
    again = load_folder(tmp_path / "saved")
    assert again.config == model.config and again.config.labels == names


def test_what_the_labels_are():
    assert OurConfig(n_labels=1).problem == "regression"
    assert OurConfig(n_labels=3).problem == "single_label_classification"
    assert OurConfig(n_labels=3, problem_type="regression").problem == "regression"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        OurConfig.from_hub({"model_type": "bert", **changes})


def test_an_unknown_head_and_a_wrong_number_of_labels_are_refused():
    with pytest.raises(ValueError, match="masked"):
        OurConfig(head="maskd")
    with pytest.raises(ValueError, match="n_labels"):
        OurConfig(labels=("a", "b", "c"))


def test_roberta_counts_positions_after_the_padding():
    config = RobertaConfig.from_hub({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1})
    assert config.max_len == 512 and config.to_hub()["max_position_embeddings"] == 514


# --- files -------------------------------------------------------------------------------------------------------


def test_a_file_with_old_names_other_heads_and_tables_is_read():
    """As google-bert/bert-base-uncased is: a masked model's config over a file of the pre-training model."""
    source = tiny("pretraining")
    tensors = {n: p.detach() for n, p in to_hub(source.weight_map(), dict(source.named_parameters()))}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): p
        for n, p in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    hub = source.config.to_hub() | {"architectures": ["BertForMaskedLM"]}
    batch = text_batch()
    assert torch.equal(filled(hub, old)(batch).logits, source(batch).logits)
    bare = filled(hub | {"architectures": ["BertModel"]}, old)(batch)
    assert torch.equal(bare.extra["pooled"], source(batch).extra["pooled"])


def test_what_is_missing_is_named():
    source = tiny("masked")
    tensors = dict(to_hub(source.weight_map(), dict(source.named_parameters())))
    hub = source.config.to_hub() | {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(ValueError, match=r"missing\s+classifier\.weight"):
        filled(hub, tensors)


# --- real weights ------------------------------------------------------------------------------------------------

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal, quietly, in the kitchen of an old house.",
    "Stars.",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return real_model("all-minilm-l6-v2")


@torch.no_grad()
def test_minilm_embeds_as_the_reference_does(minilm):
    model, reference = load_folder(minilm), BertModel.from_pretrained(minilm).eval()
    given = AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    seen = given["attention_mask"].bool()
    output, theirs = model(Batch(given["input_ids"], seen.sum(1))), reference(**given)
    assert error(output.hidden[seen], theirs.last_hidden_state[seen]) < LIMIT
    assert error(output.extra["pooled"], theirs.pooler_output) < LIMIT

    def mean(hidden):
        total = (hidden * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        return torch.nn.functional.normalize(total, dim=-1)

    ours = mean(output.hidden)
    assert error(ours, mean(theirs.last_hidden_state)) < LIMIT
    assert ours[0] @ ours[1] > ours[0] @ ours[2]  # the two about eating are closer than either is to the stars
