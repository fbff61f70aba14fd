"""The datasets of a recipe by data.kind, with validation data and the settings they imply for the model.

text        running text: files, folders, jsonl, csv         labelled  texts with labels or numbers
chat        conversations, or prompts with answers           preferences, prompts    answers chosen, or rewarded
pairs       sources and targets: translation                 tagged    words with tags
images      images with labels                               answers   questions and passages (SQuAD)
pixels      images as sequences of colours                   reversal  synthetic
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from heedful.data import images
from heedful.data.classification import LabelKind, LabelledTexts, read_labelled
from heedful.data.corpus import (
    Corpus,
    TokenWindows,
    count_entropy,
    count_ids,
    uniform_cross_entropy,
    unigram_entropy,
)
from heedful.data.corruption import MaskedWindows, SpanCorruption
from heedful.data.dataset import IGNORED, Dataset
from heedful.data.mixture import Mixture
from heedful.data.neighbour_windows import CBOWWindows
from heedful.data.pairs import Pairs, read_pairs
from heedful.data.prepare import prepare_corpus
from heedful.data.ragged import random_split
from heedful.data.sources import TextSource
from heedful.data.squad import SquadWindows, read_squad
from heedful.data.synthetic import Reversal
from heedful.data.tagging import TaggedSentences, read_tagged
from heedful.recipes.conversations import read_conversations, read_pairs_of_answers, read_rewarded_prompts
from heedful.recipes.data_paths import resolve_data_path, resolve_target, single_source_path, source_paths
from heedful.recipes.recipe_data import RecipeData as RecipeData
from heedful.tasks.translate import SENTENCE_END, sentence_end_of
from heedful.text import Tokenizer, symbols
from heedful.text.plural import counted
from heedful.train.recipe import Recipe

DIGIT_DRAWING = {"larger_side": 1.0}  # the digits fill their images: heedful.tasks.drawing
SENTENCES_READ = 2000  # pairs, to see whether they are whole sentences
LAST_TOKENS = 8  # of each


def load_data(recipe: Recipe, tokenizer: Tokenizer | None, *, segments: bool = True) -> RecipeData:
    """Read a recipe's data. `segments`: whether the model has segment embeddings."""
    data = recipe.data
    if tokenizer is None and data.kind not in ("images", "pixels", "reversal"):
        raise ValueError(f"data of the kind {data.kind!r} is text: it needs a tokenizer")
    if recipe.tokenizer.dropout and data.kind != "pairs":
        raise ValueError(f"tokenizer.dropout is for data.kind pairs, and this is {data.kind!r}: leave it out")
    made = READERS[data.kind](recipe, tokenizer, segments)  # type: ignore[arg-type]
    if recipe.objective.name == "distill":
        made.baselines = {}  # a weighted sum of three losses has none
    n_held = 0 if made.validation is None else len(made.validation)
    made.notes.append(f"{counted(len(made.train), 'example')} to train on, {n_held:,} to validate with")
    return made


def tokenizer_texts(recipe: Recipe) -> Iterator[str]:
    """The texts that a tokenizer is trained on."""
    data = recipe.data
    if data.kind == "text":
        for path, _ in source_paths(data):
            yield from TextSource(path, field=data.text).texts()
        return
    path = single_source_path(data)
    if data.kind == "pairs":
        for pair in read_pairs(path, data.text, resolve_target(data.target)):
            yield from pair
    elif data.kind == "labelled":
        first, second, _, _ = read_labelled(path, *_columns(recipe))
        yield from first
        yield from second or ()
    elif data.kind == "tagged":
        for words, _ in read_tagged(path):
            yield " ".join(words)
    else:
        passages, questions, _ = read_squad(path)
        yield from passages
        yield from (question.text for question in questions)


def is_one_document(recipe: Recipe) -> bool:
    """Whether the text is one document, so that no end-of-text token is needed."""
    ends = (
        ends for path, _ in source_paths(recipe.data) for _, ends in TextSource(path, field=recipe.data.text).pieces()
    )
    return sum(islice(filter(None, ends), 2)) < 2


# --- running text ----------------------------------------------------------------------------------------------------


