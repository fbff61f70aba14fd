"""Sampling for all rows of a decode step at once: penalties, temperature, filters, log-probabilities.

The rules and their order are those of generate/sampling.py, written so that a CUDA graph can have them: parameters of
rows are tensors, shapes do not depend on values, and nothing is read by the host. Tokens that penalties count are
counted here too, since the next step begins before the host knows them. The uniform random numbers come from the host,
the same as on a CPU; they do not depend on the tokens.

    B rows, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from heedful.kernels.sampling import n_uniforms

# The parameters that are understood here; a row with another one that is not its default is sampled by the host.
PARAMETERS = frozenset({
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "seed",
})  # fmt: skip
MAX_TOP = 20  # log-probabilities beside a token's own: as many as OpenAI's API gives


class SupportsSampling(Protocol):
    """What is needed of a sequence's sampler (generate/sampling.py)."""

    params: Any  # temperature, filters, penalties and logit_bias
    penalizes: bool

    def counts(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The ids that penalties apply to, and how often each was generated."""

    def peek_uniforms(self, n: int, ahead: int = 0) -> list[float]:
        """The n random numbers of the token after so many others."""

    def uniforms(self, n: int) -> list[float]:
        """The n random numbers of the next token, which are used then."""


class SamplingKind(NamedTuple):
    """What the rows of a step need beyond their most likely token; each kind is a graph of its own, so that there are
    few: penalties and typical sampling, which are rare, come with all that is usual."""

    draws: bool = False  # a random token
    penalties: bool = False  # or a bias
    sorts: bool = False  # top-k, top-p, min-p
    typical: bool = False
    scores: bool = False  # log-probabilities

    @classmethod
    def of(cls, samplers: Sequence[SupportsSampling], scores: bool) -> SamplingKind:
        """The kind that serves all these rows."""
        drawn = [s.params for s in samplers if s.params.temperature > 0]
        penalties = any(s.penalizes or s.params.logit_bias for s in samplers)
        typical = any(p.typical_p < 1 for p in drawn)
        sorts = penalties or typical or any(p.top_k is not None or p.top_p < 1 or p.min_p > 0 for p in drawn)
        return cls(bool(drawn) or penalties, penalties, sorts, typical, scores)


class RowSampling:
    """The parameters, random numbers and counted tokens of B rows on the device."""

    def __init__(self, kind: SamplingKind, n_rows: int, n_tokens: int, device: torch.device) -> None:
        self.kind, self.n_tokens = kind, n_tokens
        self.n_top = min(MAX_TOP, n_tokens) if kind.scores else 0
        self.params = torch.zeros(8, n_rows, 1, dtype=torch.float64, device=device)
        self.uniforms = torch.zeros(n_rows, n_uniforms(n_tokens), dtype=torch.float64, device=device)
        n_counted = n_rows if kind.penalties else 0
        # 0 for a token that no penalty applies to, else one more than how often it was generated
        self.listed = torch.zeros(n_counted, n_tokens, dtype=torch.int32, device=device)
        self.bias = torch.zeros(n_counted, n_tokens, device=device)

    # --- from the host -----------------------------------------------------------------------------------------------

    def load(self, samplers: Sequence[SupportsSampling]) -> None:
        """Set the rows; those beyond the samplers take their most likely token."""
        if not (self.kind.draws or self.kind.penalties):
            return
        rows = [
            (p.temperature, min(p.top_k or self.n_tokens, self.n_tokens), p.top_p if p.top_p < 1 else 2, p.min_p,
             p.typical_p if p.typical_p < 1 else 2, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in (sampler.params for sampler in samplers)
        ]  # fmt: skip
        rows += [(0, 1, 2, 0, 2, 1, 0, 0)] * (self.params.shape[1] - len(rows))
        self.params.copy_(torch.tensor(rows, dtype=torch.float64).T[..., None])
        if not self.kind.penalties:
            return
        self.listed.zero_()
        self.bias.zero_()
        for row, sampler in enumerate(samplers):
            if sampler.penalizes:
                ids, counts = sampler.counts()
                known = ids < self.n_tokens  # the input vocabulary may be larger than the output vocabulary
                listed = torch.from_numpy(counts[known] + 1).to(self.listed)
                self.listed[row, torch.from_numpy(ids[known]).to(self.listed.device)] = listed
            if bias := sampler.params.logit_bias:
                at = torch.tensor(list(bias), device=self.bias.device)
                self.bias[row, at] = torch.tensor(list(bias.values())).to(self.bias)

    def load_uniforms(self, samplers: Sequence[SupportsSampling], ahead: int) -> None:
        """Set the random numbers of the next token but `ahead`."""
        if self.kind.draws:
            n, on_gpu = self.uniforms.shape[1], self.uniforms.is_cuda
            rows = [s.peek_uniforms(n, ahead) if s.params.temperature > 0 else [0.0] * n for s in samplers]
            host = torch.tensor(rows, dtype=torch.float64, pin_memory=on_gpu)
            self.uniforms[: len(rows)].copy_(host, non_blocking=True)

    # --- on the device -----------------------------------------------------------------------------------------------

    def penalize(self, logits: Tensor) -> Tensor:
        """Logits (B, V) with bias and penalties, in float32."""
        repetition, frequency, presence = self.params[5:].float().unbind()  # (B, 1)
        x, counts = logits.float() + self.bias, (self.listed - 1).clamp_(min=0)
        x = torch.where(self.listed > 0, torch.where(x < 0, x * repetition, x / repetition), x)
        return x - counts * frequency - (counts > 0) * presence

    def count(self, tokens: Tensor) -> None:
        """Count generated tokens (B,)."""
        at = tokens[:, None]
        self.listed.scatter_(1, at, self.listed.gather(1, at).clamp_(min=1) + 1)

    def cumulative_masses(self, logits: Tensor) -> Tensor:
        """Cumulative probabilities (B, V) in float64 after temperature and filters, not normalized."""
        temperature, top_k, top_p, min_p, typical = self.params[:5].unbind()  # (B, 1)
        x = logits.float()
        x = (x - x.amax(-1, keepdim=True)) / temperature.clamp(min=1e-30).float()
        if self.kind.sorts:
            keys, order = x.sort(dim=-1, descending=True, stable=True)
            keys = keys.masked_fill(keys < keys.gather(1, top_k.long() - 1), -torch.inf)
            keys = keys.masked_fill(~_smallest(keys.softmax(-1), top_p), -torch.inf)
            shares = keys.softmax(-1)
            keys = keys.masked_fill(shares < min_p.float() * shares[:, :1], -torch.inf)
            x = torch.empty_like(x).scatter_(1, order, keys)
        if self.kind.typical:
            logs, shares = x.log_softmax(-1), x.softmax(-1)
            entropy = -(logs * shares).nansum(-1, keepdim=True, dtype=torch.float64).to(logs.dtype)  # 0 · -inf is 0
            order = (logs + entropy).abs().sort(dim=-1, stable=True).indices
            kept = _smallest(shares.gather(1, order), typical)
            x = x.masked_fill(~torch.empty_like(kept).scatter_(1, order, kept), -torch.inf)
        return x.softmax(-1).double().cumsum(-1)

    def scores(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The model's log-probability of each token (B,), the highest ones and their ids: (1 + 2 n_top, B) in
        float64."""
        logs = logits.float().log_softmax(-1)
        own = logs.gather(1, tokens[:, None])
        highest, ids = logs.topk(self.n_top)
        return torch.cat([own.double(), highest.double(), ids.double()], dim=-1).T


def _smallest(shares: Tensor, mass: Tensor) -> Tensor:
    """Mask (B, V) of the first shares (B, V) that together have the mass (B, 1), one at least."""
    shares = shares.double()
    kept = (shares.cumsum(-1) - shares < mass) & (shares > 0)
    kept[:, 0] = True
    return kept
