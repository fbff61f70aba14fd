"""Vectors of texts: those of transformers pooled by hand, in the order asked for, whatever is read together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

import heedful
from heedful.models.base import TruncationWarning
from heedful.models.vit import ViT, ViTConfig
from heedful.tasks.embed import Pooling, embed_texts
from heedful.text.tokenizer import Tokenizer
from support.case import error, randomize
from support.folders import saved, tiny_llama
from support.real import real_model

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(40))]
ENCODER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=45)
KINDS = {
    "bert": ("BertModel", dict(**ENCODER, max_position_embeddings=64)),
    "bert-masked": ("BertForMaskedLM", dict(**ENCODER, max_position_embeddings=64)),
    "roberta": ("RobertaModel", dict(**ENCODER, max_position_embeddings=66, pad_token_id=0)),
    "distilbert": (
        "DistilBertModel",
        dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=45, max_position_embeddings=64),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        dict(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, vocab_size=45, decoder_start_token_id=0),
    ),
    "gpt2": ("GPT2LMHeadModel", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=45, n_positions=64)),
    "llama": ("LlamaForCausalLM", dict(**ENCODER, num_key_value_heads=2, max_position_embeddings=64)),
}
AROUND = {
    "t5": "$A [SEP]",
    "gpt2": "$A",
    "llama": "[CLS] $A",
}  # what stands around a text; [CLS] $A [SEP] else
TEXTS = [" ".join(f"w{(7 * i + j * j) % 40}" for j in range(n)) for i, n in enumerate([3, 9, 1, 30, 9, 4, 9, 2])]
SETTINGS = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LIMIT = 1e-5


def make(kind: str, folder: Path) -> Path:
    """A tiny random model of the reference's, with a tokenizer of made-up words."""
    name, settings = KINDS[kind]
    head = getattr(transformers, name)
    randomize(head(head.config_class(**settings))).save_pretrained(folder)
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = AROUND.get(kind, "[CLS] $A [SEP]")
    special = [(w, i) for i, w in enumerate(WORDS) if w in template.split()]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    roles = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]", "eos": "[SEP]"}
    Tokenizer(backend, roles=roles).save(folder)
    return folder


