"""tokenizer_config.json: what transformers needs beside tokenizer.json to tokenize as we do.

Its classes for BERT and RoBERTa take only the vocabulary from tokenizer.json and build the rest anew, from settings of
this file. So a class is named where it would build this very tokenizer; else it is PreTrainedTokenizerFast, which
takes all of tokenizer.json.
"""

from __future__ import annotations

import json
from typing import Any

from heedful.text.tokenizer import Tokenizer

GENERIC = "PreTrainedTokenizerFast"


def tokenizer_config(
    tokenizer: Tokenizer, *, model_type: str = "", segments: bool | None = None, max_length: int | None = None
) -> dict[str, Any]:
    """The contents of tokenizer_config.json, for a model of this type if it is for one.

    `segments`: whether that model reads token_type_ids; None: as is usual for the tokenizer. `max_length`: to how many
    tokens transformers truncates, with truncation=True.
    """
    spec: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    name, settings = _bert(tokenizer, spec) or _roberta(tokenizer, spec) or (GENERIC, {})
    if name == "BertTokenizer" and model_type == "distilbert":
        name = "DistilBertTokenizer"
    segments = name == "BertTokenizer" if segments is None else segments
    config: dict[str, Any] = {
        "tokenizer_class": name,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        **settings,
        **{f"{role}_token": token for role, token in tokenizer.roles.items()},
    }
    return config if max_length is None else {**config, "model_max_length": max_length}


def _bert(tokenizer: Tokenizer, spec: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """BERT's class and its settings, if it would build this tokenizer."""
    model, normalizer = spec["model"], spec["normalizer"] or {}
    same = (
        (model["type"], normalizer.get("type"), _kind(spec["pre_tokenizer"]))
        == ("WordPiece", "BertNormalizer", "BertPreTokenizer")
        and (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", 100)
        and normalizer["clean_text"]
        and _puts_around(tokenizer, n_between=1, segments=True)
    )
    if not same:
        return None
    names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
    settings = {name: normalizer[theirs] for name, theirs in names.items()}
    return "BertTokenizer", {**settings, "strip_accents": normalizer["strip_accents"]}


def _roberta(tokenizer: Tokenizer, spec: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """RoBERTa's class and its settings, if it would build this tokenizer."""
    model, pre, post = spec["model"], spec["pre_tokenizer"] or {}, spec["post_processor"] or {}
    same = (
        (model["type"], _kind(pre), _kind(post)) == ("BPE", "ByteLevel", "RobertaProcessing")
        and spec["normalizer"] is None
        and pre["use_regex"]
        and not (model["dropout"] or model["ignore_merges"])
        and _puts_around(tokenizer, n_between=2, segments=False)
    )
    settings = {"add_prefix_space": pre.get("add_prefix_space"), "trim_offsets": post.get("trim_offsets")}
    return ("RobertaTokenizer", settings) if same else None


def _kind(part: dict[str, Any] | None) -> str | None:
    return None if part is None else part.get("type")


def _puts_around(tokenizer: Tokenizer, *, n_between: int, segments: bool) -> bool:
    """Whether a pair is [CLS] a [SEP] b [SEP], with one [SEP] or two between the texts."""
    cls, sep, inner = [tokenizer.cls_id], [tokenizer.sep_id], tokenizer.encode("a")
    ids, types = tokenizer.encode_pair("a", "a")
    n_second = len(inner) + 1
    wanted = [0] * (len(ids) - n_second) + [int(segments)] * n_second
    return ids == [*cls, *inner, *(sep * n_between), *inner, *sep] and types == wanted
