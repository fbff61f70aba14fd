"""Training objectives: each turns a model and a batch into a summed loss and its number of targets.

Sums are divided once, by the number of targets of the whole (global) batch, so that accumulating gradients over small
batches equals one large batch. Only `masked` synchronizes with the GPU, once, to select the masked positions.

    causal, pixels       next-token prediction
    seq2seq, spans       next target token, given the source
    masked               BERT's masked tokens, and next-sentence prediction
    cbow                 each word from its context
    classify, tag        one label per sequence or image, or per token
    multi_label          any number of labels per sequence        regress   numbers
    answer               first and last token of an answer in a passage
    distill              a teacher's distribution (`heedful.train.distill`, `distill_labels`)
    dpo, grpo            answers that are preferred, or rewarded (`heedful.train.dpo`, `heedful.train.grpo`)

B batch, T positions, E model width, V vocabulary, C labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.data.augment import SCALING, Augmentation, mix_labels, scale_pixels
from heedful.data.dataset import IGNORED as IGNORED
from heedful.models.base import Batch, Model
from heedful.models.config import check_names
from heedful.models.encoder import EncoderModel
from heedful.models.heads import MaskedHead, PretrainingHead
from heedful.train.loss import Loss as Loss
from heedful.train.loss import cross_entropy, has_hooks, language_loss, target_rows
from heedful.train.negative_sampling import negative_sampling


class Objective(Protocol):
    """A training objective: turns a model and a batch into a summed loss and the number of its targets.

    One that learns from what the model itself makes of the data has two more things: `prepare(model, batch)`, which the
    trainer calls before each step, and `updates`, how often a step updates the weights with that."""

    def __call__(self, model: Model, batch: Batch) -> Loss:
        """The summed loss of the model on a batch."""
        ...


def causal(model: Model, batch: Batch, *, smoothing: float = 0.0) -> Loss:
    """Next-token cross-entropy; padding and the first token of each packed document are no targets."""
    targets = batch.targets if batch.targets is not None else next_token_targets(batch)
    return _language(model, batch, targets, smoothing)


def next_token_targets(batch: Batch) -> Tensor:
    """Targets (B, T) of a causal model: targets[t] = tokens[t + 1]."""
    tokens = batch.ids
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    if batch.lengths is not None:
        place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        targets = targets.masked_fill(place >= batch.lengths[:, None], IGNORED)
    if batch.documents is not None:
        same = batch.documents[:, 1:] == batch.documents[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(~same, IGNORED)
    return targets


def seq2seq(model: Model, batch: Batch, *, smoothing: float = 0.0, r_drop: float = 0.0) -> Loss:
    """Each target token from the source and the target tokens before it (Vaswani et al. 2017, section 5.4)."""
    targets = required_targets(batch)
    if not r_drop or not model.training:
        return _language(model, batch, targets, smoothing)
    both = twice(batch)
    logits = model.get_submodule("head")(model.hidden(both)) if has_separate_head(model) else model(both).logits  # type: ignore[operator]
    return r_drop_loss(logits, targets, smoothing, r_drop)


def cbow(model: Model, batch: Batch, *, negatives: float = 0) -> Loss:
    """Each word from the mean of its neighbours (Mikolov et al. 2013): the tokens are their own targets. With
    `negatives` a model in training tells each word from so many others (`heedful.train.negative_sampling`); validation
    is the cross-entropy over the vocabulary all the same."""
    targets = batch.targets
    if targets is None:
        targets = batch.ids
        if batch.lengths is not None:
            place = torch.arange(targets.shape[1], device=targets.device)
            targets = targets.masked_fill(place >= batch.lengths[:, None], IGNORED)
    if negatives and model.training:
        return negative_sampling(model, batch, targets, int(negatives))
    return _language(model, batch, targets, 0.0)


def masked(model: Model, batch: Batch, *, share: float | None = None) -> Loss:
    """Cross-entropy of BERT's masked tokens, plus next-sentence prediction where the batch has its labels.

    The paper adds the two means. Here one sum is divided once, by the number of masked tokens, so the loss of a
    sentence pair is weighted by the masked tokens per pair. With `share` None that is this batch's own ratio: the
    reference's loss of one batch, but then 4 x 8 examples differ from 1 x 32. With `share`, the masked fraction, it is
    share x T, constant where all rows are padded to one length, so that micro-batches add up to the large batch.
    """
    targets = required_targets(batch)
    rows = target_rows(targets)  # first, while the GPU queue is empty: this synchronizes
    pair_logits: Tensor | None = None
    head = getattr(model, "head", None)
    if isinstance(model, EncoderModel) and isinstance(head, MaskedHead) and has_separate_head(model):
        hidden = model.hidden(batch)
        loss = language_loss(head, hidden, targets, rows=rows)
        if isinstance(head, PretrainingHead) and batch.next_sentence is not None:
            pair_logits = head.next_sentence(head.pooler(hidden))
    else:
        output = model(batch)
        loss = cross_entropy(output.logits, targets)
        pair_logits = output.extra.get("next_sentence")
    if batch.next_sentence is None:
        return loss
    if pair_logits is None:
        raise ValueError(
            "the batch asks whether B follows A, and this model has no head for it: "
            'give it the head "pretraining", or set data.pairs to false'
        )
    pairs = cross_entropy(pair_logits, batch.next_sentence)
    n = len(batch.next_sentence)
    weight = loss.n_targets / n if share is None else share * targets.shape[1]
    loss.metrics = {
        "token_loss": (loss.sum.detach(), loss.n_targets),
        "next_sentence_loss": (pairs.sum.detach(), n),
        "next_sentence_accuracy": accuracy(pair_logits, batch.next_sentence),
    }
    loss.sum = loss.sum + pairs.sum * weight
    return loss


def classification(
    model: Model, batch: Batch, *, smoothing: float = 0.0, r_drop: float = 0.0, augment: Augmentation = SCALING
) -> Loss:
    """One label per sequence or image (B,), or per token (B, T). Images are scaled; in training they are augmented."""
    targets = required_targets(batch)
    if batch.images is not None:
        images = augment(batch.images) if model.training else scale_pixels(batch.images)
        if model.training and augment.mixes:
            return _mixed_classification(model, *augment.mix(images), targets, smoothing)
        batch = Batch(images=images, targets=targets)
    if r_drop and model.training:
        return r_drop_loss(model(twice(batch)).logits, targets, smoothing, r_drop)
    logits = model(batch).logits
    loss = cross_entropy(logits, targets, smoothing)
    loss.metrics["accuracy"] = accuracy(logits, targets)
    return loss


def _mixed_classification(model: Model, images: Tensor, share: Tensor, targets: Tensor, smoothing: float) -> Loss:
    """Mixed images against the shares (B, 1) of their labels; right is the label with the larger one."""
    logits = model(Batch(images=images)).logits
    mixed = mix_labels(targets, share, logits.shape[-1])
    total = F.cross_entropy(logits.float(), mixed, reduction="sum", label_smoothing=smoothing)
    return Loss(total, len(targets), {"accuracy": accuracy(logits, mixed.argmax(dim=-1))})


def multi_label(model: Model, batch: Batch) -> Loss:
    """Any number of labels per sequence: targets (B, C) of 0 and 1, each a question of its own."""
    logits, targets = model(batch).logits, required_targets(batch)
    total = F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="sum")
    right = ((logits > 0) == (targets > 0.5)).sum()
    return Loss(total, targets.numel(), {"accuracy": (right, targets.numel())})


def regression(model: Model, batch: Batch) -> Loss:
    """One number per sequence (B,), or several (B, C): the squared error."""
    logits = model(batch).logits
    total = F.mse_loss(logits.float(), required_targets(batch).float().view_as(logits), reduction="sum")
    return Loss(total, logits.numel())


def question_answering(model: Model, batch: Batch) -> Loss:
    """The first and the last token of the answer (B, 2), each a choice among the positions (BERT, section 4.2)."""
    logits, targets = model(batch).logits, required_targets(batch)  # (B, T, 2)
    if batch.lengths is not None:
        hidden = torch.arange(logits.shape[1], device=logits.device) >= batch.lengths[:, None]
        logits = logits.masked_fill(hidden[..., None], -torch.inf)
    ends = logits.transpose(1, 2)  # (B, 2, T)
    loss = cross_entropy(ends, targets)  # over positions
    right = (ends.argmax(dim=-1) == targets).all(dim=-1).sum()
    loss.metrics["accuracy"] = (right, len(targets))
    return loss


# --- R-Drop (Liang et al. 2021) ---------------------------------------------------------------------------------------


def twice(batch: Batch) -> Batch:
    """The batch with each row a second time, after all rows: dropout differs."""
    return Batch(
        **{f.name: None if (x := getattr(batch, f.name)) is None else torch.cat([x, x]) for f in fields(batch)}
    )


def r_drop_loss(logits: Tensor, targets: Tensor, smoothing: float, weight: float) -> Loss:
    """The mean of two passes' cross-entropies plus `weight`/4 times their symmetric divergence: half of the paper's
    loss, as the learning rate is that of one pass. Logits (2B, ..., V) of `twice`, targets (B, ...)."""
    one, other = torch.log_softmax(logits.float(), dim=-1).chunk(2)
    loss = cross_entropy(logits, torch.cat([targets, targets]), smoothing)
    apart = ((one.exp() - other.exp()) * (one - other)).sum(dim=-1)  # KL(one, other) + KL(other, one)
    apart = torch.where(targets != IGNORED, apart, 0.0).sum()
    n_targets = (targets != IGNORED).sum()
    metrics: dict[str, tuple[Tensor, Tensor | int]] = {"divergence": (apart.detach() / 2, n_targets)}
    return Loss(loss.sum / 2 + weight / 4 * apart, n_targets, metrics)


# --- shared ----------------------------------------------------------------------------------------------------------


def accuracy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The number of targets that have the highest logit, and the number of targets."""
    right = (logits.argmax(dim=-1) == targets).sum()  # IGNORED is never an argmax
    return right, (targets != IGNORED).sum()


