"""Position encodings.

Added to the embedding: `Sinusoidal` (Vaswani et al. 2017, section 3.5), `Learned`. Rotating queries and keys:
`Rotary` (RoPE, Su et al. 2021), with the scalings that extend it past the trained length. Added to the attention
scores: `RelativeBias` (T5, Raffel et al. 2020, section 2.1), `Alibi` (Press et al. 2022).

    B batch, T target, S source, H heads, D head size, R rotated part of D, E model width
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful.nn.dtype import widest_float

Layout = Literal["halves", "interleaved"]


class Learned(nn.Module):
    """A learned vector per position, indexed by position + `offset` (RoBERTa, OPT)."""

    def __init__(self, max_len: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.max_len, self.offset = max_len, offset
        self.weight = nn.Parameter(torch.empty(max_len + offset, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """positions (...) -> (..., E)."""
        return nn.functional.embedding(positions + self.offset, self.weight)  # (..., E)


class Sinusoidal(nn.Module):
    """sin and cos of position / 10000^(2i/E): interleaved as in the paper, or all sines before all cosines (Marian)."""

    def __init__(self, d_model: int, *, layout: Layout = "interleaved") -> None:
        super().__init__()
        self.d_model, self.layout = d_model, layout

    def forward(self, positions: Tensor) -> Tensor:
        """positions (...) -> (..., E)."""
        pair = torch.arange(0, self.d_model, 2, device=positions.device, dtype=widest_float(positions.device))
        angles = positions[..., None] / 10000 ** (pair / self.d_model)  # (..., E/2)
        if self.layout == "halves":
            return torch.cat([angles.sin(), angles.cos()[..., : self.d_model // 2]], dim=-1).float()
        both = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return both[..., : self.d_model].float()  # (..., E)


@dataclass
class Rotation:
    """The cosines and sines of one pass, (B or 1, 1, T, R/2), for queries and keys."""

    cos: Tensor
    sin: Tensor
    layout: Layout

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first R dimensions of x (B, H, T, D); the others are unchanged."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        half = cos.shape[-1]
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.layout == "halves":
            a, b = rotated[..., :half], rotated[..., half:]
            parts = [a * cos - b * sin, b * cos + a * sin]
            return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


# The required keys of each kind of `rope_scaling`; the others have defaults.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


class Rotary(nn.Module):
    """RoPE: rotates pairs of dimensions by position x frequency; `scaling` is the `rope_scaling` of a hub config.

    `layout` is which dimensions form a pair: i with i + R/2 (LLaMA, NeoX) or 2i with 2i + 1 (GPT-J, the paper).
    `d_rotary` < head size rotates only the first dimensions (GPT-J, NeoX, Phi). `max_len` is the trained length
    unless `scaling` has it.
    """

    def __init__(
        self,
        d_rotary: int,
        *,
        theta: float = 10000.0,
        layout: Layout = "halves",
        scaling: Mapping[str, Any] | None = None,
        max_len: int = 0,
    ) -> None:
        super().__init__()
        if d_rotary % 2:
            raise ValueError(f"rotary positions need an even number of dimensions, not {d_rotary}")
        self.d_rotary, self.theta, self.layout = d_rotary, theta, layout
        self.scaling = {k: v for k, v in (scaling or {}).items() if v is not None}
        self.max_len = max_len
        self.kind = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        self._check()

    def _check(self) -> None:
        if self.kind not in SCALINGS:
            raise ValueError(f"rope scaling {self.kind!r} is not known: {', '.join(SCALINGS)} are")
        missing = [key for key in SCALINGS[self.kind] if key not in self.scaling]
        if missing:
            raise ValueError(f"rope scaling {self.kind!r} needs {', '.join(missing)}")
        for key in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(self.scaling[key]) != self.d_rotary // 2:
                given = len(self.scaling[key])
                raise ValueError(f"{key} has {given} numbers: {self.d_rotary // 2} pairs are rotated")
        try:
            frequency, factor = self.frequencies(1, torch.device("cpu"))
            sound = math.isfinite(factor) and bool((frequency.isfinite() & (frequency > 0)).all())
        except (TypeError, ValueError, ArithmeticError):
            sound = False
        if not sound:
            raise ValueError(f"rope scaling {self.scaling} gives no frequencies: its numbers are not sound")

    def _number(self, key: str, default: float) -> float:
        return float(self.scaling.get(key, default))

    @property
    def switch_length(self) -> int | None:
        """LongRoPE: the longest sequence that uses the short factors; None for the other kinds."""
        return self._trained if self.kind == "longrope" else None

    @property
    def _trained(self) -> int:
        return int(self._number("original_max_position_embeddings", self.max_len))

    def forward(self, positions: Tensor, lengths: int | Tensor = 0) -> Rotation:
        """The rotation at positions (B or 1, T).

        `lengths`, one number or (B or 1, T or 1), is the current length of each token's sequence (for LongRoPE).
        """
        frequency, factor = self.frequencies(lengths, positions.device)
        if frequency.ndim > 1:
            frequency = frequency[:, None]  # (B or 1, 1, T or 1, R/2)
        angles = positions[:, None, :, None].float() * frequency  # (B or 1, 1, T, R/2)
        return Rotation(angles.cos() * factor, angles.sin() * factor, self.layout)

    def frequencies(self, lengths: int | Tensor = 0, device: torch.device | None = None) -> tuple[Tensor, float]:
        """Frequencies in radians per position, (R/2), or (..., R/2) for LongRoPE with several `lengths` (...); and the
        attention factor, which multiplies cosines and sines."""
        pair = torch.arange(0, self.d_rotary, 2, device=device, dtype=torch.float32)
        frequency = 1.0 / self.theta ** (pair / self.d_rotary)
        if self.kind == "linear":
            return frequency / self._number("factor", 1.0), 1.0
        if self.kind == "llama3":
            return self._llama3(frequency), 1.0
        if self.kind == "yarn":
            return self._yarn(frequency)
        if self.kind == "longrope":
            return self._longrope(frequency, lengths)
        return frequency, 1.0

    def _llama3(self, frequency: Tensor) -> Tensor:
        """LLaMA 3.1: low frequencies are divided by `factor`, high ones unchanged, those between interpolated."""
        low, high = self._number("low_freq_factor", 1.0), self._number("high_freq_factor", 4.0)
        turns = self._trained * frequency / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequency / self._number("factor", 1.0) + blend * frequency

    def _yarn(self, frequency: Tensor) -> tuple[Tensor, float]:
        """YaRN (Peng et al. 2023): as llama3, interpolating linearly over dimensions, with an attention factor."""
        factor = self._number("factor", 1.0)

        def dimension(turns: float) -> float:  # the pair that makes this many turns over the trained length
            length = self._trained / (turns * 2 * math.pi)
            return self.d_rotary * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(self._number("beta_fast", 32)), dimension(self._number("beta_slow", 1))
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.d_rotary - 1)
        index = torch.arange(len(frequency), device=frequency.device, dtype=torch.float32)
        ramp = ((index - low) / (high - low or 0.001)).clamp(0, 1)
        scaled = frequency / factor * ramp + frequency * (1 - ramp)

        def mscale(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        both = self._number("mscale", 0), self._number("mscale_all_dim", 0)  # DeepSeek's two
        default = mscale(both[0]) / mscale(both[1]) if all(both) else mscale(1)
        return scaled, self._number("attention_factor", default)

    def _longrope(self, frequency: Tensor, lengths: int | Tensor) -> tuple[Tensor, float]:
        """LongRoPE (Ding et al. 2024), Phi-3: a divisor per pair, with a second set past the trained length."""
        device = frequency.device
        short, long = (torch.tensor(self.scaling[k], device=device) for k in SCALINGS["longrope"])
        is_long = (torch.as_tensor(lengths, device=device) > self._trained)[..., None]
        attention_factor = self.scaling.get("attention_factor")
        if attention_factor is None:
            factor = self._number("factor", self.max_len / self._trained)
            attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self._trained))
        return frequency / torch.where(is_long, long, short), float(attention_factor)


class RelativeBias(nn.Module):
    """T5: a learned bias per head and bucket of distances, added to the scores."""

    def __init__(self, n_heads: int, *, n_buckets: int = 32, max_distance: int = 128, bidirectional: bool) -> None:
        super().__init__()
        self.n_buckets, self.max_distance, self.bidirectional = (
            n_buckets,
            max_distance,
            bidirectional,
        )
        self.weight = nn.Parameter(torch.empty(n_buckets, n_heads))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions of queries (B or 1, T) and keys (S,) -> (B or 1, H, T, S)."""
        distance = keys - queries[..., None]  # (B or 1, T, S)
        return nn.functional.embedding(self.bucket(distance), self.weight).permute(0, 3, 1, 2)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance: half of them hold one distance each, the others are on a log scale."""
        n, offset = self.n_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            n //= 2
            offset = (distance > 0) * n
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = n // 2
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (n - exact)).long()).clamp(max=n - 1)
        return offset + torch.where(distance < exact, distance, far)


class Alibi(nn.Module):
    """ALiBi: a fixed slope per head times the (negative) distance to the key; no parameters, no longest length."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions of queries (B or 1, T) and keys (S,) -> (B or 1, H, T, S)."""
        distance = (keys - queries[..., None]).clamp(max=0)  # (B or 1, T, S)
        slopes = torch.tensor(self.slopes(self.n_heads), device=keys.device)
        return slopes[:, None, None] * distance[:, None]  # (B or 1, H, T, S)

    @classmethod
    def slopes(cls, n_heads: int) -> list[float]:
        """2^(-8i/n) for n a power of two; else those of the next lower, then every other one of the next higher."""
        power = 2 ** math.floor(math.log2(n_heads))
        first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        return first if power == n_heads else first + cls.slopes(2 * power)[0::2][: n_heads - power]
