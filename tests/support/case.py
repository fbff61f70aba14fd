"""A `Case` is one family held against a reference from outside: their tiny random model, ours with its weights.

`tests/support/families.py` lists the cases; the parity and contract suites run every check on each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from heedful.kernels.accelerate import accelerate
from heedful.models.base import Batch, Model
from heedful.models.mapping import WeightMap
from heedful.nn.attention import Attention
from heedful.train.objectives import (
    Objective,
    causal,
    classification,
    masked,
    multi_label,
    next_token_targets,
    question_answering,
    regression,
    seq2seq,
)
from heedful.weights.folder import meta_model
from heedful.weights.load import DictSource, load_tensors

VOCAB = 61


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that every part shows in the output (fresh models are nearly uniform)."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.ndim >= 2:
                p.copy_(noise * 0.15)
            elif "norm" in name.lower() or "ln" in name.lower():
                p.copy_(p + 0.1 * noise)
            else:
                p.copy_(0.1 * noise)
    return model.eval()


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value where that is above 1."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} is not {tuple(theirs.shape)}"
    assert torch.isfinite(ours).all(), "not a finite number"
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()


PATHS = ("plain", "inference", "training")  # the plain path, and what kernels.accelerate makes of a model


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model, which in training mode then computes what it does otherwise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, Attention):
            module.dropout = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


def real(batch_lengths: Tensor | None, n_rows: int, n: int) -> Tensor:
    """(B, T) True where a token is real."""
    if batch_lengths is None:
        return torch.ones(n_rows, n, dtype=torch.bool)
    return torch.arange(n) < batch_lengths[:, None]


@dataclass
class Case:
    """One model of the reference implementation (transformers unless a subclass says otherwise)."""

    name: str
    make: Callable[[], nn.Module]  # the tiny reference model
    objective: Objective = causal
    generates: bool = True
    packs: bool = False  # documents can be packed into a row (decoder-only models)
    exports: bool = True  # the reference reads what we save
    accelerates: bool = True  # has blocks or a language head, which can be replaced for speed
    exact: bool = True  # other rows of the batch do not change the last bit (experts gather tokens from all rows)

    def reference(self) -> nn.Module:
        """The reference model: a copy of one that is built once per process, so that a test may change it."""
        return copy.deepcopy(self._reference)

    def model(self, path: str = "plain") -> Model:
        """Ours with the reference's weights: a copy of one that is built once per process, on one of PATHS."""
        model = copy.deepcopy(self._model)
        if path == "inference":
            return accelerate(model, "inference", precision="float32")
        if path == "training":
            return accelerate(without_dropout(model).train(), "training")
        return model

    @cached_property
    def _reference(self) -> nn.Module:
        return self.build_reference()

    @cached_property
    def _model(self) -> Model:
        return self.ours(self._reference)

    def build_reference(self) -> nn.Module:
        torch.manual_seed(0)
        return randomize(self.make())

    def ours(self, reference: nn.Module) -> Model:
        """Our model with the weights of this reference model."""
        hub = reference.config.to_dict()
        hub["architectures"] = [type(reference).__name__]
        model = meta_model(hub)
        tensors = {n: p.detach().clone() for n, p in reference.named_parameters()}
        load_tensors(model, DictSource(tensors), weights=self.weights(model))
        return model.eval()

    def weights(self, ours: Model) -> WeightMap:
        """The map from our names to the reference's."""
        return ours.weight_map()

    def batch(self) -> Batch:
        """Rows of unequal length, padded on the right."""
        raise NotImplementedError

    def reference_logits(self, reference: nn.Module, batch: Batch) -> Tensor:
        return self._call(reference, batch).logits

    def reference_loss(self, reference: nn.Module, batch: Batch) -> Tensor:
        return self._call(reference, batch, labels=self.labels(batch)).loss

    def labels(self, batch: Batch) -> Tensor:
        return batch.targets

    def _call(self, reference: nn.Module, batch: Batch, **more):
        raise NotImplementedError

    def counted(self, batch: Batch) -> Tensor:
        """Which of the logits' leading positions to compare (padding is nobody's business)."""
        return real(batch.lengths, *batch.tokens.shape)

    def reference_greedy(self, reference: nn.Module, batch: Batch, n: int) -> list[list[int]]:
        """n greedy ids per row, each row alone and without a cache: the plainest way there is."""
        raise NotImplementedError

    def idle(self, parameter: str) -> bool:
        """Parameters that rightly get no gradient from this objective."""
        return False

    def rows(self, batch: Batch) -> list[Batch]:
        """The batch's rows one by one, without padding."""
        raise NotImplementedError