def required_targets(batch: Batch) -> Tensor:
    """The batch's targets; ValueError if it has none."""
    if batch.targets is None:
        raise ValueError("this objective compares with the batch's targets, and it has none")
    return batch.targets


def has_separate_head(model: nn.Module) -> bool:
    """Whether hidden states and head can be called separately: the model has both, and no hooks."""
    whole = callable(getattr(model, "hidden", None)) and isinstance(getattr(model, "head", None), nn.Module)
    return whole and not has_hooks(model)


def _language(model: Model, batch: Batch, targets: Tensor, smoothing: float) -> Loss:
    """Cross-entropy over the vocabulary, without materializing all logits where the model allows it."""
    if not has_separate_head(model):
        return cross_entropy(model(batch).logits, targets, smoothing)
    hidden: Callable[[Batch], Tensor] = model.hidden  # type: ignore[assignment]
    return language_loss(model.get_submodule("head"), hidden(batch), targets, smoothing)


# --- by name ---------------------------------------------------------------------------------------------------------

# Each by its name in a recipe, and the settings it takes.
OBJECTIVES: dict[str, tuple[Callable[..., Loss] | None, tuple[str, ...]]] = {
    "causal": (causal, ("smoothing",)),
    "pixels": (causal, ("smoothing",)),
    "masked": (masked, ("share",)),
    "spans": (seq2seq, ("smoothing",)),
    "seq2seq": (seq2seq, ("smoothing", "r_drop")),
    "cbow": (cbow, ("negatives",)),
    "classify": (classification, ("smoothing", "r_drop")),
    "tag": (classification, ("smoothing", "r_drop")),
    "multi_label": (multi_label, ()),
    "regress": (regression, ()),
    "answer": (question_answering, ()),
    "distill": (None, ("teacher", "temperature", "soft", "hard", "cosine", "share")),
    "dpo": (None, ("loss_type", "beta", "smoothing", "sft")),
    "grpo": (None, ("loss_type", "reward", "group", "max_tokens", "sampling_temperature", "kl", "clip", "updates")),
}
# Every setting with its default, the least it may be, and what it must be below.
SETTINGS: dict[str, tuple[float, float, float]] = {
    "smoothing": (0.0, 0.0, 1.0),
    "r_drop": (0.0, 0.0, math.inf),
    "negatives": (0.0, 0.0, 101.0),
    "share": (0.15, 1e-9, 1.0 + 1e-9),
    "temperature": (2.0, 1e-9, math.inf),
    "soft": (5.0, 0.0, math.inf),
    "hard": (2.0, 0.0, math.inf),
    "cosine": (1.0, 0.0, math.inf),
    "beta": (0.1, 0.0, math.inf),
    "sft": (0.0, 0.0, math.inf),
    "group": (8.0, 2.0, 257.0),
    "max_tokens": (64.0, 1.0, 65537.0),
    "sampling_temperature": (1.0, 1e-9, math.inf),
    "kl": (0.0, 0.0, math.inf),
    "clip": (0.2, 0.0, 1.0 + 1e-9),
    "updates": (1.0, 1.0, 65.0),
}
TEXT_SETTINGS = {"teacher": "", "loss_type": "usual", "reward": "exact"}  # with their defaults


