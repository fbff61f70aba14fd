"""Build what a trainer needs from a recipe: tokenizer, data, model and objective. What the recipe leaves open is chosen
here, by the size of the data, and reported in `notes`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from heedful.data.augment import Augmentation
from heedful.data.dataset import Dataset
from heedful.data.rewards import RULES
from heedful.loaded import Loaded, load
from heedful.models.base import Batch, DecoderModel, Model
from heedful.models.cbow import CBOW
from heedful.models.config import HeadConfig
from heedful.models.encoder import EncoderModel
from heedful.models.heads import PretrainingHead
from heedful.models.registry import FAMILIES, size
from heedful.recipes.inputs import RecipeData, load_data
from heedful.recipes.vocabulary import choose_tokenizer
from heedful.tasks.translate import SENTENCE_END
from heedful.text import Tokenizer
from heedful.text.plural import counted
from heedful.train import objectives
from heedful.train.distill import halve, project_embeddings
from heedful.train.negative_sampling import NOISE_POWER
from heedful.train.objectives import Objective
from heedful.train.recipe import Recipe
from heedful.train.rollouts import Rollouts
from heedful.weights.load import clone_parameters, with_config

# (tokens of text, default model): large enough to learn from it, and small enough for two cores.
DECODERS = (
    (10**5, {"d_model": 64, "n_layers": 2, "n_heads": 2, "d_ff": 176}),
    (3 * 10**6, {"d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 352}),
    (10**8, {"d_model": 256, "n_layers": 6, "n_heads": 4, "d_ff": 704}),
    (10**15, {"d_model": 512, "n_layers": 8, "n_heads": 8, "d_ff": 1408}),
)
LARGEST_GRID = 8  # of a ViT's patches, where the recipe has no size of them
HEADS = {  # an encoder's head, by objective
    "masked": "masked",
    "classify": "classify",
    "regress": "classify",
    "multi_label": "classify",
    "tag": "tag",
    "answer": "answer",
}
# The kinds of data that are conversations, and what they are called.
CONVERSATIONS = {"chat": "conversations", "preferences": "preferred answers", "prompts": "rewards"}
DISTILLED_HEADS = {"text": "masked", "labelled": "classify", "tagged": "tag", "answers": "answer"}  # by kind of data


@dataclass
class TrainingSetup:
    """Everything a trainer needs: model, objective, data, tokenizer, and the resolved recipe."""

    recipe: Recipe  # with every choice filled in
    model: Model
    objective: Objective
    train: Dataset
    validation: Dataset | None
    tokenizer: Tokenizer | None
    baselines: dict[str, float] = field(default_factory=dict)  # reference losses in nats
    bytes_per_token: float | None = None
    notes: list[str] = field(default_factory=list)  # choices made, for printing


def build_training(recipe: Recipe, tokenizer: Tokenizer | None = None) -> TrainingSetup:
    """Tokenizer, data, model and objective of a recipe; tokenized text is cached.

    A resumed run gives its own `tokenizer`."""
    notes: list[str] = []
    check_begins(recipe)
    begin = load(recipe.model["init_from"]) if "init_from" in recipe.model else None
    teacher = load(recipe.objective.teacher) if recipe.objective.name == "distill" else None
    tokenizer = tokenizer or choose_tokenizer(recipe, begin or teacher, notes)
    if tokenizer is not None and recipe.tokenizer.chat_template:
        tokenizer.chat_template = recipe.tokenizer.chat_template
    reader = tokenizer.reading_special() if tokenizer is not None and recipe.tokenizer.allow_special else tokenizer
    data = load_data(recipe, reader, segments=uses_segments(recipe, begin or teacher))
    notes += data.notes
    recipe = count_steps(recipe, len(data.train), notes)
    torch.manual_seed(recipe.train.seed)
    if begin is not None:
        model, new = pretrained_model(begin, recipe, data)
        notes.append(f"begins from {begin.name}" + (f"; new: {', '.join(new)}" if new else ""))
        chosen = dict(recipe.model)
        if "lora" in recipe.adapter.kind:  # new parameters are trained in full
            free = tuple(dict.fromkeys([*recipe.adapter.trainable, *new]))
            recipe = dataclasses.replace(recipe, adapter=dataclasses.replace(recipe.adapter, trainable=free))
    elif teacher is not None and not recipe.model:
        model, chosen = clone_parameters(halve(teacher.model)), {}
        notes.append(f"half the layers of {teacher.name} are the student")
    else:
        chosen = choose_model(recipe, data)
        model = new_model(chosen)
        if isinstance(model, CBOW) and data.counts is not None:
            # Negatives are drawn from this distribution, and the bias corrects for it: train/negative_sampling.py.
            power = NOISE_POWER if recipe.objective.negatives else 1.0
            model.init_unigram(torch.from_numpy(data.counts), power)
        if teacher is not None and isinstance(model, DecoderModel) and isinstance(teacher.model, DecoderModel):
            project_embeddings(teacher.model, model)
    check_objective_fits(recipe, model)
    model.special |= config_token_ids(tokenizer)
    talks = begin or teacher
    if recipe.data.kind in CONVERSATIONS and talks is not None and talks.chat_eos_ids:
        model.special["eos_token_id"] = list(talks.chat_eos_ids)
    model.preprocessor |= data.preprocessor
    model.generation = {k: v for k, v in model.generation.items() if k != SENTENCE_END} | data.generation
    notes += describe_settings(recipe, model)
    if teacher is not None and recipe.train.precision == "bfloat16":
        teacher.model.bfloat16()
    rollouts = make_rollouts(recipe, model, tokenizer, data.answers) if recipe.objective.name == "grpo" else None
    reference = copy.deepcopy(model) if needs_reference(recipe) else None
    objective = recipe_objective(recipe, None if teacher is None else teacher.model, reference, rollouts)
    resolved = dataclasses.replace(recipe, model=chosen)
    return TrainingSetup(
        resolved, model, objective, data.train, data.validation, tokenizer, data.baselines, data.bytes_per_token,
        notes,
    )  # fmt: skip


def describe_settings(recipe: Recipe, model: Model) -> list[str]:
    """What is trained and how, by the names of the settings: many were chosen for the user."""
    shape = {name: getattr(model.config, name, None) for name in ("n_layers", "d_model", "n_heads")}
    sizes = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    optimizer, train = recipe.optimizer, recipe.train
    rates = f"lr {optimizer.lr:g}" + (f", muon_lr {optimizer.muon_lr:g}" if optimizer.name == "muon" else "")
    window = (
        ""
        if recipe.data.kind in ("images", "pixels", "reversal")
        else f" of at most {counted(recipe.data.length, 'token')}"
    )
    return [
        f"{model.family} of {model.n_parameters():,} parameters" + (f": {sizes}" if sizes else ""),
        f"optimizer {optimizer.name}, {rates}, {recipe.schedule.name} schedule; {counted(train.steps, 'step')} of "
        f"{counted(train.batch_size, 'example')}{window}",
        "recipe.toml in the run's folder has every setting; --set changes one, as --set model.n_layers=6",
    ]


def count_steps(recipe: Recipe, n_examples: int, notes: list[str]) -> Recipe:
    """The recipe with train.epochs, if it has them, as train.steps."""
    if not recipe.train.epochs:
        return recipe
    steps = max(1, math.ceil(recipe.train.epochs * n_examples / recipe.train.batch_size))
    notes.append(
        f"{counted(steps, 'step')}: {recipe.train.epochs:g} pass{'es' * (recipe.train.epochs != 1)} over the data"
    )
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=steps, epochs=0.0))


def check_begins(recipe: Recipe) -> None:
    """ValueError if the data teaches a model that is trained already, and the recipe has a new one."""
    kind = recipe.data.kind
    if kind not in CONVERSATIONS or "init_from" in recipe.model or recipe.objective.name == "distill":
        return
    teacher = "; a new one needs a teacher: objective.name distill" if kind == "chat" else ""
    raise ValueError(f"{CONVERSATIONS[kind]} teach a model that is trained already: heedful train MODEL DATA{teacher}")


def needs_reference(recipe: Recipe) -> bool:
    """Whether the objective compares with a copy of the model before training: where adapters alone are trained, the
    model without them is that."""
    compares = recipe.objective.name == "dpo" or (recipe.objective.name == "grpo" and recipe.objective.kl > 0)
    return compares and not ("lora" in recipe.adapter.kind and not recipe.adapter.trainable)


def make_rollouts(recipe: Recipe, model: Model, tokenizer: Tokenizer | None, answers: list[str]) -> Rollouts:
    """What samples completions of the prompts, and rewards them."""
    settings = recipe.objective
    assert tokenizer is not None, "prompts are text"
    stop_ids = Loaded(model, tokenizer, "").chat_eos_ids
    if model.context_length is not None and recipe.data.length + settings.max_tokens > model.context_length:
        raise ValueError(
            f"prompts of up to {recipe.data.length} tokens (data.length) and completions of {settings.max_tokens} "
            f"(objective.max_tokens) are longer than the model's {model.context_length}"
        )
    return Rollouts(
        tokenizer,
        answers,
        RULES[settings.reward],
        stop_ids=stop_ids,
        group=settings.group,
        max_tokens=settings.max_tokens,
        temperature=settings.sampling_temperature,
    )


def recipe_objective(
    recipe: Recipe,
    teacher: Model | None,
    reference: Model | None = None,
    rollouts: Callable[[Model, Batch], Batch] | None = None,
) -> Objective:
    """The objective of a recipe's [objective] table."""
    settings = dataclasses.asdict(recipe.objective)
    if recipe.objective.name in ("masked", "distill"):
        settings["share"] = recipe.data.masked
    augment = Augmentation(**{f.name: getattr(recipe.data, f.name) for f in dataclasses.fields(Augmentation)})
    return objectives.make_objective(settings, teacher=teacher, reference=reference, rollouts=rollouts, augment=augment)


