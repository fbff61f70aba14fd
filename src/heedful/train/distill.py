"""Knowledge distillation: a small model learns from a large one (Hinton et al. 2015; DistilBERT, Sanh et al. 2019).

DistilBERT's objective is the sum of three means, with the weights of its authors' training:

    soft    5   KL(teacher ‖ student) over the vocabulary at temperature 2, times its square
    hard    2   the teacher's own objective: masked tokens, or the next token
    cosine  1   1 - cos of the angle between their last hidden states

soft and cosine are over every position that is not padding; in conversations over the answers alone. The student
begins with every second layer of the teacher, its embeddings and its head (`halve`), or, if it is narrower, with the
principal components of the teacher's embeddings (`project_embeddings`).

    N real positions, C rows of a chunk, E model width, V vocabulary
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heedful.data.dataset import IGNORED
from heedful.models.base import Batch, DecoderModel, Model
from heedful.models.bert import Bert
from heedful.models.distilbert import DistilBert, DistilBertConfig
from heedful.models.encoder import EncoderModel
from heedful.models.heads import MaskedHead
from heedful.nn.head import LanguageHead
from heedful.train.loss import CHUNK, Loss, checkpointed_sum, is_plain_head, language_loss, largest_dim, target_rows
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
        if self._is_fused(model):
            return self._fused(model, batch, targets)
        rows = self._rows(model, batch)  # first, while the GPU queue is empty: this synchronizes
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
        if self.teacher.device != batch.ids.device:
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

    @staticmethod
    def _rows(model: Model, batch: Batch) -> Tensor | None:
        """The rows of the flattened batch that count: of a packed decoder's those with a target, else real tokens."""
        if isinstance(model, DecoderModel) and batch.documents is not None and batch.targets is not None:
            return target_rows(batch.targets)
        return None if batch.lengths is None else _is_token(batch).flatten().nonzero()[:, 0]

    def _is_fused(self, model: Model) -> bool:
        """Whether `ChunkedDistillation` has what this needs: two plain heads, and one number of targets per token."""
        plain = all(is_plain_head(h) and _is_product(h) for h in (_head(model), _head(self.teacher)))
        return plain and isinstance(model, DecoderModel) and (self.share == 1.0 or not self.hard)

    def _fused(self, model: Model, batch: Batch, targets: Tensor) -> Loss:
        """The loss by `ChunkedDistillation`. All rows are computed, and those that do not count weighted 0: selecting
        them would synchronize with a GPU."""
        student, teacher = _head(model), _head(self.teacher)
        hidden: Tensor = model.hidden(batch)  # type: ignore[operator]
        mine, theirs = hidden.flatten(0, 1), self._teacher_hidden(batch).flatten(0, 1)  # (N, E)
        targets = targets.flatten()
        counted = targets != IGNORED if batch.targets is not None else _is_token(batch).flatten()
        n, n_targets = counted.sum(), (targets != IGNORED).sum()
        size = max(1, CHUNK.get(mine.device.type, CHUNK["cuda"]) // (4 * largest_dim(student)))
        given: list[Any] = [mine, student.weight]
        if not torch.is_grad_enabled():
            given = [x.detach() for x in given]
        given += [theirs, teacher.weight, targets, counted, (self.temperature, self.soft, self.hard), size]
        total, soft, hard = ChunkedDistillation.apply(*given)  # type: ignore[no-untyped-call]
        metrics: dict[str, tuple[Tensor, Tensor | int]] = {"soft_loss": (soft, n), "hard_loss": (hard, n_targets)}
        if self.cosine:
            cosine = ((1 - F.cosine_similarity(mine.float(), theirs.float(), dim=-1)) * counted).sum()
            metrics["cosine_loss"] = (cosine.detach(), n)
            total = total + self.cosine * cosine
        return Loss(total, n, metrics)

    def _check(self, model: Model) -> None:
        if not _is_language_model(model) or isinstance(model, DecoderModel) != isinstance(self.teacher, DecoderModel):
            raise ValueError(
                f"a {type(model).__name__} cannot learn from a {type(self.teacher).__name__}: both must be masked, "
                "or both causal language models"
            )
        check_sizes(model, self.teacher, cosine=self.cosine > 0)


def check_sizes(student: Model, teacher: Model, *, cosine: bool) -> None:
    """ValueError unless both have one vocabulary, and one width if the angle of their hidden states is learned."""
    mine, theirs = student.config, teacher.config
    if mine.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"the student has {mine.vocab_size} tokens and the teacher {theirs.vocab_size}: they must have "
            "one tokenizer"
        )
    if cosine and mine.d_model != theirs.d_model:
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