def make_objective(
    settings: Mapping[str, Any],
    *,
    teacher: Model | None = None,
    reference: Model | None = None,
    rollouts: Callable[[Model, Batch], Batch] | None = None,
    augment: Augmentation = SCALING,
) -> Objective:
    """The objective of a recipe's [objective] table; `distill` also wants its teacher, loaded; `dpo` and `grpo` the
    model before training unless they train adapters, and `grpo` what samples; `classify` may augment its images.

    Settings that the objective does not have must be left out, or at their default.
    """
    name = settings.get("name", "causal")
    check_names({str(name): None}, list(OBJECTIVES), "heedful.train.objectives")
    function, takes = OBJECTIVES[name]
    given = {key: value for key, value in settings.items() if key != "name"}
    check_names(given, [*SETTINGS, *TEXT_SETTINGS], "[objective]")
    for key, value in given.items():
        default = TEXT_SETTINGS[key] if key in TEXT_SETTINGS else SETTINGS[key][0]
        if key not in takes and value != default:
            has = f"it has {', '.join(takes)}" if takes else "it has none"
            raise ValueError(f"the objective {name!r} has no setting {key!r}: {has}")
    options = {key: _number(key, given.get(key)) for key in takes if key not in TEXT_SETTINGS}
    if name == "distill":
        return _distillation(teacher, {k: v for k, v in options.items() if k != "share" or "share" in given})
    if function is None:
        kind = given.get("loss_type", "usual")
        return _preference(name, options, {} if kind == "usual" else {"loss_type": kind}, reference, rollouts)
    if augment != SCALING:
        if name != "classify":
            raise ValueError(f"images are augmented to classify them, and the objective is {name!r}")
        if augment.mixes and options["r_drop"]:
            raise ValueError("objective.r_drop is for one label per image: set data.mixup and data.cutmix to 0")
        return partial(function, **options, augment=augment)
    return partial(function, **options)


