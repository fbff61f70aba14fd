"""CBOW against PyTorch's own bag of embeddings and a linear layer: the contexts are spelled out here, one by one."""

from dataclasses import dataclass

import torch
from torch import nn

from heedful.models.base import Batch
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.train.objectives import Objective, classification
from heedful.weights.load import DictSource, load_tensors
from support.case import VOCAB, Case, cut, text_batch

WINDOW = 2


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(VOCAB, 16, mode="mean")
        self.head = nn.Linear(16, VOCAB)

    def forward(self, contexts):
        """One list of word ids per prediction."""
        starts = torch.tensor([0] + [len(c) for c in contexts]).cumsum(0)[:-1]
        return self.head(self.embed(torch.tensor([i for c in contexts for i in c]), starts))


@dataclass
class Words(Case):
    objective: Objective = classification
    generates: bool = False
    exports: bool = False  # no other program has a layout for it
    accelerates: bool = False  # nothing but a sum and a product

    def ours(self, reference):
        with torch.device("meta"):
            model = CBOW(CBOWConfig(vocab_size=VOCAB, d_model=16, window=WINDOW))
        load_tensors(model, DictSource({n: p.detach().clone() for n, p in reference.named_parameters()}))
        return model.eval()

    def batch(self) -> Batch:
        batch = text_batch()
        batch.targets = batch.tokens.masked_fill(~self.counted(batch), -100)
        return batch

    def reference_logits(self, reference, batch):
        rows = []
        for tokens, length in zip(batch.tokens.tolist(), self._lengths(batch), strict=True):
            words = tokens[:length]
            contexts = [words[max(0, i - WINDOW) : i] + words[i + 1 : i + 1 + WINDOW] for i in range(length)]
            logits = reference(contexts)
            rows.append(nn.functional.pad(logits, (0, 0, 0, len(tokens) - length)))
        return torch.stack(rows)

    def reference_loss(self, reference, batch):
        logits = self.reference_logits(reference, batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def rows(self, batch):
        return [Batch(cut(batch.tokens, batch.lengths, i)) for i in range(len(batch.tokens))]

    @staticmethod
    def _lengths(batch):
        return [batch.tokens.shape[1]] * len(batch.tokens) if batch.lengths is None else batch.lengths.tolist()


CASES = [Words("cbow", Bag)]