def text_batch(n_rows: int = 3, longest: int = 13, seed: int = 1, vocab: int = VOCAB) -> Batch:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab, (n_rows, longest), generator=g)
    return Batch(tokens, torch.tensor([longest, longest - 6, longest - 2])[:n_rows])


def cut(tokens: Tensor | None, lengths: Tensor | None, i: int) -> Tensor | None:
    return None if tokens is None else tokens[i : i + 1, : tokens.shape[1] if lengths is None else lengths[i]]


@dataclass
class Decoder(Case):
    packs: bool = True

    def batch(self) -> Batch:
        return text_batch()

    def labels(self, batch: Batch) -> Tensor:
        return batch.tokens.masked_fill(~self.counted(batch), -100)

    def _call(self, reference, batch, **more):
        mask = real(batch.lengths, *batch.tokens.shape).long()
        return reference(input_ids=batch.tokens, attention_mask=mask, use_cache=False, **more)

    def reference_loss(self, reference, batch):
        # Not the reference's own loss: some shift labels by position and count padding; the definition is short.
        logits = self.reference_logits(reference, batch)
        targets = next_token_targets(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    @torch.no_grad()
    def reference_greedy(self, reference, batch, n):
        out = []
        for row in self.rows(batch):
            tokens = row.tokens
            for _ in range(n):
                logits = self.reference_logits(reference, Batch(tokens))
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            out.append(tokens[0, row.tokens.shape[1] :].tolist())
        return out

    def rows(self, batch):
        return [Batch(cut(batch.tokens, batch.lengths, i)) for i in range(len(batch.tokens))]


@dataclass
class Classifier(Decoder):
    """A decoder that labels a text by its last token, which the reference finds by the id of the padding."""

    objective: Objective = classification
    generates: bool = False
    packs: bool = False
    n_labels: int = 3
    pad_id: int = 0

    def ours(self, reference: nn.Module) -> Model:
        model = super().ours(reference)
        model.special["pad_token_id"] = self.pad_id  # as a folder's config.json has it
        return model

    def batch(self) -> Batch:
        batch = text_batch()
        batch.targets = torch.tensor([2, 0, 1])
        return batch

    def labels(self, batch: Batch) -> Tensor:
        return batch.targets

    def counted(self, batch: Batch) -> Tensor:
        return torch.ones(len(batch.tokens), dtype=torch.bool)

    def _call(self, reference, batch, **more):
        is_real = real(batch.lengths, *batch.tokens.shape)
        tokens = batch.tokens.masked_fill(~is_real, self.pad_id)
        return reference(input_ids=tokens, attention_mask=is_real.long(), use_cache=False, **more)

    def reference_loss(self, reference, batch):
        return Case.reference_loss(self, reference, batch)


@dataclass
class Encoder(Case):
    """BERT and its kin with one of their heads; `targets` are made to fit the objective."""

    objective: Objective = masked
    generates: bool = False
    segmented: bool = True  # has sentences A and B
    paired: bool = False  # is also asked whether B follows A
    per_token: bool = False
    n_labels: int = 3

    def batch(self) -> Batch:
        batch = text_batch()
        g = torch.Generator().manual_seed(2)
        n_rows, n = batch.tokens.shape
        if self.segmented:
            batch.segments = (torch.arange(n) >= 4).long().expand(n_rows, n).contiguous()
        if self.objective is question_answering:
            batch.targets = torch.tensor([[1, 3], [0, 2], [4, 4]])
        elif self.objective is masked:
            hidden = (torch.rand(n_rows, n, generator=g) < 0.4) & real(batch.lengths, n_rows, n)
            batch.targets = torch.where(hidden, batch.tokens, -100)
            batch.next_sentence = torch.randint(2, (n_rows,), generator=g) if self.paired else None
        elif self.objective is multi_label:
            batch.targets = torch.randint(2, (n_rows, self.n_labels), generator=g).float()
        elif self.objective is regression:
            batch.targets = torch.randn(n_rows, generator=g)
        elif self.per_token:
            labels = torch.randint(self.n_labels, (n_rows, n), generator=g)
            batch.targets = labels.masked_fill(~real(batch.lengths, n_rows, n), -100)
        else:
            batch.targets = torch.randint(self.n_labels, (n_rows,), generator=g)
        return batch

    def _call(self, reference, batch, **more):
        mask = real(batch.lengths, *batch.tokens.shape).long()
        if self.segmented:
            more["token_type_ids"] = batch.segments
        if self.paired and "labels" in more:
            more["next_sentence_label"] = batch.next_sentence
        return reference(input_ids=batch.tokens, attention_mask=mask, **more)

    def reference_loss(self, reference, batch):
        if self.objective is not question_answering:
            return super().reference_loss(reference, batch)
        # Not the reference's own loss: it lets the answer begin and end in the padding.
        hidden = ~real(batch.lengths, *batch.tokens.shape)
        logits = self.reference_logits(reference, batch).masked_fill(hidden[..., None], -torch.inf)
        return nn.functional.cross_entropy(logits, batch.targets)  # over the positions: (B, T, 2), (B, 2)

    def reference_logits(self, reference, batch):
        out = self._call(reference, batch)
        if self.objective is question_answering:
            return torch.stack([out.start_logits, out.end_logits], dim=-1)
        return out.logits if "logits" in out else out.prediction_logits

    def counted(self, batch):
        if self.objective in (classification, multi_label, regression) and not self.per_token:
            return torch.ones(len(batch.tokens), dtype=torch.bool)
        return super().counted(batch)

    def rows(self, batch):
        return [
            Batch(cut(batch.tokens, batch.lengths, i), segments=cut(batch.segments, batch.lengths, i))
            for i in range(len(batch.tokens))
        ]


@dataclass
class EncoderDecoder(Case):
    objective: Objective = seq2seq
    start_id: int = 0

    def batch(self) -> Batch:
        source, target = text_batch(), text_batch(longest=9, seed=3)
        tokens = target.tokens.clone()
        tokens[:, 0] = self.start_id
        targets = torch.full_like(tokens, -100)
        targets[:, :-1] = tokens[:, 1:]
        targets[~real(target.lengths, *tokens.shape)] = -100
        return Batch(tokens, target.lengths, source.tokens, source.lengths, targets=targets)

    def _call(self, reference, batch, **more):
        mask = real(batch.source_lengths, *batch.source.shape).long()
        return reference(
            input_ids=batch.source,
            attention_mask=mask,
            decoder_input_ids=batch.tokens,
            use_cache=False,
            **more,
        )

    @torch.no_grad()
    def reference_greedy(self, reference, batch, n):
        out = []
        for row in self.rows(batch):
            tokens = torch.full((1, 1), self.start_id)
            for _ in range(n):
                logits = self.reference_logits(reference, Batch(tokens, source=row.source))
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            out.append(tokens[0, 1:].tolist())
        return out

    def rows(self, batch):
        return [
            Batch(cut(batch.tokens, batch.lengths, i), source=cut(batch.source, batch.source_lengths, i))
            for i in range(len(batch.source))
        ]
