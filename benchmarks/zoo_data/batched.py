"""Sampling from a LLaMA for thousands of prompts at once, on a GPU.

Rows of a batch begin together, padded on the left, so that every step writes one place of a static KV cache. Rows that
have ended are taken out from time to time, and the cache is compacted. A step is some 900 launches, which cost more
than the work itself; so it is a CUDA graph, for each number of rows and of keys (multiples of ROWS and KEYS). Tokens
are drawn at a temperature from those with at least MIN_P times the best one's probability (min-p, Nguyen et al. 2024),
which needs no sorting.

    B rows, T new positions, S cached positions, H query heads, G key/value heads, D head size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.models.llama import Llama

MASKED = -30000.0  # added to a score: finite, so that a row of padding alone has no NaN
TILE = 16  # keys are attended to in multiples of this
KEYS, ROWS = 64, 256  # graphs are for multiples of these
CHECK = 16  # steps between looks at which rows have ended
FEWEST = 0.05  # of the rows of a batch: so few are given up, they are the longest
Stored = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


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
        self.masks = torch.zeros(n_cached, dtype=like.dtype, device=like.device)
        most = n_cached // TILE
        self.at = torch.zeros(1, dtype=torch.long, device=like.device)  # the place in the cache of the next token
        self.i = torch.zeros(1, dtype=torch.long, device=like.device)  # the same, in what is written
        self.tokens = torch.zeros(most, dtype=torch.long, device=like.device)
        self.positions = torch.zeros(most, 1, dtype=torch.long, device=like.device)
        self.heat = torch.ones(most, 1, device=like.device)
        self.written = torch.zeros(most, longest, dtype=torch.long, device=like.device)
        self.graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph | None] = {}

    def capacity(self, longest_prompt: int) -> int:
        """The places in the cache that a row takes."""
        return round_up(longest_prompt + self.longest)

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]], temperatures: list[float], longest_prompt: int = 0) -> list[list[int]]:
        """The ids of an answer to each prompt, with the end where it came to one. Batches with the same
        `longest_prompt` have the same graphs."""
        device, n = self.pool.device, max(longest_prompt, *map(len, prompts))
        n_prompts, capacity = len(prompts), self.capacity(n)
        n_rows = min(round_up(n_prompts, ROWS), self.n_cached // capacity)
        assert n_prompts <= n_rows, "more rows than the cache has room for"
        fill = n_rows - n_prompts  # rows that are there for the graph alone
        prompts, temperatures = prompts + prompts[:1] * fill, temperatures + [1.0] * fill
        pads = torch.tensor([n - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([[self.end] * (n - len(prompt)) + prompt for prompt in prompts], device=device)
        bias = self._mask(n_rows, capacity)
        bias.fill_(MASKED)
        bias[:, 0, 0, :n].masked_fill_(torch.arange(n, device=device) >= pads[:, None], 0)
        self.heat[:n_rows, 0] = torch.tensor(temperatures, device=device)
        self.positions[:n_rows, 0] = n - pads
        self.at.fill_(n)
        self.i.fill_(1)
        self.tokens[:n_rows] = self._draw(self._prefill(ids, pads, bias), self.heat[:n_rows])
        self.written[:n_rows] = self.end
        self.written[:n_rows, 0] = self.tokens[:n_rows]
        owners = torch.arange(n_rows, device=device).masked_fill_(torch.arange(n_rows, device=device) >= n_prompts, -1)
        answers: list[list[int]] = [[] for _ in range(n_prompts)]
        for i in range(1, self.longest):
            self._step(len(owners), capacity, min(round_up(n + i, KEYS), capacity))
            if i % CHECK and i + 1 < self.longest:
                continue
            going = ~(self.written[: len(owners), : i + 1] == self.end).any(1) & (owners >= 0)
            n_going = int(going.sum())
            last = n_going <= FEWEST * n_prompts or i + 1 == self.longest
            fewer = min(round_up(n_going, ROWS), len(owners))
            if fewer > 0.85 * len(owners) and not last:
                continue
            done = (owners >= 0 if last else ~going & (owners >= 0)).nonzero()[:, 0]
            for owner, row in zip(owners[done].tolist(), self.written[done, : i + 1].tolist(), strict=True):
                answers[owner] = row[: row.index(self.end) + 1] if self.end in row else row
            if last:
                break
            kept = torch.sort(going, descending=True, stable=True).indices[:fewer].sort().values
            self._compact(kept, len(owners), capacity, n + i)
            owners = owners.masked_fill(~going, -1)[kept]
        return answers

    def _cached(self, layer: int, n_rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, capacity, D) of a layer."""
        size = n_rows * capacity * self.n_kv_heads * self.d_head
        keys, values = self.pool[layer, :, :size].view(2, n_rows, self.n_kv_heads, capacity, self.d_head)
        return keys, values

    def _mask(self, n_rows: int, capacity: int) -> Tensor:
        """What is added to scores (B, 1, 1, capacity)."""
        return self.masks[: n_rows * capacity].view(n_rows, 1, 1, capacity)

    def _compact(self, kept: Tensor, n_rows: int, capacity: int, n: int) -> None:
        """Move the rows that go on to the front, with the first `n` places of their cache."""
        for layer in range(len(self.pool)):
            for x in self._cached(layer, n_rows, capacity):
                x[: len(kept), :, :n] = x[kept, :, :n]
        mask = self._mask(n_rows, capacity)
        for x in (mask, self.tokens, self.positions, self.heat, self.written):
            x[: len(kept)] = x[kept]

    def _prefill(self, ids: Tensor, pads: Tensor, bias: Tensor) -> Tensor:
        """The last hidden states (B, E) of the prompts (B, T), some rows at a time."""
        n_rows, n = ids.shape
        places = torch.arange(round_up(n), device=ids.device)
        later = torch.where(places > places[:n, None], MASKED, 0.0).to(bias.dtype)  # (T, S)
        positions = (places[:n] - pads[:, None]).clamp(min=0)
        found = []
        size = max(1, 2**16 // n)
        for begin in range(0, n_rows, size):
            rows = slice(begin, begin + size)
            mask = bias[rows, :, :, : round_up(n)] + later  # (B, 1, T, S)

            def store(layer: int, k: Tensor, v: Tensor, rows: slice = rows) -> tuple[Tensor, Tensor]:
                keys, values = self._cached(layer, n_rows, bias.shape[-1])
                keys[rows, :, :n], values[rows, :, :n] = k, v
                return keys[rows, :, : round_up(n)], values[rows, :, : round_up(n)]

            found.append(self._hidden(ids[rows], positions[rows], mask, store)[:, -1])
        return torch.cat(found)

    def _step(self, n_rows: int, capacity: int, n_keys: int) -> None:
        """A token for each row; the first time as it is, then as a graph."""
        key = (n_rows, capacity, n_keys)
        if self.pool.device.type != "cuda" or key not in self.graphs:
            self.graphs.setdefault(key)
            return self._decode(*key)
        graph = self.graphs[key]
        if graph is None:
            graph = self.graphs[key] = torch.cuda.CUDAGraph()
            pool = next((g.pool() for g in self.graphs.values() if g is not None and g is not graph), None)
            with torch.cuda.graph(graph, pool=pool):
                self._decode(*key)
        graph.replay()

    def _decode(self, n_rows: int, capacity: int, n_keys: int) -> None:
        def store(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self._cached(layer, n_rows, capacity)
            keys.index_copy_(2, self.at, k)
            values.index_copy_(2, self.at, v)
            return keys[:, :, :n_keys], values[:, :, :n_keys]

        bias = self._mask(n_rows, capacity)
        bias.index_fill_(3, self.at, 0)
        hidden = self._hidden(self.tokens[:n_rows, None], self.positions[:n_rows], bias[..., :n_keys], store)
        self.tokens[:n_rows] = self._draw(hidden[:, 0], self.heat[:n_rows])
        self.written[:n_rows].index_copy_(1, self.i, self.tokens[:n_rows, None])
        self.positions[:n_rows] += 1
        self.at += 1
        self.i += 1

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor, store: Stored) -> Tensor:
        """Last hidden states (B, T, E) of tokens (B, T), whose keys and values are stored; mask (B, 1, T, S)."""
        decoder = self.model.decoder
        rotation = decoder.rotary(positions)  # type: ignore[misc]
        x = self.model.embed(ids)
        for layer, block in enumerate(decoder.blocks):
            q, k, v = block.attention.queries_keys_values(block.attention_norm(x))  # type: ignore[operator, union-attr]
            keys, values = store(layer, rotation(k), v)
            x = x + block.attention.output(attend(rotation(q), keys, values, mask))  # type: ignore[operator, union-attr]
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


def round_up(n: int, tile: int = TILE) -> int:
    """The next multiple of `tile`."""
    return -(-n // tile) * tile
