"""Knowledge distillation: a small model learns from a large one (Hinton et al. 2015; DistilBERT, Sanh et al. 2019).

DistilBERT's objective is the sum of three means, with the weights of its authors' training:

    soft    5   KL(teacher ‖ student) over the vocabulary at temperature 2, times its square
    hard    2   the teacher's own objective: masked tokens, or the next token
    cosine  1   1 - cos of the angle between their last hidden states

soft and cosine are over every position that is not padding. The student begins with every second layer of the
teacher, its embeddings and its head: `halve`.

    N real positions, E model width, V vocabulary
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful.models.base import Batch, DecoderModel, Model
from heedful.models.bert import Bert
from heedful.models.distilbert import DistilBert, DistilBertConfig
from heedful.models.encoder import EncoderModel
from heedful.models.heads import MaskedHead
from heedful.train.loss import CHUNK, Loss, checkpointed_sum, language_loss, largest_dim, target_rows
from heedful.train.objectives import next_token_targets, required_targets

LAYER = re.compile(r"^((?:en|de)coder\.blocks\.)(\d+)(\..*)$")


class Distill:
    """The distillation objective. `share` is the number of hard targets per token: 0.15 for BERT, 1 for causal models.

    As in `objectives.masked`, the three means become one sum over N that does not depend on how a batch is cut: a hard
    target is weighted 1/share. With None the weight is the batch's own ratio, as in the authors' code.
    """

    def __init__(
        self,
        teacher: Model,
        *,
        temperature: float = 2.0,
        soft: float = 5.0,
        hard: float = 2.0,
        cosine: float = 1.0,
        share: float | None = 0.15,
    ) -> None:
        if not isinstance(teacher, EncoderModel | DecoderModel) or not _is_language_model(teacher):
            raise ValueError(
                f"a {type(teacher).__name__} cannot teach: it has no words to say at every position; "
                "use a masked or a causal language model"
            )
        self.teacher = teacher.eval().requires_grad_(False)
        self.temperature, self.soft, self.hard, self.cosine = temperature, soft, hard, cosine
        self.share = 1.0 if share is not None and isinstance(teacher, DecoderModel) else share

    def __call__(self, model: Model, batch: Batch) -> Loss:
        """The weighted sum of the three losses over a batch."""
        self._check(model)
        targets = batch.targets
        if targets is None:
            targets = next_token_targets(batch) if isinstance(model, DecoderModel) else required_targets(batch)
        rows = (
            None if batch.lengths is None else _token_rows(batch)
        )  # first, while the GPU queue is empty: this synchronizes
        hard_rows = target_rows(targets) if isinstance(model, EncoderModel) else None
        hidden: Tensor = model.hidden(batch)  # type: ignore[operator]
        theirs = self._teacher_hidden(batch)
        mine, theirs = hidden.flatten(0, 1), theirs.flatten(0, 1)  # (N, E)
        if rows is not None:
            mine, theirs = mine[rows], theirs[rows]
        n = len(mine)
        metrics: dict[str, tuple[Tensor, Tensor | int]] = {}
        total = mine.new_zeros((), dtype=torch.float32)
        if self.soft:
            soft = self._soft(model, mine, theirs)
            metrics["soft_loss"] = (soft.detach(), n)
            total = total + self.soft * soft
        if self.hard:
            loss = language_loss(_head(model), hidden, targets, rows=hard_rows)
            metrics["hard_loss"] = (loss.sum.detach(), loss.n_targets)
            count = 1 / self.share if self.share is not None else n / torch.as_tensor(loss.n_targets).clamp(min=1)
            total = total + self.hard * count * loss.sum
        if self.cosine:
            cosine = (1 - F.cosine_similarity(mine.float(), theirs.float(), dim=-1)).sum()
            metrics["cosine_loss"] = (cosine.detach(), n)
            total = total + self.cosine * cosine
        return Loss(total, n, metrics)

    @torch.no_grad()
    def _teacher_hidden(self, batch: Batch) -> Tensor:
        """The teacher's last hidden states (B, T, E)."""
        self.teacher.to(batch.ids.device)
        if isinstance(self.teacher, EncoderModel) and self.teacher.segment is None:
            batch = dataclasses.replace(batch, segments=None)
        return self.teacher.hidden(batch)

    def _soft(self, model: Model, mine: Tensor, theirs: Tensor) -> Tensor:
        """The KL divergence at the temperature, summed; for a large vocabulary in chunks recomputed in backward."""
        part = partial(_divergence, _head(model), _head(self.teacher), self.temperature)
        size = CHUNK.get(mine.device.type, CHUNK["cuda"])
        n = max(1, size // (4 * largest_dim(_head(model))))
        return part(mine, theirs) if len(mine) <= n else checkpointed_sum(part, mine, theirs, n=n)

    def _check(self, model: Model) -> None:
        if not _is_language_model(model) or isinstance(model, DecoderModel) != isinstance(self.teacher, DecoderModel):
            raise ValueError(
                f"a {type(model).__name__} cannot learn from a {type(self.teacher).__name__}: both must be masked, "
                "or both causal language models"
            )
        mine, theirs = model.config, self.teacher.config
        if mine.vocab_size != theirs.vocab_size:
            raise ValueError(
                f"the student has {mine.vocab_size} tokens and the teacher {theirs.vocab_size}: they must have "
                "one tokenizer"
            )
        if self.cosine and mine.d_model != theirs.d_model:
            raise ValueError(
                f"the student is {mine.d_model} wide and the teacher {theirs.d_model}: their hidden states "
                "have no angle, set objective.cosine to 0"
            )


def _divergence(student: nn.Module, teacher: nn.Module, temperature: float, mine: Tensor, theirs: Tensor) -> Tensor:
    """T² KL(teacher ‖ student) at temperature T, summed over rows (N, E) of last hidden states."""
    said = torch.log_softmax(student(mine).float() / temperature, dim=-1)  # (N, V)
    with torch.no_grad():
        taught = torch.log_softmax(teacher(theirs).float() / temperature, dim=-1)
    return F.kl_div(said, taught, reduction="sum", log_target=True) * temperature**2


def _is_language_model(model: nn.Module) -> bool:
    if isinstance(model, EncoderModel):
        return isinstance(model.head, MaskedHead)
    return isinstance(model, DecoderModel)


def _head(model: nn.Module) -> nn.Module:
    return model.get_submodule("head")


def _token_rows(batch: Batch) -> Tensor:
    """Indices of the tokens of a flattened batch that are no padding."""
    assert batch.lengths is not None
    place = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return (place < batch.lengths[:, None]).flatten().nonzero()[:, 0]


# --- the student -----------------------------------------------------------------------------------------------------


def halve(teacher: Model, *, family: str | None = None) -> Model:
    """A student with every second layer of the teacher, from the first on, its embeddings and its head.

    Of the teacher's own family, or "distilbert" from a BERT: without segments (the first one's embedding is added
    to the position embeddings) and without next-sentence prediction.
    """
    config = teacher.config
    if not hasattr(config, "n_layers") or config.n_layers < 2:
        raise ValueError(f"a {type(teacher).__name__} of one layer cannot be halved")
    changes: dict[str, Any] = {"n_layers": (config.n_layers + 1) // 2}
    if getattr(config, "n_decoder_layers", None) is not None:
        changes["n_decoder_layers"] = (config.n_decoder_layers + 1) // 2
    if family in (None, teacher.family):
        student: Model = type(teacher).create(config.replace(**changes), device=teacher.device)
    elif family == "distilbert" and isinstance(teacher, Bert) and _is_language_model(teacher):
        student = _distilbert(teacher, changes["n_layers"])
    else:
        raise ValueError(f"a {teacher.family} cannot be halved into a {family}, only into a {teacher.family}")
    given = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, p in student.named_parameters():
            layer = LAYER.match(name)
            source = f"{layer[1]}{2 * int(layer[2])}{layer[3]}" if layer else name
            p.copy_(given[source])
        if family == "distilbert" and isinstance(teacher, Bert):
            assert teacher.segment is not None
            student.get_parameter("position.weight").add_(teacher.segment.weight[0])
    student.special = dict(teacher.special)
    student.generation = dict(teacher.generation)
    student.preprocessor = dict(teacher.preprocessor)
    return student.to(next(teacher.parameters()).dtype)


def _distilbert(teacher: Bert, n_layers: int) -> DistilBert:
    c = teacher.config
    shared = ("d_model", "n_heads", "d_ff", "vocab_size", "max_len", "dropout", "attention_dropout", "act")
    settings = {name: getattr(c, name) for name in shared}
    return DistilBert.create(DistilBertConfig(**settings, n_layers=n_layers), device=teacher.device)
