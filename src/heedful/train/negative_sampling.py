"""Negative sampling (Mikolov et al. 2013, "Distributed Representations of Words and Phrases", section 2.2): each word
is told from a few words of a noise distribution, not from all of the vocabulary.

    loss = -log σ(h·w) - Σ over k negatives n of log σ(-h·n)      h the mean of the neighbours, w the word's output row

The noise is the words' frequency to the power 3/4. A model trained so has h·w = log p(w | h) - log k - log noise(w)
(Levy & Goldberg 2014), so that softmax(h·w + log noise(w)) is p(w | h). That is what the head computes with
log noise as its bias, which `CBOW.init_unigram` sets; here the noise is read from the bias, and the bias is not
trained.

As in the authors' code, the window is drawn too, from 1 to the model's: near words count more. Where we differ: the
words of a row share their window and their negatives (Ji et al. 2016, "Parallelizing Word2Vec in Shared and Distributed
Memory"), as many times more as keep a matrix product busy, each weighted so that they count as k. A negative may be the
word itself, as in the formula; the authors' code leaves those out.

B rows, T positions, E width of the vectors, V vocabulary, N negatives of a row
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.data.dataset import IGNORED
from heedful.models.base import Batch, Model
from heedful.models.cbow import CBOW
from heedful.train.loss import Loss

NOISE_POWER = 0.75
SHARED = 8  # a row has so many times k negatives


def negative_sampling(model: Model, batch: Batch, targets: Tensor, k: int, *, shared: int = SHARED) -> Loss:
    """The loss of k negatives for each target (B, T), drawn from softmax(the head's bias)."""
    assert isinstance(model, CBOW), "the recipe's check"
    window = torch.randint(1, model.config.window + 1, (len(targets),), device=targets.device)
    hidden = model.hidden(batch, window)  # (B, T, E)
    weight, bias = model.head.weight, model.head.get_parameter("bias")
    n = k * shared
    noise = (bias - bias.max()).detach().float().exp()  # in proportion
    negatives = torch.multinomial(noise, len(targets) * n, replacement=True).view(-1, n)  # (B, N)
    real = targets != IGNORED
    positive = (hidden * F.embedding(targets.clamp(min=0), weight)).sum(dim=-1)  # (B, T)
    negative = hidden @ F.embedding(negatives, weight).transpose(1, 2)  # (B, T, N)
    losses = F.softplus(-positive) + F.softplus(negative).sum(dim=-1) / shared
    total = losses.masked_fill(~real, 0).sum()
    return Loss(total + 0 * bias.sum(), real.sum())  # every parameter has a gradient
