"""Argmax, top-k, top-p and categorical sampling over a large vocabulary without sorting it.

Every decode step runs these for every row, and sorting 50,000 logits takes as long as the step of a small model. Each
function is written in PyTorch; `argmax` and `sample_top_p` use the C kernels where those support the logits. A row's
result does not depend on the other rows.

    B rows, V vocabulary, M candidate tokens
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heedful.kernels.cpu.sampling import page_masses, row_argmax, supports_logits, top_p_cutoff

SORTED_FIRST = 256  # candidates that `smallest_set` sorts before the others
BLOCK = 32  # tokens per block; block maxima are compared first
BUCKETS, BUCKETS_PER_NAT = 4096, 64  # see `smallest_set`
PAGE_BITS, PAGE = 8, 256  # a page is 256 ids with the same high bits: first a page is sampled, then an id in it


def argmax(logits: Tensor) -> tuple[list[float], list[int]]:
    """The highest logit of each row (B, V) and the first id that has it; NaN where a row has one."""
    if supports_logits(logits):
        values, ids = row_argmax(logits)
        return values.tolist(), ids.tolist()
    n_blocks = logits.shape[-1] // BLOCK
    if not n_blocks or logits.numel() < 2**14:
        values, ids = logits.max(-1)
        return values.tolist(), ids.tolist()
    rest = logits[:, n_blocks * BLOCK :]
    blocks = logits[:, : n_blocks * BLOCK].unflatten(-1, (n_blocks, BLOCK))
    values, block = blocks.amax(-1).max(-1)  # three times faster than logits.max(-1)
    ids = block * BLOCK + blocks[torch.arange(len(logits), device=logits.device), block].argmax(-1)
    if rest.shape[-1]:
        last, at = rest.max(-1)
        later = (last > values) | last.isnan()
        values, ids = torch.where(later, last, values), torch.where(later, at + n_blocks * BLOCK, ids)
    return values.tolist(), ids.tolist()


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, the highest shifted to 0 so that none overflows at low temperatures."""
    return (logits - logits.amax(-1, keepdim=True)).div_(max(temperature, 1e-30))


def mask_tokens(logits: Tensor, rows: Sequence[int], allowed: Tensor) -> None:
    """Set to -inf, in place, the logits (B, V) of these rows whose bit in `allowed` (rows, words) int32 is 0."""
    n_tokens, device = logits.shape[-1], logits.device
    words = allowed.to(device, non_blocking=True)[:, :, None]
    bits = (words >> torch.arange(32, dtype=torch.int32, device=device)).bitwise_and_(1)  # (rows, words, 32)
    # 0 or -inf, by 1 - 1 / bit: adding it takes a quarter of masked_fill's time
    bias = bits.flatten(1)[:, :n_tokens].float().reciprocal_().neg_().add_(1)
    if bias.shape[-1] < n_tokens:  # rows of the output matrix that no token has
        bias = torch.nn.functional.pad(bias, (0, n_tokens - bias.shape[-1]), value=-torch.inf)
    if len(rows) == len(logits):
        logits += bias
    else:
        logits[rows] += bias


# --- candidates ------------------------------------------------------------------------------------------------------


