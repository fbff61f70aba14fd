"""Finding the few tokens that matter in a large vocabulary without sorting it, and drawing one of them.

Speed is why this is more than `topk`, `sort` and `multinomial`: each step of generation does it for every row, and a
sort of 50,000 logits takes as long as a small model's step. A row's result does not depend on the other rows.

B rows, V vocabulary, M a part of it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heedful.kernels.cpu.sampling import page_masses, row_argmax, supports_logits, top_p_cutoff

FEW = 256  # so many tokens are tried first, where mass decides
BLOCK = 32  # tokens that are judged together by their highest: faster than to look at each
LEVELS, LEVELS_PER_NAT = 4096, 64  # see `fewest`
PAGE_BITS, PAGE = 8, 256  # ids that share their high bits; their masses are summed before one page is opened


def highest_of(logits: Tensor) -> tuple[list[float], list[int]]:
    """The highest logit of each row and the first token that has it; NaN where there is one."""
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


def leading(key: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Places (B, M), ascending, and keys of the n greatest of each row, of their equals, and perhaps of some more.

    Where n blocks have a token of some height, n tokens are that high: so the n-th highest of the blocks' maxima is a
    bound, and what lies above it is found in the blocks that reach it. Rows with fewer are filled up with -inf.
    """
    n_tokens = key.shape[-1]
    n_blocks = n_tokens // BLOCK
    if n >= n_tokens:
        return torch.arange(n_tokens, device=key.device).expand_as(key), key
    if n > n_blocks:
        return _at_least(key, key.topk(n).values[:, -1:])
    blocks = key[:, : n_blocks * BLOCK].unflatten(-1, (n_blocks, BLOCK))
    highest = blocks.amax(-1)  # (B, n_blocks)
    bound = highest.topk(n).values[:, -1:]
    chosen, heights = _at_least(highest, bound)  # (B, N)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))  # (B, N, BLOCK)
    inside = inside.masked_fill(heights[..., None] == -torch.inf, -torch.inf).flatten(1)
    inside = torch.cat([inside, key[:, n_blocks * BLOCK :]], -1)  # with those that fill no block
    at, keys = _at_least(inside, bound)
    chosen = torch.cat([chosen, torch.full_like(chosen[:, :1], n_blocks)], -1)
    return chosen.gather(1, at // BLOCK) * BLOCK + at % BLOCK, keys


def _at_least(key: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Places, ascending, and keys of what reaches the bound; shorter rows end with the last place and -inf."""
    inside = (key >= bound) & (key > -torch.inf)
    rows, at = inside.nonzero(as_tuple=True)
    counts = inside.sum(-1)
    within = torch.arange(len(rows), device=key.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(key), max(1, int(counts.max())))
    places = torch.full(shape, key.shape[-1] - 1, device=key.device)
    places[rows, within] = at
    keys = torch.full(shape, -torch.inf, device=key.device, dtype=key.dtype)
    keys[rows, within] = key[rows, at]
    return places, keys


def fewest(key: Tensor, probabilities: Tensor, mass: float) -> Tensor:
    """Which tokens to keep (B, V): in the order of their keys, greatest first, until they have the mass.

    The first few hundred are sorted. Where they are not enough, the tokens are counted out into levels by their key,
    whole levels are kept as long as they fit, and only the level at the border is sorted.
    """
    keep, reached = _until(*leading(key, FEW), probabilities, mass)
    short = (reached < mass).nonzero()[:, 0]
    if FEW >= key.shape[-1] or not len(short):
        return keep
    key, probabilities = key[short], probabilities[short]
    distance = key.amax(-1, keepdim=True) - key
    level = (distance * LEVELS_PER_NAT).clamp_(max=LEVELS - 1).long()  # (B, V)
    masses = distance.new_zeros(len(key), LEVELS, dtype=torch.float64)
    masses.scatter_add_(1, level, probabilities.double())
    before = masses.cumsum(-1) - masses
    border = (before < mass).sum(-1, keepdim=True) - 1  # (B, 1)
    inside = key.masked_fill(level != border, -torch.inf)
    places, keys = _at_least(inside, inside.new_full((1,), -torch.inf))
    some, _ = _until(places, keys, probabilities, mass - before.gather(1, border))
    keep[short] = some | (level < border)
    return keep


def _until(places: Tensor, keys: Tensor, probabilities: Tensor, mass: Tensor | float) -> tuple[Tensor, Tensor]:
    """Marks (B, V) as many of the places, greatest key first, as it takes to have the mass; and how much they have."""
    keys, order = keys.sort(descending=True, stable=True)
    places = places.gather(1, order)
    shares = probabilities.gather(1, places).double().masked_fill(keys == -torch.inf, 0)
    reached = shares.cumsum(-1)
    kept = (reached - shares < mass) & (shares > 0)
    kept[:, 0] = True
    rows, at = kept.nonzero(as_tuple=True)
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    keep[rows, places[rows, at]] = True
    return keep, reached[:, -1]


def bits_of(n_tokens: int) -> int:
    """How many numbers `draw` needs for one token."""
    return max(PAGE_BITS, (n_tokens - 1).bit_length())


def draw(logits: Tensor, numbers: Sequence[Sequence[float]], places: Tensor | None = None) -> list[int]:
    """One id per row by its numbers; `places` are the columns' ids where they are not the whole vocabulary."""
    probabilities = logits.softmax(-1)
    if places is not None:
        ids = places.tolist()
        return [
            row[_descend(row, end, number)] for row, end, number in zip(ids, _ends(probabilities), numbers, strict=True)
        ]
    n_pages = logits.shape[-1] // PAGE
    whole = probabilities[:, : n_pages * PAGE].unflatten(-1, (n_pages, PAGE)).sum(-1)
    rest = probabilities[:, n_pages * PAGE :].sum(-1, keepdim=True)
    masses = torch.cat([whole, rest], -1)  # (B, n_pages + 1)
    return _by_pages(masses, logits.shape[-1], numbers, lambda at: probabilities.gather(1, at))


def draw_heated(
    logits: Tensor,
    highest: Sequence[float],
    temperature: float,
    top_p: float,
    numbers: Sequence[Sequence[float]],
) -> list[int]:
    """What `draw` does with logits over a temperature and cut to their nucleus, where our kernels can read them: only
    of the page that is drawn from are single probabilities computed."""
    tops, heat = torch.tensor(highest), 1 / max(temperature, 1e-30)
    kept = top_p_cutoff(logits, tops, heat, top_p) if top_p < 1 else None

    def inside(at: Tensor) -> Tensor:
        x = logits.gather(1, at)
        shares = ((x - tops[:, None]) * heat).exp()
        if kept is None:
            return shares
        cut, last = kept[0][:, None], kept[1][:, None]
        return shares.masked_fill((x < cut) | ((x == cut) & (at > last)), 0)

    return _by_pages(page_masses(logits, tops, heat, kept), logits.shape[-1], numbers, inside)


def _by_pages(
    masses: Tensor, n_tokens: int, numbers: Sequence[Sequence[float]], inside: Callable[[Tensor], Tensor]
) -> list[int]:
    """First a page by its mass (B, pages), then an id in it: `inside` tells the masses of ids (B, PAGE)."""
    pages = [
        _descend(range(masses.shape[1]), ends, number[:-PAGE_BITS])
        for ends, number in zip(_ends(masses), numbers, strict=True)
    ]
    first = torch.tensor(pages, device=masses.device)[:, None] * PAGE
    at = first + torch.arange(PAGE, device=masses.device)  # (B, PAGE)
    shares = inside(at.clamp(max=n_tokens - 1)).masked_fill(at >= n_tokens, 0)
    return [
        page * PAGE + _descend(range(PAGE), ends, number[-PAGE_BITS:])
        for page, ends, number in zip(pages, _ends(shares), numbers, strict=True)
    ]


def _descend(ids: Sequence[int], ends: Sequence[float], numbers: Sequence[float]) -> int:
    """Draws one of `ids` (ascending; ends[i] is the mass of the first i + 1) bit by bit. Returns where it stands."""
    low, high, below, prefix = 0, len(ids), 0.0, 0
    for bit, number in zip(reversed(range(len(numbers))), numbers, strict=True):
        if high - low == 1:
            break
        middle = bisect_left(ids, prefix + (1 << bit), low, high)
        above, mid = ends[high - 1], ends[middle - 1] if middle else 0.0
        if above > mid and number * (above - below) >= mid - below:
            low, below, prefix = middle, mid, prefix + (1 << bit)
        else:
            high = middle
    return low


def _ends(masses: Tensor) -> list[list[float]]:
    """Cumulated in double precision, so that the sums add no error of their own."""
    return masses.double().cumsum(-1).tolist()
