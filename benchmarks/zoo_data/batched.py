"""Sampling from a LLaMA for thousands of prompts at once, on a GPU.

Rows of a batch begin together, padded on the left, so that every step writes one place of a static KV cache. Rows that
have ended are taken out from time to time, and the cache is compacted. Tokens are drawn at a temperature from those
with at least MIN_P times the best one's probability (min-p, Nguyen et al. 2024), which needs no sorting.

    B rows, T new positions, S cached positions, H query heads, G key/value heads, D head size, V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.models.llama import Llama

MASKED = -30000.0  # added to a score: finite, so that a row of padding alone has no NaN
TILE = 16  # keys are attended to in multiples of this
CHECK = 16  # steps between looks at which rows have ended
FEWEST = 0.05  # of the rows of a batch: so few are given up, they are the longest


class BatchedSampler:
    """A model with a KV cache of `n_cached` tokens; `end` is the token that ends an answer."""

    def __init__(self, model: Llama, end: int, n_cached: int, *, min_p: float, longest: int) -> None:
        self.model, self.end, self.longest = model, end, longest
        self.min_p, self.n_cached = min_p, n_cached
        c = model.config
        self.n_kv_heads, self.d_head = c.n_kv_heads or c.n_heads, c.d_rotary
        like = next(model.parameters())
        size = n_cached * self.n_kv_heads * self.d_head
        self.pool = torch.zeros(c.n_layers, 2, size, dtype=like.dtype, device=like.device)  # read where masked: finite
        self.cache: list[tuple[Tensor, Tensor]] = []  # of each layer, (B, G, capacity, D)

    def capacity(self, longest_prompt: int) -> int:
        """The places in the cache that a row takes."""
        return round_up(longest_prompt + self.longest)

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]], temperatures: list[float]) -> list[list[int]]:
        """The ids of an answer to each prompt, with the end where it came to one."""
        device, n = self.pool.device, max(map(len, prompts))
        self._begin(len(prompts), self.capacity(n))
        heat = torch.tensor(temperatures, device=device)[:, None]
        pads = torch.tensor([n - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([[self.end] * (n - len(prompt)) + prompt for prompt in prompts], device=device)
        bias = torch.full((len(ids), 1, 1, self.capacity(n)), MASKED, dtype=self.pool.dtype, device=device)
        bias[:, 0, 0, :n].masked_fill_(torch.arange(n, device=device) >= pads[:, None], 0)
        tokens = self._draw(self._prefill(ids, pads, bias), heat)
        written = torch.full((len(ids), self.longest), self.end, device=device)
        written[:, 0] = tokens
        owners, ended = torch.arange(len(ids), device=device), tokens == self.end
        answers: list[list[int]] = [[] for _ in ids]
        for i in range(1, self.longest):
            at = n + i - 1
            bias[..., at] = 0
            hidden = self._hidden(tokens[:, None], (at - pads)[:, None], slice(None), at, bias[..., : round_up(at + 1)])
            tokens = self._draw(hidden[:, 0], heat)
            written[:, i] = tokens
            ended |= tokens == self.end
            if i % CHECK and i + 1 < self.longest:
                continue
            kept = (~ended).nonzero()[:, 0]
            if len(kept) > 0.85 * len(ended) and i + 1 < self.longest:
                continue
            last = len(kept) <= FEWEST * len(answers) or i + 1 == self.longest
            done = torch.arange(len(ended), device=device) if last else ended.nonzero()[:, 0]
            for owner, row in zip(owners[done].tolist(), written[done, : i + 1].tolist(), strict=True):
                answers[owner] = row[: row.index(self.end) + 1] if self.end in row else row
            if last:
                break
            self._compact(kept, at + 1)
            pads, bias, tokens, written = pads[kept], bias[kept], tokens[kept], written[kept]
            owners, ended, heat = owners[kept], ended[kept], heat[kept]
        return answers

    def _begin(self, n_rows: int, capacity: int) -> None:
        assert n_rows * capacity <= self.n_cached, "more rows than the cache has room for"
        shape = (n_rows, self.n_kv_heads, capacity, self.d_head)
        size = n_rows * capacity * self.n_kv_heads * self.d_head
        self.cache = [(layer[0, :size].view(shape), layer[1, :size].view(shape)) for layer in self.pool]

    def _compact(self, kept: Tensor, n: int) -> None:
        """Move the rows that go on to the front."""
        for i, pair in enumerate(self.cache):
            for x in pair:
                x[: len(kept), :, :n] = x[kept, :, :n]
            self.cache[i] = (pair[0][: len(kept)], pair[1][: len(kept)])

    def _prefill(self, ids: Tensor, pads: Tensor, bias: Tensor) -> Tensor:
        """The last hidden states (B, E) of the prompts (B, T), some rows at a time."""
        n = ids.shape[1]
        places = torch.arange(round_up(n), device=ids.device)
        later = torch.where(places > places[:n, None], MASKED, 0.0).to(bias.dtype)  # (T, S)
        positions = (places[:n] - pads[:, None]).clamp(min=0)
        found = []
        size = max(1, 2**15 // n)
        for begin in range(0, len(ids), size):
            rows = slice(begin, begin + size)
            mask = bias[rows, :, :, : round_up(n)] + later  # (B, 1, T, S)
            found.append(self._hidden(ids[rows], positions[rows], rows, 0, mask)[:, -1])
        return torch.cat(found)

    def _hidden(self, ids: Tensor, positions: Tensor, rows: slice, at: int, mask: Tensor) -> Tensor:
        """Last hidden states (B, T, E) of tokens (B, T) that are cached from place `at` on; mask (B, 1, T, S)."""
        decoder, n, n_keys = self.model.decoder, ids.shape[1], mask.shape[-1]
        rotation = decoder.rotary(positions)  # type: ignore[misc]
        x = self.model.embed(ids)
        for block, (keys, values) in zip(decoder.blocks, self.cache, strict=True):
            q, k, v = block.attention.queries_keys_values(block.attention_norm(x))  # type: ignore[operator, union-attr]
            keys[rows, :, at : at + n] = rotation(k)
            values[rows, :, at : at + n] = v
            heads = attend(rotation(q), keys[rows, :, :n_keys], values[rows, :, :n_keys], mask)
            x = x + block.attention.output(heads)  # type: ignore[operator, union-attr]
            x = x + block.feedforward(block.feedforward_norm(x))  # type: ignore[operator]
        return decoder.norm(x)  # type: ignore[misc, no-any-return]

    def _draw(self, hidden: Tensor, heat: Tensor) -> Tensor:
        """A token for each row (B,) of last hidden states (B, E) at its temperature (B, 1): argmax of p / Exp(1) is a
        draw from p."""
        p = (self.model.head(hidden).float() / heat).softmax(-1)  # (B, V)
        p.masked_fill_(p < self.min_p * p.amax(-1, keepdim=True), 0)
        return p.div_(torch.empty_like(p).exponential_()).argmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of queries (B, H, T, D) to (B, G, S, D), as (B, T, H·D). In decoding, the queries that share a head of
    keys are its rows, so that nothing is copied."""
    n_rows, n_heads, n, d_head = q.shape
    groups = n_heads // k.shape[1]
    if n == 1:
        out = F.scaled_dot_product_attention(q.reshape(n_rows, k.shape[1], groups, d_head), k, v, mask)
        return out.reshape(n_rows, 1, n_heads * d_head)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def round_up(n: int) -> int:
    """The next multiple of TILE."""
    return -(-n // TILE) * TILE