def config_token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The tokenizer's special tokens as entries of a model's config.json."""
    if tokenizer is None:
        return {}
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
    return {key: value for key, value in ids.items() if value is not None}


# --- the model -------------------------------------------------------------------------------------------------------


def choose_model(recipe: Recipe, data: RecipeData) -> dict[str, Any]:
    """The [model] table completed: default sizes by the amount of data, and settings that the data implies."""
    given = dict(recipe.model)
    asked = dict(data.settings)
    chosen: dict[str, Any] = {}
    if "size" not in given and "family" not in given:
        given["family"] = "llama"
        chosen = dict(next(sizes for limit, sizes in DECODERS if data.n_tokens <= limit), tied=True)
    family = FAMILIES[size(given["size"]).family if "size" in given else given["family"]]
    config = family.load().config_class
    known = {f.name for f in dataclasses.fields(config)}
    if "max_len" in known and "max_len" not in given and "size" not in given:
        chosen["max_len"] = recipe.data.length
    if "patch_size" in known and "patch_size" not in given and "size" not in given:
        chosen["patch_size"] = choose_patch_size(asked["image_size"])
    if issubclass(config, HeadConfig) and "head" not in given:
        chosen["head"] = (
            "pretraining"
            if recipe.objective.name == "masked" and recipe.data.pairs and "pretraining" in config.heads
            else encoder_head(recipe, "classify")
        )
    for key, value in asked.items():
        if key in known and given.setdefault(key, value) != value:
            raise ValueError(f"model.{key} is {given[key]!r}, and the data has {value!r}: leave it out of the recipe")
    return {**chosen, **given}


def encoder_head(recipe: Recipe, default: str) -> str:
    """The head that an encoder needs for a recipe's objective."""
    if recipe.objective.name == "distill":
        return DISTILLED_HEADS.get(recipe.data.kind, default)
    return HEADS.get(recipe.objective.name, default)