def top_candidates(key: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Ascending ids (B, M) and their keys (B, M) of at least the n greatest keys of each row (B, V), ties included.

    The n-th greatest block maximum is a lower bound of the n-th greatest key, so only blocks whose maximum reaches it
    are searched. Rows with fewer candidates are padded with -inf.
    """
    n_tokens = key.shape[-1]
    n_blocks = n_tokens // BLOCK
    if n >= n_tokens:
        return torch.arange(n_tokens, device=key.device).expand_as(key), key
    if n > n_blocks:
        return _at_least(key, key.topk(n).values[:, -1:])
    blocks = key[:, : n_blocks * BLOCK].unflatten(-1, (n_blocks, BLOCK))
    maxima = blocks.amax(-1)  # (B, n_blocks)
    bound = maxima.topk(n).values[:, -1:]
    chosen, heights = _at_least(maxima, bound)  # (B, N)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))  # (B, N, BLOCK)
    inside = inside.masked_fill(heights[..., None] == -torch.inf, -torch.inf).flatten(1)
    inside = torch.cat([inside, key[:, n_blocks * BLOCK :]], -1)  # and the tokens after the last full block
    at, keys = _at_least(inside, bound)
    chosen = torch.cat([chosen, torch.full_like(chosen[:, :1], n_blocks)], -1)
    return chosen.gather(1, at // BLOCK) * BLOCK + at % BLOCK, keys


def _at_least(key: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending ids and keys of the keys >= bound; shorter rows are padded with the last id and -inf."""
    inside = (key >= bound) & (key > -torch.inf)
    rows, at = inside.nonzero(as_tuple=True)
    counts = inside.sum(-1)
    within = torch.arange(len(rows), device=key.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(key), max(1, int(counts.max())))
    ids = torch.full(shape, key.shape[-1] - 1, device=key.device)
    ids[rows, within] = at
    keys = torch.full(shape, -torch.inf, device=key.device, dtype=key.dtype)
    keys[rows, within] = key[rows, at]
    return ids, keys


def smallest_set(key: Tensor, probabilities: Tensor, mass: float) -> Tensor:
    """Mask (B, V) of the fewest tokens, in descending order of their keys, whose probabilities sum to `mass` (top-p).

    The first few hundred are sorted. Where they do not suffice, tokens are put into buckets by key, whole buckets are
    included until the next would exceed the mass, and only that one is sorted.
    """
    keep, reached = _mask_until(*top_candidates(key, SORTED_FIRST), probabilities, mass)
    short = (reached < mass).nonzero()[:, 0]
    if SORTED_FIRST >= key.shape[-1] or not len(short):
        return keep
    key, probabilities = key[short], probabilities[short]
    distance = key.amax(-1, keepdim=True) - key
    bucket = (distance * BUCKETS_PER_NAT).clamp_(max=BUCKETS - 1).long()  # (B, V)
    masses = distance.new_zeros(len(key), BUCKETS, dtype=torch.float64)
    masses.scatter_add_(1, bucket, probabilities.double())
    before = masses.cumsum(-1) - masses
    border = (before < mass).sum(-1, keepdim=True) - 1  # (B, 1)
    inside = key.masked_fill(bucket != border, -torch.inf)
    ids, keys = _at_least(inside, inside.new_full((1,), -torch.inf))
    some, _ = _mask_until(ids, keys, probabilities, mass - before.gather(1, border))
    keep[short] = some | (bucket < border)
    return keep


def _mask_until(ids: Tensor, keys: Tensor, probabilities: Tensor, mass: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mask (B, V) of the fewest ids, greatest key first, that reach the mass; and the total mass of the ids."""
    keys, order = keys.sort(descending=True, stable=True)
    ids = ids.gather(1, order)
    shares = probabilities.gather(1, ids).double().masked_fill(keys == -torch.inf, 0)
    reached = shares.cumsum(-1)
    kept = (reached - shares < mass) & (shares > 0)
    kept[:, 0] = True
    rows, at = kept.nonzero(as_tuple=True)
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    keep[rows, ids[rows, at]] = True
    return keep, reached[:, -1]


def keep_smallest_set(logits: Tensor, key: Tensor, probabilities: Tensor, mass: float) -> Tensor:
    """Logits (..., V) with -inf outside the `smallest_set` of that mass."""
    shape = (-1, logits.shape[-1])
    kept = smallest_set(key.reshape(shape), probabilities.reshape(shape), mass)
    return logits.masked_fill(~kept.view_as(logits), -torch.inf)


# --- sampling --------------------------------------------------------------------------------------------------------


def n_uniforms(n_tokens: int) -> int:
    """Number of uniform random numbers needed to sample one of `n_tokens` ids: one per bit of the id."""
    return max(PAGE_BITS, (n_tokens - 1).bit_length())


def sample_categorical(logits: Tensor, uniforms: Sequence[Sequence[float]], ids: Tensor | None = None) -> list[int]:
    """Sample one id per row from softmax(logits), using the row's uniform random numbers.

    Logits are (B, V), or (B, M) for the tokens `ids` (B, M).
    """
    probabilities = logits.softmax(-1)
    if ids is not None:
        rows = zip(ids.tolist(), _cumulative(probabilities), uniforms, strict=True)
        return [row[_sample_bits(row, ends, numbers)] for row, ends, numbers in rows]
    n_pages = logits.shape[-1] // PAGE
    full = probabilities[:, : n_pages * PAGE].unflatten(-1, (n_pages, PAGE)).sum(-1)
    rest = probabilities[:, n_pages * PAGE :].sum(-1, keepdim=True)
    masses = torch.cat([full, rest], -1)  # (B, n_pages + 1)
    return _sample_by_pages(masses, logits.shape[-1], uniforms, lambda at: probabilities.gather(1, at))


def sample_top_p(
    logits: Tensor, maxima: Sequence[float], temperature: float, top_p: float, uniforms: Sequence[Sequence[float]]
) -> list[int]:
    """Sample one id per row from the top-p set of softmax(logits / temperature); `maxima` has the rows' maxima."""
    if not supports_logits(logits):
        scaled = apply_temperature(logits, temperature)
        if top_p < 1:
            scaled = keep_smallest_set(scaled, scaled, scaled.softmax(-1), top_p)
        return sample_categorical(scaled, uniforms)
    tops, inverse = torch.tensor(maxima), 1 / max(temperature, 1e-30)
    cutoff = top_p_cutoff(logits, tops, inverse, top_p) if top_p < 1 else None

    def masses_of(at: Tensor) -> Tensor:  # unnormalized probabilities of ids, needed for the sampled page only
        x = logits.gather(1, at)
        shares = ((x - tops[:, None]) * inverse).exp()
        if cutoff is None:
            return shares
        lowest, last = cutoff[0][:, None], cutoff[1][:, None]
        return shares.masked_fill((x < lowest) | ((x == lowest) & (at > last)), 0)

    return _sample_by_pages(page_masses(logits, tops, inverse, cutoff), logits.shape[-1], uniforms, masses_of)


def _sample_by_pages(
    masses: Tensor, n_tokens: int, uniforms: Sequence[Sequence[float]], masses_of: Callable[[Tensor], Tensor]
) -> list[int]:
    """Sample a page by its mass (B, pages), then an id in it; `masses_of` gives the masses of ids (B, PAGE)."""
    pages = [
        _sample_bits(range(masses.shape[1]), ends, numbers[:-PAGE_BITS])
        for ends, numbers in zip(_cumulative(masses), uniforms, strict=True)
    ]
    first = torch.tensor(pages, device=masses.device)[:, None] * PAGE
    at = first + torch.arange(PAGE, device=masses.device)  # (B, PAGE)
    shares = masses_of(at.clamp(max=n_tokens - 1)).masked_fill(at >= n_tokens, 0)
    return [
        page * PAGE + _sample_bits(range(PAGE), ends, numbers[-PAGE_BITS:])
        for page, ends, numbers in zip(pages, _cumulative(shares), uniforms, strict=True)
    ]


def _sample_bits(ids: Sequence[int], ends: Sequence[float], uniforms: Sequence[float]) -> int:
    """Sample one of the ascending `ids` bit by bit, highest bit first; ends[i] is the mass of the first i + 1.

    Returns its index in `ids`.
    """
    low, high, below, prefix = 0, len(ids), 0.0, 0
    for bit, number in zip(reversed(range(len(uniforms))), uniforms, strict=True):
        if high - low == 1:
            break
        middle = bisect_left(ids, prefix + (1 << bit), low, high)
        above, mid = ends[high - 1], ends[middle - 1] if middle else 0.0
        if above > mid and number * (above - below) >= mid - below:
            low, below, prefix = middle, mid, prefix + (1 << bit)
        else:
            high = middle
    return low


def _cumulative(masses: Tensor) -> list[list[float]]:
    """Cumulative sums in float64, to avoid rounding errors."""
    return masses.double().cumsum(-1).tolist()
