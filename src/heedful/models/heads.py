"""The heads of encoders (BERT, section 3, 4 and appendix A): each turns hidden states (B, T, E) into an `Output`.

name            class             reads               logits
encoder         NoHead            -                   none: the hidden states alone
pooler          PoolerHead        [CLS]               none: extra["pooled"] (B, E)
masked          MaskedHead        every position      (B, T, V)
pretraining     PretrainingHead   both                (B, T, V), and extra["next_sentence"] (B, 2)
next_sentence   NextSentenceHead  [CLS]               (B, 2)
classify        SequenceHead      [CLS]               (B, L)
choose          ChoiceHead        [CLS] per choice    (B, C); tokens and segments are (B, C, T), lengths (B, C)
tag             TokenHead         every position      (B, T, L)
answer          SpanHead          every position      (B, T, 2): of the first and the last token of the answer

B batch, T positions, E model width, V vocabulary, L labels, C choices
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from heedful.models.base import Batch, Output
from heedful.nn.feedforward import activation
from heedful.nn.head import FirstPosition, LanguageHead, Pooler


@dataclass
class HeadParts:
    """The arguments of all heads; each uses some."""

    d_model: int
    n_labels: int
    vocabulary: nn.Parameter | None = None  # (V, E) the embedding, to which a masked head is tied
    act: str = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.0
    pooler: Pooler | FirstPosition | None = None  # one vector per sequence


class EncoderHead(nn.Module):
    """Base of all heads: hidden states (B, T, E) -> logits."""

    ability: ClassVar[str | None] = None  # the method that it gives a loaded model
    pools: ClassVar[bool] = False  # reads its pooler's one vector per sequence
    per_token: ClassVar[bool] = False  # has logits for every position

    def __init__(self, parts: HeadParts) -> None:
        super().__init__()

    def output(self, hidden: Tensor) -> Output:
        """Hidden states, logits and whatever else the head computes."""
        return Output(hidden, self(hidden))

    def check(self, batch: Batch) -> None:
        """ValueError if the batch does not fit the head."""
        if self.pools and batch.documents is not None:
            raise ValueError(f"a {type(self).__name__} reads one vector per row: do not pack documents")
        if batch.ids.ndim != 2:
            raise ValueError(f"tokens must be (batch, positions), not {tuple(batch.ids.shape)}")


class NoHead(EncoderHead):
    """The encoder alone."""

    def output(self, hidden: Tensor) -> Output:
        """The hidden states."""
        return Output(hidden)


class PoolerHead(EncoderHead):
    """The pooled vector, without logits."""

    pools = True

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        assert parts.pooler is not None
        self.pooler = parts.pooler

    def output(self, hidden: Tensor) -> Output:
        """The hidden states and the pooled vector (B, E)."""
        return Output(hidden, extra={"pooled": self.pooler(hidden)})


class MaskedHead(EncoderHead):
    """BERT's masked language model: dense, activation, norm, then the embedding transposed, with a bias."""

    ability = "fill"
    per_token = True

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        assert parts.vocabulary is not None
        self.dense = nn.Linear(parts.d_model, parts.d_model)
        self.act = activation(parts.act)
        self.norm = nn.LayerNorm(parts.d_model, parts.norm_eps)
        self.vocabulary = LanguageHead(parts.d_model, len(parts.vocabulary), tied=parts.vocabulary, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., E) -> logits (..., V)."""
        return self.vocabulary(self.norm(self.act(self.dense(hidden))))


class PretrainingHead(MaskedHead):
    """BERT's two objectives: masked tokens, and whether sentence B follows A."""

    pools = True

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        assert parts.pooler is not None
        self.pooler = parts.pooler
        self.next_sentence = nn.Linear(parts.d_model, 2)

    def output(self, hidden: Tensor) -> Output:
        """Logits of every position (B, T, V); extra has "pooled" (B, E) and "next_sentence" (B, 2)."""
        pooled = self.pooler(hidden)
        return Output(hidden, self(hidden), {"pooled": pooled, "next_sentence": self.next_sentence(pooled)})


class SequenceHead(EncoderHead):
    """A label for each sequence, from its pooled vector."""

    ability: ClassVar[str | None] = "classify"
    pools = True

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        assert parts.pooler is not None
        self.pooler = parts.pooler
        self.dropout = nn.Dropout(parts.dropout)
        self.classifier = nn.Linear(parts.d_model, self.n_outputs(parts))

    def n_outputs(self, parts: HeadParts) -> int:
        """The number of logits of a sequence."""
        return parts.n_labels

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, E) -> logits (B, L)."""
        return self.classifier(self.dropout(self.pooler(hidden)))

    def output(self, hidden: Tensor) -> Output:
        """Logits, and extra "pooled" (B, E)."""
        pooled = self.pooler(hidden)
        return Output(hidden, self.classifier(self.dropout(pooled)), {"pooled": pooled})


class NextSentenceHead(SequenceHead):
    """Whether sentence B follows A."""

    ability = None

    def n_outputs(self, parts: HeadParts) -> int:
        """Two: it follows, or not."""
        return 2


class ChoiceHead(SequenceHead):
    """A score for each of several choices, every one a sequence of its own (BERT, section 4.4)."""

    ability = None

    def n_outputs(self, parts: HeadParts) -> int:
        """One."""
        return 1

    def check(self, batch: Batch) -> None:
        """ValueError unless tokens are (B, C, T)."""
        if batch.ids.ndim != 3 or batch.documents is not None:
            raise ValueError("the head 'choose' reads tokens (batch, choices, positions), not packed")

    def output(self, hidden: Tensor) -> Output:
        """Hidden states (B, C, T, E) -> logits (B, C)."""
        found = super().output(hidden)
        assert found.logits is not None
        return Output(hidden, found.logits.squeeze(-1), found.extra)


class TokenHead(EncoderHead):
    """A label for each token."""

    ability = "tag"
    per_token = True

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self.dropout = nn.Dropout(parts.dropout)
        self.classifier = nn.Linear(parts.d_model, self.n_outputs(parts))

    def n_outputs(self, parts: HeadParts) -> int:
        """The number of logits of a token."""
        return parts.n_labels

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, E) -> logits (B, T, L)."""
        return self.classifier(self.dropout(hidden))


class SpanHead(TokenHead):
    """The first and the last token of an answer (BERT, section 4.2)."""

    ability = "answer"

    def n_outputs(self, parts: HeadParts) -> int:
        """Two: the answer's first token, and its last."""
        return 2


HEADS: dict[str, type[EncoderHead]] = {
    "encoder": NoHead,
    "pooler": PoolerHead,
    "masked": MaskedHead,
    "pretraining": PretrainingHead,
    "next_sentence": NextSentenceHead,
    "classify": SequenceHead,
    "choose": ChoiceHead,
    "tag": TokenHead,
    "answer": SpanHead,
}