class ChunkedDistillation(torch.autograd.Function):
    """Both heads, soft and hard loss, forward and backward over chunks of rows, as in `ChunkedCrossEntropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        mine: Tensor,
        weight: Tensor,
        theirs: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        counted: Tensor,
        weights: tuple[float, float, float],
        n: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted sum of the losses of rows (N, E) against targets (N,), and each; gradients are computed here.
        `counted` (N,) are the rows with a soft loss; `weights` are temperature, soft and hard."""
        kind = mine.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else mine.dtype
        losses_of = compiled_distillation if kind == "cuda" else distillation_and_gradient
        learns = any(ctx.needs_input_grad)
        ctx.dtypes = (mine.dtype, weight.dtype)
        dmine = torch.empty_like(mine, dtype=dtype) if learns else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        soft, hard = (mine.new_zeros((), dtype=torch.float32) for _ in range(2))
        with torch.autocast(kind, enabled=False):
            w, taught = weight.to(dtype), teacher_weight.to(dtype)
            for begin in range(0, len(mine), n):
                part = slice(begin, begin + n)
                rows = mine[part].to(dtype)  # (C, E)
                logits = F.linear(rows, w), F.linear(theirs[part].to(dtype), taught)  # (C, V)
                divergence, losses, d = losses_of(*logits, targets[part], counted[part], *weights)
                soft += divergence.sum()
                hard += losses.sum()
                if dmine is not None and dweight is not None:
                    torch.mm(d, w, out=dmine[part])
                    dweight += d.T @ rows
        ctx.save_for_backward(dmine, dweight)
        ctx.mark_non_differentiable(soft, hard)
        return weights[1] * soft + weights[2] * hard, soft, hard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the gradient of the sum."""
        dmine, dweight = ctx.saved_tensors
        dtypes = ctx.dtypes
        return (dmine * gradient).to(dtypes[0]), (dweight * gradient).to(dtypes[1]), *(None,) * 6


def distillation_and_gradient(
    mine: Tensor, theirs: Tensor, targets: Tensor, counted: Tensor, temperature: float, soft: float, hard: float
) -> tuple[Tensor, Tensor, Tensor]:
    """T² KL(teacher ‖ student) at temperature T where `counted`, and cross-entropy (C,) of logits (C, V), and the
    gradient of their weighted sum with respect to the student's logits."""
    said = torch.log_softmax(mine.float() / temperature, dim=-1)
    taught = torch.log_softmax(theirs.float() / temperature, dim=-1)
    p = taught.exp()
    divergence = (p * (taught - said)).sum(-1) * temperature**2 * counted
    has_target = targets != IGNORED
    place = targets.clamp(min=0)[:, None]
    scores = said if temperature == 1 else torch.log_softmax(mine.float(), dim=-1)
    losses = -scores.gather(1, place)[:, 0] * has_target
    one_hot = (torch.arange(mine.shape[1], device=mine.device) == place).float()
    d = soft * temperature * counted[:, None] * (said.exp() - p) + hard * has_target[:, None] * (scores.exp() - one_hot)
    return divergence, losses, d.to(mine.dtype)


compiled_distillation = distillation_and_gradient  # or the same, compiled (train/torch_compile.py)


def _is_product(head: nn.Module) -> bool:
    """Whether a language head is a matrix product alone."""
    return isinstance(head, LanguageHead) and head.bias is None and head.scale is None and head.softcap is None


def _is_language_model(model: nn.Module) -> bool:
    if isinstance(model, EncoderModel):
        return isinstance(model.head, MaskedHead)
    return isinstance(model, DecoderModel)


def _head(model: nn.Module) -> nn.Module:
    return model.get_submodule("head")


def _is_token(batch: Batch) -> Tensor:
    """Which of a batch's tokens (B, T) are no padding."""
    if batch.lengths is None:
        return torch.ones_like(batch.ids, dtype=torch.bool)
    place = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return place < batch.lengths[:, None]


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


@torch.no_grad()
def project_embeddings(teacher: DecoderModel, student: DecoderModel) -> None:
    """Replace the student's embeddings by the teacher's, projected onto as many of their principal components as the
    student is wide; their size stays the student's own."""
    theirs, mine = teacher.embed.weight.double(), student.embed.weight
    if theirs.shape[0] != mine.shape[0] or theirs.shape[1] < mine.shape[1]:
        return
    _, directions = torch.linalg.eigh(theirs.T @ theirs)  # in ascending order
    projected = theirs @ directions[:, -mine.shape[1] :].flip(1)
    mine.copy_(projected * (mine.norm() / projected.norm()))


def _distilbert(teacher: Bert, n_layers: int) -> DistilBert:
    c = teacher.config
    shared = ("d_model", "n_heads", "d_ff", "vocab_size", "max_len", "dropout", "attention_dropout", "act")
    settings = {name: getattr(c, name) for name in shared}
    return DistilBert.create(DistilBertConfig(**settings, n_layers=n_layers), device=teacher.device)
