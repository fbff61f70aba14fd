"""Argmax and top-p kernels against a stable sort."""

from __future__ import annotations

import pytest
import torch

from heedful.kernels.cpu.library import library
from heedful.kernels.cpu.sampling import page_masses, row_argmax, top_p_cutoff

needs_kernels = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")


@needs_kernels
@pytest.mark.parametrize("n_tokens", [5, 256, 1000, 50257])
def test_the_highest_is_the_first_of_its_equals(n_tokens):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 9, (6, n_tokens), generator=draw).float()
    logits[1] = -torch.inf
    logits[2, -1] = 99
    logits[3, n_tokens // 2] = torch.nan
    values, places = row_argmax(logits)
    assert values[[0, 1, 2, 4, 5]].tolist() == logits.max(-1).values[[0, 1, 2, 4, 5]].tolist()
    assert values[3].isnan()
    for row in 0, 1, 2, 4, 5:
        assert places[row] == (logits[row] == values[row]).nonzero()[0, 0]


@needs_kernels
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("heat", [0.5, 1.0, 3.0])
def test_a_nucleus_is_that_of_a_stable_sort(share, heat):
    """Rows from flat to sharp, with many equals; what is left has the mass, and would not with one fewer."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 3001, generator=draw) * torch.linspace(0, 6, 8)[:, None]
    logits[3] = logits[3].round()
    logits[4, ::2] = -torch.inf
    tops, _ = row_argmax(logits)
    cuts, lasts = top_p_cutoff(logits, tops, heat, share)
    shares = (logits.double() * heat).softmax(-1)
    _, order = logits.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(3001)
    for row in range(8):
        kept = (logits[row] > cuts[row]) | ((logits[row] == cuts[row]) & (places <= lasts[row]))
        n = int(kept.sum())
        assert kept[order[row, :n]].all()
        mass = shares[row, order[row, :n]].sum()
        assert n == 1 or mass - shares[row, order[row, n - 1]] < share + 1e-5
        assert mass > share - 1e-5
    kept = (logits > cuts[:, None]) | ((logits == cuts[:, None]) & (places <= lasts[:, None]))
    want = (shares * kept / shares.amax(-1, keepdim=True)).float()
    want = torch.nn.functional.pad(want, (0, -3001 % 256)).unflatten(1, (-1, 256)).sum(-1)
    found = page_masses(logits, tops, heat, (cuts, lasts))
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-5 * want.max())