def _text(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    data = recipe.data
    share = 0.0 if data.validation else data.share
    parts, notes = [], list[str]()
    for path, weight in source_paths(data):
        source = TextSource(path, field=data.text)
        train, held_out = prepare_corpus(source, tokenizer, share=share)
        notes += dict.fromkeys([*source.notes, *train.notes])
        parts.append((train, held_out, weight))
    held = [held_out for _, held_out, _ in parts if held_out is not None and len(held_out.tokens) > 1]
    if data.validation:
        held = [
            prepare_corpus(TextSource(resolve_data_path(data.validation, "validation"), field=data.text), tokenizer)[0]
        ]
    examples = [(_examples(recipe, train, tokenizer, True, segments), weight) for train, _, weight in parts]
    told = held or [train for train, _, _ in parts]
    bytes_per_token = sum(c.n_bytes for c in told) / max(1, sum(len(c.tokens) for c in told))
    settings = {"vocab_size": len(tokenizer)}
    if recipe.objective.name == "spans":
        settings["start_id"] = decoder_start_id(tokenizer)
    heaviest = max(parts, key=lambda part: part[2])[0]
    counts = count_ids(heaviest.tokens)
    n_tokens, n_documents = (
        sum(len(x) for x in xs) for xs in zip(*[(p[0].tokens, p[0].starts) for p in parts], strict=True)
    )
    notes.append(f"{counted(n_tokens, 'token')} in {counted(n_documents, 'document')}")
    return RecipeData(
        examples[0][0] if len(examples) == 1 else Mixture(examples),
        _validation(recipe, held, tokenizer, segments),
        n_tokens,
        settings,
        bytes_per_token if recipe.objective.name == "causal" else None,
        _text_baselines(recipe, len(tokenizer), counts),
        np.pad(counts, (0, len(tokenizer) - len(counts))),
        notes,
    )


def _text_baselines(recipe: Recipe, vocab_size: int, counts: np.ndarray) -> dict[str, float]:
    """Reference losses of the objective: with next-sentence prediction a coin is tossed too."""
    coin = math.log(2) if recipe.objective.name == "masked" and recipe.data.pairs else 0.0
    return {"uniform": uniform_cross_entropy(vocab_size) + coin, "unigram": count_entropy(counts) + coin}


def _class_baselines(labels: Any) -> dict[str, float]:
    """The reference loss of a classifier: that of a guess by how frequent each class is."""
    return {"class frequencies": count_entropy(np.bincount(np.asarray(labels)))}


def _validation(recipe: Recipe, held: Sequence[Corpus], tokenizer: Tokenizer, segments: bool) -> Dataset | None:
    """The validation parts of all sources, concatenated."""
    parts = [_examples(recipe, corpus, tokenizer, False, segments) for corpus in held]
    if len(parts) < 2:
        return parts[0] if parts else None
    return Mixture([(part, len(part)) for part in parts])


def _examples(recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, training: bool, segments: bool) -> Dataset:
    """The dataset for the objective; distillation is masked if the tokenizer has a [MASK], else causal."""
    data, name = recipe.data, recipe.objective.name
    if name == "distill":
        name = "causal" if tokenizer.mask_id is None else "masked"
    if name == "causal":
        return TokenWindows(corpus, data.length, shifted=training, documents=data.documents)
    if name == "masked":
        options: dict[str, Any] = {
            "pairs": data.pairs, "share": data.masked, "documents": data.documents, "whole_words": data.whole_words,
        }  # fmt: skip
        return MaskedWindows(corpus, tokenizer, data.length, shifted=training, segments=segments, **options)
    if name == "spans":
        rates: dict[str, Any] = {"share": data.masked, "mean": data.span}
        return SpanCorruption(
            corpus, tokenizer, data.length, start_id=decoder_start_id(tokenizer), shifted=training, **rates
        )
    if name == "cbow":
        return CBOWWindows(corpus, data.length, shifted=training, subsample=data.subsample if training else 0)
    raise ValueError(f"running text has no {name} to learn: set data.kind, or another objective")


# --- everything else -------------------------------------------------------------------------------------------------


def decoder_start_id(tokenizer: Tokenizer) -> int:
    """The decoder start token: <s>, or <pad> as in T5."""
    for token in (tokenizer.bos_id, tokenizer.pad_id):
        if token is not None:
            return token
    raise ValueError("this tokenizer has neither <s> nor <pad> for a target to begin with")


def _held_out(recipe: Recipe, train: Any, again: Callable[[Path], Any]) -> tuple[Dataset, Dataset | None]:
    """Training and validation data: the latter from its own file, or a share of the examples."""
    if recipe.data.validation:
        return train, again(resolve_data_path(recipe.data.validation, "validation"))
    if recipe.data.share == 0:
        return train, None
    return random_split(train, recipe.data.share)


def _pairs(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    data = recipe.data
    start = decoder_start_id(tokenizer.target)
    options: dict[str, Any] = {"start_id": start, "source": data.text, "max_length": data.length}
    made = Pairs.read(single_source_path(data), tokenizer, target=resolve_target(data.target), **options)
    other = resolve_target(data.validation_target or data.target)
    train, validation = _held_out(recipe, made, lambda p: Pairs.read(p, tokenizer, target=other, **options))
    if recipe.tokenizer.dropout:
        whole = made.with_dropout(tokenizer, recipe.tokenizer.dropout)
        train = whole if train is made else random_split(whole, data.share)[0]
    settings = {"vocab_size": len(tokenizer), "start_id": start}
    if tokenizer.target is not tokenizer:
        settings["target_vocab_size"] = len(tokenizer.target)
    n_tokens = int(made.targets.lengths.sum())
    return RecipeData(
        train,
        validation,
        n_tokens,
        settings,
        baselines={"uniform": uniform_cross_entropy(len(tokenizer.target))},
        notes=made.notes,
        generation=_sentence_end(made, tokenizer),
    )


def _sentence_end(pairs: Pairs, tokenizer: Tokenizer) -> dict[str, Any]:
    """What generation_config.json says where nearly all sources and targets are whole sentences."""
    rows = range(min(len(pairs), SENTENCES_READ))
    sources = [tokenizer.decode(pairs.sources[i][-LAST_TOKENS:].tolist()) for i in rows]
    targets = [tokenizer.target.decode(pairs.targets[i][-LAST_TOKENS:].tolist()) for i in rows]
    end = sentence_end_of([*sources, *targets])
    return {SENTENCE_END: end} if end else {}


def _columns(recipe: Recipe) -> tuple[str | None, str | None, Any, LabelKind]:
    data, name = recipe.data, recipe.objective.name
    kind: LabelKind = name if name in ("regress", "multi_label") else "classify"  # type: ignore[assignment]
    several = [column.strip() for column in data.label.split(",")]
    return (
        data.text or None,
        data.second or None,
        several if kind == "multi_label" else data.label or None,
        kind,
    )


def _labelled(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    text, second, label, kind = _columns(recipe)
    options: dict[str, Any] = {
        "text": text, "second": second, "label": label, "kind": kind, "max_length": recipe.data.length,
        "segments": segments,
    }  # fmt: skip
    made = LabelledTexts.read(single_source_path(recipe.data), tokenizer, **options)
    again = {**options, "names": None if kind == "regress" else made.names}
    train, validation = _held_out(recipe, made, lambda path: LabelledTexts.read(path, tokenizer, **again))
    problem = {"classify": "single_label_classification", "multi_label": "multi_label_classification"}
    n_labels = 1 if kind == "regress" else len(made.names)
    settings = {"n_labels": n_labels, "problem_type": problem.get(kind, "regression")}
    if kind != "regress":
        settings["labels"] = list(made.names)
    baselines = _class_baselines(made.targets) if kind == "classify" else {}
    n_tokens = int(made.lengths.sum())
    return RecipeData(
        train,
        validation,
        n_tokens,
        {"vocab_size": len(tokenizer), **settings},
        baselines=baselines,
        notes=made.notes,
    )


def _tagged(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    max_length = recipe.data.length
    made = TaggedSentences.read(single_source_path(recipe.data), tokenizer, max_length=max_length)
    again: dict[str, Any] = {"names": made.names, "max_length": max_length}
    train, validation = _held_out(recipe, made, lambda path: TaggedSentences.read(path, tokenizer, **again))
    settings = {"vocab_size": len(tokenizer), "n_labels": len(made.names), "labels": list(made.names)}
    marks = made.marks.values
    baselines = _class_baselines(marks[marks != IGNORED])
    return RecipeData(train, validation, int(made.lengths.sum()), settings, baselines=baselines, notes=made.notes)


def _answers(recipe: Recipe, tokenizer: Tokenizer, segments: bool) -> RecipeData:
    options: dict[str, Any] = {
        "max_length": recipe.data.length,
        "stride": recipe.data.stride,
        "segments": segments,
    }
    made = SquadWindows.read(single_source_path(recipe.data), tokenizer, **options)
    train, validation = _held_out(recipe, made, lambda path: SquadWindows.read(path, tokenizer, **options))
    return RecipeData(
        train, validation, len(made) * recipe.data.length, {"vocab_size": len(tokenizer)}, notes=made.notes
    )


def _image_sets(recipe: Recipe) -> tuple[images.ImageSet, images.ImageSet | None]:
    """Training and validation images."""
    data = recipe.data
    read = partial(images.read_images, size=data.image_size or None, labels=data.kind == "images")
    every = images.load_digits() if data.source == "digits" else read(single_source_path(data))
    if data.validation:
        held = read(resolve_data_path(data.validation, "validation"))
        return every, held if data.kind == "pixels" else held.with_names(every.names)
    if data.share == 0:
        return every, None
    order = np.random.default_rng(0).permutation(len(every))
    n = max(1, round(data.share * len(every)))
    return every.subset(order[n:]), every.subset(order[:n])


def _images(recipe: Recipe, tokenizer: Tokenizer | None, segments: bool) -> RecipeData:
    train, held = _image_sets(recipe)
    n_labels = len(train.names)
    settings = {
        "n_labels": n_labels,
        "labels": list(train.names),
        "n_channels": train.pixels.shape[1],
        "image_size": train.pixels.shape[2],
    }
    validation = None if held is None else images.LabelledImages(held)
    made = images.LabelledImages(train)
    drawing = {"drawing": dict(DIGIT_DRAWING)} if recipe.data.source == "digits" else {}
    baselines = _class_baselines(train.labels)
    return RecipeData(made, validation, 0, settings, baselines=baselines, preprocessor=drawing)


def _pixels(recipe: Recipe, tokenizer: Tokenizer | None, segments: bool) -> RecipeData:
    train, held = _image_sets(recipe)
    made = images.PixelSequences(train, recipe.data.levels)
    validation = None if held is None else images.PixelSequences(held, palette=made.palette)
    settings = {"vocab_size": made.vocab_size, "max_len": made.ids.shape[1]}
    baselines = {"uniform": uniform_cross_entropy(len(made.palette)), "unigram": unigram_entropy(made.ids.reshape(-1))}
    height, width = train.pixels.shape[2:]
    preprocessor = {
        "image_processor_type": "ImageGPTImageProcessor",
        "clusters": made.palette.tolist(),
        "size": {"height": height, "width": width},
    }
    return RecipeData(made, validation, made.ids.size, settings, baselines=baselines, preprocessor=preprocessor)


def _reversal(recipe: Recipe, tokenizer: Tokenizer | None, segments: bool) -> RecipeData:
    data = recipe.data
    size = (data.n_symbols, data.length, data.n_examples, recipe.train.seed)
    lengths: dict[str, Any] = {"shortest": data.shortest or None, "ends": True}
    made, plain = Reversal(*size, **lengths, blanked=data.blanked), Reversal(*size, **lengths)
    train, validation = (
        # Validation without word dropout.
        (random_split(made, data.share)[0], random_split(plain, data.share)[1]) if data.share else (made, None)
    )
    settings = {"vocab_size": len(symbols(data.n_symbols)), "start_id": made.start_id}
    return RecipeData(
        train,
        validation,
        len(made) * data.length,
        settings,
        baselines={"uniform": uniform_cross_entropy(data.n_symbols + 1)},  # the symbols and the end
    )


READERS: dict[str, Callable[[Recipe, Tokenizer, bool], RecipeData]] = {
    "text": _text,
    "chat": read_conversations,
    "preferences": read_pairs_of_answers,
    "prompts": read_rewarded_prompts,
    "pairs": _pairs,
    "labelled": _labelled,
    "tagged": _tagged,
    "answers": _answers,
    "images": _images,
    "pixels": _pixels,
    "reversal": _reversal,
}
