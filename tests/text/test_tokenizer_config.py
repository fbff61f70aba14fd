"""tokenizer_config.json: transformers reads an exported tokenizer as ours, of the class that its model expects."""

import json

import pytest
import torch
from tokenizers import normalizers

import heedful
from heedful.text import Tokenizer, train_bpe, train_wordpiece
from heedful.text.tokenizer_config import tokenizer_config
from heedful.weights.resolve import shipped_models
from heedful.weights.save import save_tokenizer
from support.tokenizer_parity import CORPUS, check_tokenizer, tokenizer_of

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

QUESTION = "Who lives in the old house?"
PASSAGE = "The old house on the hill is empty no longer. A painter from Lisbon lives in it, with her two dogs."


def test_an_exported_reader_answers_in_transformers(tmp_path):
    loaded = heedful.load("reader")
    loaded.save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    inputs = tokenizer(QUESTION, PASSAGE, return_tensors="pt", return_offsets_mapping=True)
    offsets = inputs.pop("offset_mapping")[0].tolist()
    assert type(tokenizer).__name__ == "BertTokenizer" and inputs["token_type_ids"].any()
    with torch.no_grad():
        out = model(**inputs)
    passage = [i for i, side in enumerate(inputs.sequence_ids(0)) if side == 1]
    begin = max(passage, key=lambda i: float(out.start_logits[0, i]))
    end = max(passage, key=lambda i: float(out.end_logits[0, i]))
    answer = loaded.answer(QUESTION, PASSAGE)
    assert answer.text and (offsets[begin][0], offsets[end][1]) == (answer.begin, answer.end)


@pytest.mark.parametrize("name", ["bert-books", "sentiment", "reader", "entities"])
def test_the_encoders_that_ship_have_their_tokenizers_in_transformers(name):
    loaded = heedful.load(name)
    check_tokenizer(loaded.tokenizer, transformers.AutoTokenizer.from_pretrained(shipped_models()[name]), loaded.model)


@pytest.mark.parametrize(
    "name", [name for name, path in shipped_models().items() if (path / "tokenizer.json").exists()]
)
def test_what_ships_is_what_an_export_writes(name, tmp_path):
    loaded = heedful.load(name)
    save_tokenizer(tmp_path, loaded.tokenizer, loaded.model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / file).read_text()) == json.loads((shipped_models()[name] / file).read_text())


def test_a_class_is_named_only_where_it_builds_the_same_tokenizer(tmp_path, nasty):
    """BERT's class rebuilds its normalizer: a tokenizer with another one must not name it."""
    cased = train_wordpiece(CORPUS, 90, lower_case=False, special=["[A]"])
    config = tokenizer_config(cased)
    assert (config["tokenizer_class"], config["do_lower_case"]) == ("BertTokenizer", False)
    assert tokenizer_config(cased, model_type="distilbert", segments=False)["tokenizer_class"] == "DistilBertTokenizer"
    marked = train_wordpiece(CORPUS, 90)
    marked.backend.normalizer = normalizers.Sequence([normalizers.Replace("é", "e"), marked.backend.normalizer])
    assert tokenizer_config(Tokenizer(marked.backend))["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer_config(train_bpe(CORPUS, 280))["tokenizer_class"] == "PreTrainedTokenizerFast"
    roberta = tokenizer_of("roberta")
    assert roberta is not None and tokenizer_config(roberta)["tokenizer_class"] == "RobertaTokenizer"
    for name, tokenizer in (("cased", cased), ("roberta", roberta)):
        tokenizer.save(tmp_path / name)
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert type(reference).__name__ == tokenizer_config(tokenizer)["tokenizer_class"]
        for text in [*nasty, "[A] a"]:
            assert reference(text)["input_ids"] == tokenizer.encode(text, add_special=True, allow_special=True), text
        assert Tokenizer.from_folder(tmp_path / name).special_tokens == tokenizer.special_tokens
