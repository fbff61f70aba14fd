"""Single-query attention against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heedful.kernels.cpu.attention import single_query_attention, supports_single_query
from heedful.kernels.cpu.library import library

needs_kernels = pytest.mark.skipif(library() is None, reason="the C kernels do not run here; `heedful info` says why")


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
        assert supports_single_query(q, k, v)
        for mask in None, ragged, window:
            for add in None, bias, bias[:, :1].expand(n_rows, n_heads, 1, n_keys):
                for scale in None, 1.0:
                    both = mask if add is None else add if mask is None else torch.where(mask, add, -torch.inf)
                    exact = [t if t is None or t.dtype == torch.bool else t.double() for t in (q, k, v, both)]
                    theirs = F.scaled_dot_product_attention(*exact, scale=scale, enable_gqa=True)
                    ours = single_query_attention(q, k, v, mask, add, scale)
                    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5


@needs_kernels
def test_attention_of_large_scores_stays_finite():
    q, k, v = 100 * numbers(1, 2, 1, 64), 100 * numbers(1, 2, 9, 64, seed=1), numbers(1, 2, 9, 64, seed=2)
    with torch.no_grad():
        ours = single_query_attention(q, k, v, None, None, None)
        assert (ours - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-5


@needs_kernels
def test_what_kernels_cannot_do_is_left_to_pytorch():
    q = numbers(1, 2, 1, 64)
    with torch.no_grad():
        assert supports_single_query(q, q, q)
        assert not supports_single_query(q[..., :24], q[..., :24], q[..., :24])  # no multiple of 16
        assert not supports_single_query(q.double(), q.double(), q.double())
        assert not supports_single_query(q.expand(1, 2, 3, 64), q, q)
    assert not supports_single_query(q, q, q)  # with gradients