def _distillation(teacher: Model | None, options: dict[str, float]) -> Objective:
    from heedful.train.distill import Distill
    from heedful.train.distill_labels import DistillLabels, has_labels

    if teacher is None:
        raise ValueError("distillation needs a teacher: set objective.teacher to a model")
    if has_labels(teacher):
        return DistillLabels(teacher, **{k: v for k, v in options.items() if k != "share"})
    return Distill(teacher, **options)


def _preference(
    name: str,
    options: dict[str, float],
    loss_type: dict[str, str],
    reference: Model | None,
    rollouts: Callable[[Model, Batch], Batch] | None,
) -> Objective:
    from heedful.train.dpo import DPO
    from heedful.train.grpo import GRPO

    if name == "dpo":
        return DPO(reference, **loss_type, **options)  # type: ignore[arg-type]
    if rollouts is None:
        raise ValueError("GRPO needs what samples completions of its prompts: heedful.train.rollouts.Rollouts")
    return GRPO(
        rollouts,
        reference,
        kl=options["kl"],
        clip=options["clip"],
        updates=int(options["updates"]),
        temperature=options["sampling_temperature"],
        max_tokens=int(options["max_tokens"]),
        **loss_type,
    )


def _number(name: str, value: Any) -> float:
    default, least, below = SETTINGS[name]
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
        raise ValueError(f"objective.{name} is {value!r}: it must be a number from {least:g} to {below:g}")
    return float(value)
