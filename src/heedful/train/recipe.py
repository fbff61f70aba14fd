"""Recipes: all settings of a training run in one TOML file, validated as a whole before anything starts.

    [model]      which family or size, or which trained model to begin from, and its settings
    [tokenizer]  how text becomes numbers           [data]       what is read
    [objective]  what is learned                    [train]      how long, how much at a time, on what
    [optimizer]  [schedule]  [adapter]  [log]

Each table is a frozen class below, with the defaults. `--set train.steps=200` changes one value.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from heedful.models.config import check_names, did_you_mean
from heedful.text.parse import parse_toml
from heedful.text.plural import counted
from heedful.train.settings import Settings, choice_field, number_field


@dataclass(frozen=True)
class TokenizerSettings(Settings):
    """[tokenizer]: how text becomes tokens."""

    # auto: characters for a small text, byte-pair encoding for a large one
    kind: str = choice_field("auto", "characters", "bpe", "wordpiece", "unigram", "words", "bytes", "none")
    vocab_size: int = number_field(0, 0, 2**20)  # 0: chosen by the size of the text
    path: str = ""  # a model or folder whose tokenizer is taken instead
    lower_case: bool = True  # WordPiece and words
    dropout: float = number_field(0.0, 0, 0.9)  # bpe of pairs: merges left out at random in training (BPE-dropout)
    chat_template: str = ""  # Jinja, in place of the tokenizer's own
    allow_special: bool = False  # special tokens written in the texts (<|im_start|>) are those tokens, not characters


@dataclass(frozen=True)
class DataSettings(Settings):
    """[data]: what is read."""

    kind: str = choice_field(
        "text", "chat", "preferences", "prompts", "pairs", "labelled", "tagged", "answers", "images", "pixels",
        "reversal",
    )  # fmt: skip
    source: str | tuple[Any, ...] = ""  # a path, sample:NAME (data/samples.py), or several tables {path, weight}
    validation: str = ""  # a path; without one, `share` of the source is kept for validation
    share: float = number_field(0.1, 0, 0.9)
    length: int = number_field(256, 1, 2**20)  # tokens of an example at most
    documents: bool = True  # attention stays inside each document of a packed row
    text: str = ""  # the field or column of the text, or of a chat's prompt
    second: str = ""  # the column of a second text
    label: str = ""  # the column of the label; comma-separated columns for multi_label
    target: str = ""  # pairs: the file or field of the other language; chat, prompts: the field of the answer
    validation_target: str = ""
    n_examples: int = number_field(2000, 1)  # reversal
    n_symbols: int = number_field(10, 2)
    shortest: int = number_field(0, 0)  # reversal: lengths from this to `length`; 0: all sequences have that length
    image_size: int = number_field(
        0, 0, 4096
    )  # images of a folder are resized to squares of this size; 0: they are not
    levels: int = number_field(16, 2, 4096)  # pixels: levels of grey, or colours of the palette
    shift: int = number_field(0, 0, 64)  # images: random shift by up to so many pixels; data/augment.py has the papers
    flip: bool = False  # images: half of them mirrored
    augment: int = number_field(0, 0, 8)  # images: random operations in a row (1: TrivialAugment)
    strength: float = number_field(1.0, 0, 1)  # the most of such an operation
    erase: float = number_field(0.0, 0, 1)  # images: probability of a rectangle of noise
    mixup: float = number_field(0.0, 0, 100)  # images: a of Beta(a, a); 0: none
    cutmix: float = number_field(0.0, 0, 100)
    blanked: float = number_field(0.0, 0, 0.99)  # reversal: word dropout on the decoder input
    pairs: bool = True  # masked: next-sentence prediction too
    masked: float = number_field(0.15, 0.01, 0.9)  # fraction of tokens: masked, spans
    whole_words: bool = False  # masked: all tokens of a word are hidden together
    subsample: float = number_field(0.0, 0, 1)  # cbow: words of a larger share than this are dropped at random; 0: none
    span: float = number_field(3.0, 1)  # the mean length of a corrupted span
    stride: int = number_field(128, 1)  # answers: overlap of windows over a long passage, in tokens


@dataclass(frozen=True)
class ObjectiveSettings(Settings):
    """[objective]: what is learned."""

    name: str = choice_field(
        "causal", "masked", "spans", "seq2seq", "classify", "regress", "multi_label", "tag", "answer", "cbow",
        "distill", "dpo", "grpo",
    )  # fmt: skip
    smoothing: float = number_field(0.0, 0, 0.99)
    r_drop: float = number_field(0.0, 0)  # seq2seq, classify, tag: weight of two dropouts' divergence; 0: one pass
    negatives: int = number_field(0, 0, 100)  # cbow: words that each is told from (negative sampling); 0: all
    teacher: str = ""  # distill: the teacher model
    temperature: float = number_field(2.0, 0.01)
    soft: float = number_field(5.0, 0)  # the weights of distill's three losses (Sanh et al. 2019)
    hard: float = number_field(2.0, 0)
    cosine: float = number_field(1.0, 0)
    loss_type: str = choice_field("usual", "sigmoid", "ipo", "grpo", "dr_grpo")  # usual: sigmoid of dpo, grpo of grpo
    beta: float = number_field(0.1, 0)  # dpo: how much it costs to leave the model before training
    sft: float = number_field(0.0, 0)  # dpo: weight of the chosen answers' own likelihood
    reward: str = choice_field("exact", "contains", "regex", "json_schema")  # grpo: the rule (data/rewards.py)
    group: int = number_field(8, 2, 256)  # grpo: completions of each prompt
    max_tokens: int = number_field(64, 1, 2**16)  # grpo: of a completion
    sampling_temperature: float = number_field(1.0, 0.01)  # grpo
    kl: float = number_field(0.0, 0)  # grpo: weight of the divergence from the model before training; 0: none
    clip: float = number_field(0.2, 0, 1)  # grpo: how far the probability of a token may move, with several updates
    updates: int = number_field(1, 1, 64)  # grpo: of the weights per step, each with the same completions


@dataclass(frozen=True)
class TrainSettings(Settings):
    """[train]: how long, in what batches, on what device."""

    steps: int = number_field(2000, 1)
    epochs: float = number_field(0.0, 0)  # in place of steps: passes over the data; 0: as many as the steps are
    batch_size: int = number_field(32, 1)  # examples of a step, over all processes
    accumulate: int = number_field(1, 1)  # micro-batches per step (gradient accumulation)
    precision: str = choice_field("float32", "bfloat16")  # bfloat16: products in bf16; weights and sums in fp32
    device: str = "auto"  # a CUDA GPU, else Apple's, else the CPU; or cpu, cuda, cuda:N, mps
    compile: str = choice_field("auto", "yes", "no")  # auto: on a GPU
    cuda_graph: bool = False  # on one GPU, a step is one CUDA graph: for small models with batches of one shape
    clip: float = number_field(1.0, 0)  # gradient norm clipping; 0: none
    ema: float = number_field(0.0, 0, 0.999999)  # decay of the averaged weights; 0: none
    seed: int = number_field(1, 0, 2**63 - 1)
    eval_every: int = number_field(0, 0)  # steps; 0: ten times in all
    eval_first: bool = False  # before the first step too
    eval_batches: int = number_field(0, 0)  # 0: all of the validation data
    save_every: int = number_field(0, 0)  # steps; 0: with every evaluation
    keep: int = number_field(2, 1)  # checkpoints
    patience: int = number_field(0, 0)  # evaluations without a better one before stopping; 0: never
    target: float = number_field(0.0, 0)  # stop once the validation loss is at most this; 0: never
    checkpoint_activations: bool = False
    workers: int = number_field(1, 0, 64)
    halt_after: int = number_field(5, 1)  # consecutive steps with a non-finite gradient
    sharded: bool = False  # several processes: FSDP2 instead of DDP

    def check_together(self) -> None:
        """A step cannot have more micro-batches than examples."""
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate is {self.accumulate}: a step has {self.batch_size} examples alone")


@dataclass(frozen=True)
class OptimizerSettings(Settings):
    """[optimizer]."""

    name: str = choice_field("adamw", "muon", "adafactor", "lion", "sgd")
    lr: float = number_field(1e-3, 0, 100)
    betas: tuple[float, ...] = (0.9, 0.99)
    eps: float = number_field(1e-8, 0)
    weight_decay: float = number_field(0.1, 0)
    muon_lr: float = number_field(0.02, 0, 100)  # learning rate of the matrices; the rest is trained by AdamW with lr
    adjust_lr: str = choice_field("original", "match_rms_adamw")  # muon: how the rate is scaled by a matrix's shape
    momentum: float = number_field(0.95, 0, 0.9999)  # muon and sgd

    def check_together(self) -> None:
        """Betas are two numbers in [0, 1)."""
        if len(self.betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas are {list(self.betas)}: two numbers from 0 to below 1 are needed")


@dataclass(frozen=True)
class ScheduleSettings(Settings):
    """[schedule]: the learning rate over time."""

    name: str = choice_field("cosine", "linear", "wsd", "inverse_sqrt", "constant")
    warmup: int = number_field(100, 0)  # steps
    final: float = number_field(0.1, 0, 1)  # final rate as a fraction of the peak: cosine, linear, wsd
    decay: float = number_field(0.2, 0, 1)  # wsd: fraction of steps in the decay phase


@dataclass(frozen=True)
class AdapterSettings(Settings):
    """[adapter]: which parameters are trained, and how."""

    kind: str = choice_field("none", "lora", "qlora", "head", "freeze")
    rank: int = number_field(8, 1, 4096)
    alpha: float = number_field(16.0, 0)
    dropout: float = number_field(0.0, 0, 0.99)
    targets: tuple[str, ...] = ()  # module name patterns; (): every linear layer of the blocks
    trainable: tuple[str, ...] = ()  # parameter name patterns; freeze: trained alone, adapters: trained in full


@dataclass(frozen=True)
class LogSettings(Settings):
    """[log]: samples and experiment trackers."""

    samples: bool = True  # generated text with every evaluation
    prompt: str = ""
    sample_tokens: int = number_field(100, 1, 10000)
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True)
class Recipe:
    """A whole recipe: a table of settings for each part of a training."""

    about: str = ""
    expected: str = ""  # the scores that were measured,
    measured_on: str = ""  # and the digest of the data that they were measured on: data_digest of recipes/data_paths.py
    model: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    log: LogSettings = field(default_factory=LogSettings)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Recipe:
        """A validated recipe; the error lists every mistake at once."""
        wrong: list[str] = []
        made: dict[str, Any] = {}
        _collect(wrong, lambda: check_names(given, [f.name for f in dataclasses.fields(cls)], "a recipe"))
        for name in ("about", "expected", "measured_on"):
            if not isinstance(given.get(name, ""), str):
                wrong.append(f"{name} is not a text")
            else:
                made[name] = given.get(name, "")
        for name, kind in TABLES.items():
            table = given.get(name, {})
            if not isinstance(table, Mapping):
                wrong.append(f"{name} is not a table: write [{name}] and its settings below")
            else:
                _table(wrong, made, name, kind, table)
        model = given.get("model", {})
        if not isinstance(model, Mapping):
            wrong.append("model is not a table: write [model] and its settings below")
        else:
            made["model"] = dict(model)
            _collect(wrong, lambda: check_model(model))
        if "data" in made and "objective" in made:
            _collect(wrong, lambda: check_objective(made["data"].kind, made["objective"].name))
        if wrong:
            listed = "".join(f"\n  {line}" for line in wrong)
            raise ValueError(f"the recipe has {counted(len(wrong), 'mistake')}:{listed}")
        return cls(**made)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, defaults included."""
        return dataclasses.asdict(self)

    def replace(self, **tables: Mapping[str, Any]) -> Recipe:
        """A copy with settings of some tables changed: recipe.replace(train={"steps": 10})."""
        return self.from_dict(merge_tables(self.to_dict(), tables))