@torch.no_grad()
def reference(folder: Path, texts: list[str], pool: str, **settings: object) -> torch.Tensor:
    """Text by text, by transformers' own model and tokenizer; only the pooling is written here."""
    config = transformers.AutoConfig.from_pretrained(folder)
    head = transformers.T5EncoderModel if config.model_type == "t5" else transformers.AutoModel
    model, tokenizer = head.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        given = tokenizer(text, return_tensors="pt", return_token_type_ids=False, **settings)
        hidden = model(**given).last_hidden_state[0]  # (T, E)
        vectors.append({"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pool])
    return torch.stack(vectors)


def add_settings(folder: Path, modules: list[dict], pooling: dict, most: int | None = None) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if most is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_references(kind, tmp_path):
    folder = make(kind, tmp_path)
    loaded = heedful.load(folder)
    assert "embed" in loaded.abilities
    for pool in "mean", "first", "last":
        assert error(loaded.embed(TEXTS, pool=pool), reference(folder, TEXTS, pool)) < LIMIT
    usual = "last" if kind in ("gpt2", "llama") else "mean"
    assert torch.equal(loaded.embed(TEXTS), loaded.embed(TEXTS, pool=usual))


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("max_batch", [1, 20, 33, 10_000])
def test_what_is_read_together_does_not_matter(kind, max_batch, tmp_path):
    loaded = heedful.load(make(kind, tmp_path))
    alone = torch.stack([loaded.embed(text) for text in TEXTS])
    for pool in "mean", "last":
        together = embed_texts(loaded.model, loaded.tokenizer, TEXTS, Pooling(pool), max_batch=max_batch)
        alone = torch.stack([loaded.embed(text, pool=pool) for text in TEXTS])
        assert error(together, alone) < LIMIT


def test_shapes_and_types(tmp_path):
    loaded = heedful.load(make("bert", tmp_path), dtype=torch.bfloat16)
    assert loaded.embed([]).shape == (0, 32)
    assert loaded.embed("w1 w2").shape == (32,)
    vectors = loaded.embed(["w1 w2", ""], normalize=True)
    assert vectors.dtype == torch.float32
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(2))
    weight = torch.ones(32, requires_grad=True)
    (vectors @ weight).sum().backward()  # what was embedded can be learned from
    assert weight.grad is not None


def test_an_empty_text_is_the_tokens_around_it(tmp_path):
    for kind in "bert", "llama":
        folder = make(kind, tmp_path / kind)
        assert error(heedful.load(folder).embed([""], pool="mean"), reference(folder, [""], "mean")) < LIMIT
    gpt = heedful.load(make("gpt2", tmp_path / "gpt2"))  # nothing stands around it: the end of a text does
    assert torch.equal(gpt.embed(""), gpt.embed(["", "w1"])[0])


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_long_texts_are_cut_where_the_reference_cuts_them(kind, tmp_path):
    folder = make(kind, tmp_path)
    long = [*TEXTS, " ".join(["w5"] * 100)]
    theirs = reference(folder, long, "mean", truncation=True, max_length=8)
    assert error(heedful.load(folder).embed(long, pool="mean", max_tokens=8), theirs) < LIMIT


def test_long_texts_are_refused_unless_someone_says_to_cut_them(tmp_path):
    loaded = heedful.load(make("bert", tmp_path))
    with pytest.raises(ValueError, match="102 tokens do not fit: this model has positions for 64"):
        loaded.embed(" ".join(["w5"] * 100))
    with pytest.raises(ValueError, match="max_tokens is 2"):
        loaded.embed("w1", max_tokens=2)
    assert torch.equal(loaded.embed(" ".join(["w5"] * 100), max_tokens=1000), loaded.embed(" ".join(["w5"] * 62)))


FIRST = {
    "older": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "newer": {"pooling_mode": "cls"},
}


@pytest.mark.filterwarnings("ignore:this model reads")
@pytest.mark.parametrize("pooling", FIRST.values(), ids=FIRST)
def test_the_folders_settings_are_followed(pooling, tmp_path):
    folder = make("bert", tmp_path)
    add_settings(folder, SETTINGS, pooling, most=10)
    theirs = reference(folder, TEXTS, "first", truncation=True, max_length=10)
    unit = torch.nn.functional.normalize(theirs, dim=-1)
    loaded = heedful.load(folder)
    assert error(loaded.embed(TEXTS), unit) < LIMIT
    assert error(loaded.embed(TEXTS, normalize=False), theirs) < LIMIT
    longer = reference(folder, TEXTS, "mean")
    assert error(loaded.embed(TEXTS, pool="mean", normalize=False, max_tokens=40), longer) < LIMIT


@pytest.mark.filterwarnings("ignore:this model reads")
def test_the_folders_settings_are_saved(tmp_path):
    folder = make("bert", tmp_path)
    add_settings(folder, SETTINGS, FIRST["older"], most=10)
    loaded = heedful.load(folder)
    loaded.save(tmp_path / "saved")
    again = heedful.load(tmp_path / "saved")
    assert again.pooling == loaded.pooling
    assert torch.equal(again.embed(TEXTS), loaded.embed(TEXTS))


def test_a_folder_with_settings_cuts_at_the_models_length(tmp_path):
    folder = make("bert", tmp_path)
    add_settings(folder, SETTINGS[:2], {"pooling_mode_mean_tokens": True})
    long = " ".join(["w5", "w6"] * 50)
    theirs = reference(folder, [long], "mean", truncation=True, max_length=64)
    loaded = heedful.load(folder)
    with pytest.warns(TruncationWarning, match="reads 64 tokens of a text: the end of 1 of 2 is cut"):
        assert error(loaded.embed([long, "w5"])[:1], theirs) < LIMIT
    loaded.embed([long], max_tokens=20)  # asked for, and so without a warning


def test_what_cannot_be_done_is_refused_when_asked_for(tmp_path):
    folder = make("bert", tmp_path)
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    add_settings(folder, [*SETTINGS[:2], dense], {"pooling_mode": ["mean", "max"]})
    loaded = heedful.load(folder)
    with pytest.raises(ValueError, match=r"'mean \+ max \+ Dense' is no way to pool"):
        loaded.embed("w1")
    assert loaded.embed("w1", pool="mean").shape == (32,)


@pytest.mark.parametrize("path", ["..", "../../elsewhere", "missing", "/etc"])
def test_settings_lie_in_the_folder(path, tmp_path):
    folder = make("bert", tmp_path / "model")
    (tmp_path / "config.json").write_text("{}")
    add_settings(folder, [SETTINGS[0], SETTINGS[1] | {"path": path}], {})
    with pytest.raises(ValueError, match="is not a file in"):
        heedful.load(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"type": "x"}]'])
def test_settings_that_make_no_sense_are_refused(text, tmp_path):
    folder = make("bert", tmp_path)
    (folder / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=r"modules\.json"):
        heedful.load(folder)


def test_models_that_cannot_say_so(tmp_path):
    image = ViT.create(ViTConfig(d_model=32, n_layers=1, n_heads=4, d_ff=48, image_size=8, patch_size=4))
    with pytest.raises(ValueError, match="is a ViT and cannot embed"):
        heedful.Loaded(image, None, "images").embed("w1")
    with pytest.raises(ValueError, match="no tokenizer"):
        heedful.load(saved(tmp_path / "m", tiny_llama())).embed("w1")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_packed_weights_embed_too(kind, tmp_path):
    folder = make("bert", tmp_path)
    plain, packed = heedful.load(folder), heedful.load(folder, quantize=kind)
    cosines = torch.cosine_similarity(plain.embed(TEXTS), packed.embed(TEXTS))
    assert cosines.min() > (0.99999 if kind == "float32" else 0.99)


@pytest.mark.filterwarnings("ignore:this model reads")
def test_minilm_embeds_as_the_reference_does():
    folder = real_model("all-minilm-l6-v2")
    texts = ["A man is eating food.", "Someone has a meal.", "Stars.", "", "the end " * 300]
    theirs = reference(folder, texts, "mean", truncation=True, max_length=256)
    ours = heedful.load(folder).embed(texts)
    assert error(ours, torch.nn.functional.normalize(theirs, dim=-1)) < LIMIT
    assert ours[0] @ ours[1] > ours[0] @ ours[2]
