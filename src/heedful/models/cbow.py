"""CBOW, the continuous bag of words (Mikolov et al. 2013, section 3.1): a word from the mean of the words around it.

Its embedding is what one trains it for: words that occur in the same contexts get similar vectors (`nearest`,
`analogy` in `heedful.nn.embed`). It is a forerunner of attention: the mean over a window is attention with equal
weights. Where we differ: a full softmax, where the paper has a hierarchical one to save time, and a bias per word
(negative sampling, the authors' later way, is heedful.train.negative_sampling). The bias holds how frequent a word is
(`init_unigram`). Without it the mean of any neighbours has to say so: all vectors
first grow in that one direction, and stay near it for long.

    B batch, T positions, E width of the vectors, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heedful.models.base import Batch, Model, Output, as_batch
from heedful.models.config import Config
from heedful.nn.embed import Embedding
from heedful.nn.head import LanguageHead


@dataclass(frozen=True)
class CBOWConfig(Config):
    """CBOW's settings."""

    vocab_size: int = 30000
    d_model: int = 300
    window: int = 4  # words on each side; four in the paper's best model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window is {self.window}: a word needs 1 neighbour at least")


class CBOW(Model):
    """Predicts every token of a row from its neighbours; the targets are the tokens themselves."""

    family = "cbow"
    config_class = CBOWConfig
    config: CBOWConfig
    abilities = ("embed", "fill", "neighbours", "capture")

    def __init__(self, config: CBOWConfig) -> None:
        super().__init__(config)
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.head = LanguageHead(config.d_model, config.vocab_size, bias=True)

    @property
    def vectors(self) -> Tensor:
        """The trained embedding (V, E)."""
        return self.embed.weight.detach()

    def hidden(self, batch: Batch, window: Tensor | None = None) -> Tensor:
        """The mean of the embeddings of each position's neighbours (B, T, E), `window` (B,) of them on each side."""
        return self.around(batch, window) @ self.embed(batch.ids)  # (B, T, T) @ (B, T, E)

    def forward(self, batch: Batch | Tensor) -> Output:
        """Token ids (B, T) -> logits (B, T, V) of each token, from its neighbours."""
        hidden = self.hidden(as_batch(batch))  # (B, T, E)
        return Output(hidden, self.head(hidden))  # (B, T, V)

    def around(self, batch: Batch, window: Tensor | None = None) -> Tensor:
        """The weight (B, T, T) of each position (column) in the mean of another (row): equal for all neighbours.
        `window` (B,) is how many there are on each side, by default the config's."""
        n, device = batch.ids.shape[1], batch.ids.device
        place = torch.arange(n, device=device)
        distance = (place[:, None] - place).abs()
        reach: int | Tensor = self.config.window if window is None else window[:, None, None]
        near = ((distance > 0) & (distance <= reach)).expand(len(batch.ids), n, n)
        if batch.lengths is not None:
            near = near & (place < batch.lengths[:, None])[:, None, :]
        if batch.documents is not None:
            near = near & (batch.documents[:, :, None] == batch.documents[:, None, :])
        count = near.sum(dim=-1, keepdim=True).clamp(min=1)  # a word without neighbours gets the zero vector
        return near.to(self.embed.weight.dtype) / count

    def init_weights(self) -> None:
        """As in the authors' code: the embedding uniform in ±1/2E, the head 0."""
        half = 0.5 / self.config.d_model
        nn.init.uniform_(self.embed.weight, -half, half)
        for p in self.head.parameters():
            nn.init.zeros_(p)

    @torch.no_grad()
    def init_unigram(self, counts: Tensor, power: float = 1.0) -> None:
        """Begin as a unigram model: the head's bias is the log of each token's frequency, from its count (V,); with a
        `power` below 1 frequent words are less so."""
        smoothed = (counts.to(self.head.get_parameter("bias")) + 1) ** power  # a token never seen is not impossible
        self.head.get_parameter("bias").copy_((smoothed / smoothed.sum()).log())