TABLES: dict[str, type[Settings]] = {
    "tokenizer": TokenizerSettings,
    "data": DataSettings,
    "objective": ObjectiveSettings,
    "train": TrainSettings,
    "optimizer": OptimizerSettings,
    "schedule": ScheduleSettings,
    "adapter": AdapterSettings,
    "log": LogSettings,
}


def _table(wrong: list[str], made: dict[str, Any], name: str, kind: type[Settings], table: Mapping[str, Any]) -> None:
    """Validate a table, each setting alone, so that one mistake does not hide the others."""
    before = len(wrong)
    known = [f.name for f in dataclasses.fields(kind)]
    for key, value in table.items():
        if key in known:
            _collect(wrong, partial(kind.from_dict, {key: value}), f"{name}.")
        else:
            _collect(wrong, partial(check_names, {key: value}, known, f"[{name}]"))
    if len(wrong) == before:
        made[name] = kind.from_dict(table)
        _collect(wrong, made[name].check_together, f"{name}.")


def _collect(wrong: list[str], check: Callable[[], object], where: str = "") -> None:
    try:
        check()
    except (ValueError, TypeError) as problem:
        wrong.append(f"{where}{problem}")


# The objectives that each kind of data supports.
OBJECTIVES_OF_DATA: dict[str, tuple[str, ...]] = {
    "text": ("causal", "masked", "spans", "cbow", "distill"),
    "chat": ("causal", "distill"),
    "preferences": ("dpo",),
    "prompts": ("grpo",),
    "pairs": ("seq2seq",),
    "labelled": ("classify", "regress", "multi_label", "distill"),
    "tagged": ("tag", "distill"),
    "answers": ("answer", "distill"),
    "images": ("classify",),
    "pixels": ("causal",),
    "reversal": ("seq2seq",),
}


