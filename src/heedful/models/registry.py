"""The table of families and published sizes. Torch is imported only when a family's module is loaded."""

from __future__ import annotations

import difflib
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.models.base import Model


@dataclass(frozen=True)
class Family:
    """A family: its module and class, the hub's `model_type`s that it loads, a one-line description."""

    name: str
    class_name: str
    hub_types: tuple[str, ...]
    about: str

    def load(self) -> type[Model]:
        """Import the family's module and return its model class."""
        module = importlib.import_module(f"heedful.models.{self.name}")
        found: type[Model] = getattr(module, self.class_name)
        return found


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in [
        Family("seq2seq", "Seq2Seq", (), "LSTM, GRU, alignment (Sutskever, Cho 2014; Bahdanau, Luong 2015)"),
        Family("gpt", "GPT", ("gpt2", "openai-gpt"), "GPT-1, GPT-2, GPT-3 (Radford 2018, 2019; Brown 2020)"),
        Family("gpt_neo", "GPTNeo", ("gpt_neo",), "GPT-Neo (Black 2021)"),
        Family("gpt_j", "GPTJ", ("gptj",), "GPT-J (Wang & Komatsuzaki 2021)"),
        Family("gpt_neox", "GPTNeoX", ("gpt_neox",), "GPT-NeoX, Pythia (Black 2022; Biderman 2023)"),
        Family("image_gpt", "ImageGPT", ("imagegpt",), "image GPT (Chen 2020)"),
        Family("llama", "Llama", ("llama",), "LLaMA 1 to 3.2, SmolLM2 (Touvron 2023; Grattafiori 2024)"),
        Family("mistral", "Mistral", ("mistral",), "Mistral 7B (Jiang 2023)"),
        Family("mixtral", "Mixtral", ("mixtral",), "Mixtral 8x7B, 8x22B (Jiang 2024)"),
        Family("qwen", "Qwen", ("qwen2", "qwen3"), "Qwen 2, 2.5, 3 (Yang 2024, 2025)"),
        Family("gemma", "Gemma", ("gemma", "gemma2"), "Gemma 1, 2 (Gemma Team 2024)"),
        Family("phi", "Phi", ("phi3",), "Phi-3 mini, medium (Abdin 2024)"),
        Family("olmo", "Olmo", ("olmo2",), "OLMo 2 (OLMo Team 2025)"),
        Family(
            "transformer",
            "Transformer",
            ("marian",),
            "The original encoder-decoder (Vaswani 2017), Marian (Junczys-Dowmunt 2018)",
        ),
        Family("t5", "T5", ("t5",), "T5, T5 v1.1, FLAN-T5, ByT5 (Raffel 2020; Chung 2022; Xue 2022)"),
        Family("bert", "Bert", ("bert",), "BERT, its miniatures, MiniLM (Devlin 2019; Turc 2019)"),
        Family("roberta", "Roberta", ("roberta",), "RoBERTa (Liu 2019)"),
        Family("distilbert", "DistilBert", ("distilbert",), "DistilBERT (Sanh 2019)"),
        Family("vit", "ViT", ("vit",), "Vision Transformer (Dosovitskiy 2021; Steiner 2022)"),
        Family("cbow", "CBOW", (), "continuous bag of words (Mikolov 2013)"),
    ]
}


@dataclass(frozen=True)
class Size:
    """A published size: its family, its number of parameters, and its settings as far as the defaults differ."""

    name: str
    family: str
    parameters: int
    settings: Mapping[str, Any]


@cache
def sizes() -> dict[str, Size]:
    """All published sizes by name."""
    text = resources.files("heedful.models").joinpath("sizes.toml").read_text(encoding="utf-8")
    found: dict[str, Size] = {}
    for family, rows in tomllib.loads(text).items():
        for name, row in rows.items():
            settings = {k: v for k, v in row.items() if k != "parameters"}
            found[name] = Size(name, family, row["parameters"], settings)
    return found


def size(name: str) -> Size:
    """The published size of this name; ValueError with the nearest names if there is none."""
    if name not in sizes():
        near = difflib.get_close_matches(name, sizes(), n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(f"no model is called {name!r}{hint} (`heedful models` lists them all)")
    return sizes()[name]


def create(name: str, *, device: str = "cpu", **changes: Any) -> Model:
    """A new model of a published size with its paper's initial weights; `changes` are settings of its config."""
    chosen = size(name)
    family = FAMILIES[chosen.family].load()
    return family.create(family.config_class.from_dict({**chosen.settings, **changes}), device=device)


def for_hub(hub: Mapping[str, Any]) -> Family:
    """The family for a parsed config.json, by its `model_type`: the hub's, or "heedful" with a `family`."""
    kind = hub.get("model_type")
    if kind == "heedful" and hub.get("family") in FAMILIES:
        return FAMILIES[hub["family"]]
    for family in FAMILIES.values():
        if kind in family.hub_types:
            return family
    known = sorted(t for f in FAMILIES.values() for t in f.hub_types)
    raise ValueError(f"model_type {kind!r} is not known; these are: {', '.join(known)}")
