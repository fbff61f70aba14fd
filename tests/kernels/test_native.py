"""Our kernels' attention against PyTorch's, and what happens where there are no kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from heedful.kernels.cpu import native

needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="our kernels need Linux, AVX-512 with VNNI and BF16, and a C compiler"
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_kernels
@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("n_heads, n_groups", [(6, 6), (6, 2), (4, 1)])
def test_attention_of_one_token_is_attention(size, n_heads, n_groups):
    n_rows, n_keys = 3, 37
    q = numbers(n_rows, 1, 3 * n_heads * size)[..., : n_heads * size].unflatten(-1, (n_heads, size))
    q = q.transpose(1, 2)  # as a layer has it: a view of a wider product
    k = numbers(n_rows + 1, n_groups, 50, size, seed=1)[:n_rows, :, :n_keys]  # and a part of a larger cache
    v = numbers(n_rows + 1, n_groups, 50, size, seed=2)[:n_rows, :, :n_keys]
    lengths = torch.tensor([37, 1, 20])
    ragged = (torch.arange(n_keys) < lengths[:, None])[:, None, None]
    window = (torch.arange(n_keys) > 30)[None, None, None]
    bias = numbers(1, n_heads, 1, n_keys, seed=3)
    with torch.no_grad():
        assert native.attends(q, k, v)
        for mask in None, ragged, window:
            for add in None, bias, bias[:, :1].expand(n_rows, n_heads, 1, n_keys):
                for scale in None, 1.0:
                    both = mask if add is None else add if mask is None else torch.where(mask, add, -torch.inf)
                    exact = [t if t is None or t.dtype == torch.bool else t.double() for t in (q, k, v, both)]
                    theirs = F.scaled_dot_product_attention(*exact, scale=scale, enable_gqa=True)
                    ours = native.attend_one(q, k, v, mask, add, scale)
                    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5


@needs_kernels
def test_attention_of_large_scores_stays_finite():
    q, k, v = 100 * numbers(1, 2, 1, 64), 100 * numbers(1, 2, 9, 64, seed=1), numbers(1, 2, 9, 64, seed=2)
    with torch.no_grad():
        ours = native.attend_one(q, k, v, None, None, None)
        assert (ours - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-5


@needs_kernels
def test_what_kernels_cannot_do_is_left_to_pytorch():
    q = numbers(1, 2, 1, 64)
    with torch.no_grad():
        assert native.attends(q, q, q)
        assert not native.attends(q[..., :24], q[..., :24], q[..., :24])  # no multiple of 16
        assert not native.attends(q.double(), q.double(), q.double())
        assert not native.attends(q.expand(1, 2, 3, 64), q, q)
    assert not native.attends(q, q, q)  # with gradients


PROGRAM = """
import torch
from heedful.kernels.cpu import native
from heedful.kernels import packed
weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
kinds = [type(packed.product(weight, None, kind)).__name__ for kind in packed.PLAIN]
print(native.library() is not None, *kinds)
"""


def ask(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_without_kernels_pytorch_does_the_work():
    assert ask(HEEDFUL_KERNELS="0")[0] == "False"
    assert ask(HEEDFUL_KERNELS="0")[1] in ("OneDnn", "Plain")
    assert ask(CC="/no/such/compiler", PATH="/nowhere")[0] == "False"


@needs_kernels
def test_kernels_are_compiled_once(tmp_path):
    assert ask(XDG_CACHE_HOME=str(tmp_path))[1] == "Float32Panels"
    (made,) = (tmp_path / "heedful").iterdir()
    before = made.stat().st_mtime_ns
    assert ask(XDG_CACHE_HOME=str(tmp_path))[0] == "True"
    assert [made] == list((tmp_path / "heedful").iterdir()) and made.stat().st_mtime_ns == before


@needs_kernels
def test_without_a_place_for_them_kernels_still_run():
    assert ask(XDG_CACHE_HOME="/proc/no/such/folder")[0] == "True"


@needs_kernels
@pytest.mark.parametrize("n_tokens", [5, 256, 1000, 50257])
def test_the_highest_is_the_first_of_its_equals(n_tokens):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 9, (6, n_tokens), generator=draw).float()
    logits[1] = -torch.inf
    logits[2, -1] = 99
    logits[3, n_tokens // 2] = torch.nan
    values, places = native.highest(logits)
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
    tops, _ = native.highest(logits)
    cuts, lasts = native.nucleus(logits, tops, heat, share)
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
    found = native.masses(logits, tops, heat, (cuts, lasts))
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-5 * want.max())