def choose_patch_size(image_size: int) -> int:
    """The smallest patch that makes a grid of at most 8 x 8: 64 tokens train fast, and are many enough."""
    return next(p for p in range(1, image_size + 1) if image_size % p == 0 and image_size // p <= LARGEST_GRID)


def new_model(chosen: dict[str, Any], device: str = "cpu") -> Model:
    """A freshly initialized model of a [model] table."""
    settings = {k: v for k, v in chosen.items() if k not in ("family", "size")}
    family = FAMILIES[chosen["family"]] if "family" in chosen else FAMILIES[size(chosen["size"]).family]
    if "size" in chosen:
        settings = {**size(chosen["size"]).settings, **settings}
    cls = family.load()
    return cls.create(cls.config_class.from_dict(settings), device=device)


def uses_segments(recipe: Recipe, begin: Loaded | None) -> bool:
    """Whether the recipe's model has segment embeddings."""
    if begin is not None and ("init_from" in recipe.model or not recipe.model):
        return getattr(begin.model.config, "n_segments", 1) > 1
    given = {k: v for k, v in recipe.model.items() if k not in ("family", "size")}
    name = size(recipe.model["size"]).family if "size" in recipe.model else recipe.model.get("family", "llama")
    settings = {**size(recipe.model["size"]).settings, **given} if "size" in recipe.model else given
    return getattr(FAMILIES[name].load().config_class.from_dict(settings), "n_segments", 1) > 1


def check_objective_fits(recipe: Recipe, model: Model) -> None:
    """ValueError if the objective is not for this kind of model."""
    name, encoder = recipe.objective.name, isinstance(model, EncoderModel)
    fits, what = {
        **dict.fromkeys(
            ("causal", "dpo", "grpo"),
            (isinstance(model, DecoderModel) and "generate" in model.abilities, "a decoder, such as gpt"),
        ),
        "masked": (encoder, "an encoder, such as bert"),
        "spans": ("translate" in model.abilities, "an encoder with a decoder, such as t5"),
        "seq2seq": ("translate" in model.abilities, "an encoder with a decoder, such as transformer"),
        "cbow": (isinstance(model, CBOW), "cbow"),
        "distill": (True, ""),
    }.get(name, (isinstance(model.config, HeadConfig), "an encoder, such as bert or vit"))
    if not fits:
        raise ValueError(
            f"objective.name is {name!r}, which is for {what}: set another one, or another model.family than "
            f"{model.family!r}"
        )
    if name == "masked" and recipe.data.pairs and not isinstance(getattr(model, "head", None), PretrainingHead):
        raise ValueError(
            f"this {model.family} model has no head that says whether one text follows another: set data.pairs to false"
        )


def pretrained_config(model: Model, recipe: Recipe, asked: Mapping[str, Any]) -> Any:
    """The config of a pretrained model with the recipe's changes, and the head and labels that the data needs."""
    changes = {k: v for k, v in recipe.model.items() if k != "init_from"}
    if recipe.objective.name in ("dpo", "grpo"):  # log-probabilities are compared
        changes = {
            k: 0.0 for k in ("dropout", "attention_dropout", "embed_dropout") if getattr(model.config, k, 0.0)
        } | changes
    if isinstance(model.config, HeadConfig):
        changes.setdefault("head", encoder_head(recipe, model.config.head))
        if recipe.objective.name == "masked" and model.config.head == "pretraining":
            changes["head"] = "pretraining"
        changes |= {k: v for k, v in asked.items() if k in ("n_labels", "labels", "problem_type")}
    return model.config.from_dict({**model.config.to_dict(), **changes})


def pretrained_model(begin: Loaded, recipe: Recipe, data: RecipeData) -> tuple[Model, list[str]]:
    """The model to fine-tune as an fp32 copy, with another head or more labels if needed; and the names of its newly
    initialized parameters."""
    model = begin.model
    known = {f.name for f in dataclasses.fields(model.config)}
    if data.settings.get("vocab_size", 0) > model.config.vocab_size if "vocab_size" in known else False:
        raise ValueError(
            f"{begin.name} has {model.config.vocab_size} tokens and the tokenizer {data.settings['vocab_size']}"
        )
    config = pretrained_config(model, recipe, data.settings)
    if config == model.config:
        return clone_parameters(model.float()), []
    fresh, new = with_config(model, config)
    return fresh, list(new)