def check_objective(kind: str, name: str) -> None:
    """ValueError if an objective cannot be trained on this kind of data."""
    if name not in OBJECTIVES_OF_DATA[kind]:
        raise ValueError(
            f"objective.name is {name!r}, and data.kind {kind!r} teaches "
            f"{', '.join(OBJECTIVES_OF_DATA[kind])}: set one of the two"
        )


def check_model(model: Mapping[str, Any]) -> None:
    """ValueError unless [model] names at most one of family, size and init_from, and valid settings."""
    from heedful.models.registry import FAMILIES, size

    ways = [way for way in ("family", "size", "init_from") if way in model]
    if len(ways) > 1:
        raise ValueError(f"model has {' and '.join(ways)}: one of them says what it is")
    settings = {k: v for k, v in model.items() if k not in ("family", "size", "init_from")}
    if not ways or "init_from" in model:
        return  # checked once the model is chosen or loaded
    if "size" in model:
        settings = {**size(str(model["size"])).settings, **settings}
        family = size(str(model["size"])).family
    else:
        family = str(model["family"])
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES) or f": {', '.join(FAMILIES)} are"
        raise ValueError(f"no family is called {family!r}{hint}")
    FAMILIES[family].load().config_class.from_dict(settings)


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key, everything else replaced."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge_tables(out[key], value) if both else value
    return out


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as plain data."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} is not TOML: {problem}") from None


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with heedful, by name."""
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def parse_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """["train.steps=200", "data.source=my.txt"] as nested tables; a value is TOML, or else the text as it stands."""
    out: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", name.strip()):
            raise ValueError(f"--set {assignment}: write it as table.key=value, for example train.steps=200")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *tables, key = name.strip().split(".")
        for table in reversed(tables):
            key, value = table, {key: value}
        out = merge_tables(out, {key: value})
    return out
