"""A mask is what its words say: compared with a matrix made by a loop over every query and key."""

import pytest
import torch

from heedful.nn.mask import Mask, positions_in_documents


def allowed(mask, window=None, *, n_rows=1):
    """What `dense` says, as one matrix per row; None means everything."""
    dense = mask.dense(window)
    if dense is None:
        dense = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return dense[:, 0].expand(max(n_rows, len(dense)), mask.n_queries, mask.n_keys)


def by_loop(n_rows, n_queries, n_keys, rule):
    """rule(row, query, key) -> may it look?"""
    cells = [
        [[rule(b, q, k) for k in range(n_keys)] for q in range(n_queries)] for b in range(n_rows)
    ]  # fmt: skip
    return torch.tensor(cells)


def test_causal():
    assert torch.equal(allowed(Mask(5, 5, causal=True)), torch.ones(1, 5, 5).tril().bool())


def test_bidirectional_hides_nothing():
    assert Mask(3, 5, causal=False).dense() is None


@pytest.mark.parametrize("window", [1, 2, 4, 7, 9])
def test_window(window):
    want = by_loop(1, 7, 7, lambda b, q, k: 0 <= q - k < window)
    assert torch.equal(allowed(Mask(7, 7, causal=True), window), want)


def test_windows_of_one_mask_do_not_mix():
    mask = Mask(6, 6, causal=True)
    counts = [int(allowed(mask, w).sum()) for w in (None, 2, None, 3, 2)]
    assert counts == [21, 11, 21, 15, 11]


def test_lengths_hide_padded_keys():
    lengths = torch.tensor([5, 2, 3])
    want = by_loop(3, 4, 5, lambda b, q, k: k < int(lengths[b]))
    assert torch.equal(allowed(Mask(4, 5, causal=False, lengths=lengths), n_rows=3), want)


def test_documents_see_only_themselves():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 9, 9]])
    for window in (None, 2):
        want = by_loop(
            2, 6, 6,
            lambda b, q, k, w=window: k <= q and documents[b, q] == documents[b, k] and (not w or q - k < w),
        )  # fmt: skip
        mask = Mask(6, 6, causal=True, documents=documents)
        assert torch.equal(allowed(mask, window), want)
    want = by_loop(2, 6, 6, lambda b, q, k: bool(documents[b, q] == documents[b, k]))
    assert torch.equal(allowed(Mask(6, 6, causal=False, documents=documents)), want)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("starts", [0, 4, [4, 0, 2]])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_starts_continue_what_a_cache_holds(starts, n_queries, window):
    first = starts if isinstance(starts, list) else [starts] * 3
    n_keys = max(first) + n_queries
    want = by_loop(3, n_queries, n_keys, lambda b, q, k: 0 <= first[b] + q - k < (window or n_keys))
    mask = Mask(n_queries, n_keys, causal=True, starts=starts)
    assert torch.equal(allowed(mask, window, n_rows=3), want)


def test_one_query_at_the_end_needs_no_matrix():
    assert Mask(1, 9, causal=True, starts=8).dense() is None
    assert Mask(1, 9, causal=True, starts=8).dense(9) is None
    assert Mask(1, 9, causal=True, starts=8).dense(8) is not None


CASES = [
    Mask(n, n_keys, causal=causal, starts=starts, lengths=lengths, documents=documents)
    for n, n_keys in [(1, 1), (1, 4), (4, 4), (2, 4)]
    for causal in (True, False)
    for starts in (0, n_keys - n, [n_keys - n, 0])
    for lengths in (None, torch.tensor([n_keys, 1]))
    for documents in ([None, torch.tensor([[0, 0, 1, 1]])] if n == n_keys == 4 else [None])
]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 10])
def test_plain_causal_is_said_only_where_it_is_the_dense_matrix(window):
    """The fused kernels' flag means: query t sees keys 0 to t."""
    said = 0
    for mask in CASES:
        if mask.is_plain_causal(window):
            said += 1
            flag = torch.ones(mask.n_queries, mask.n_keys).tril().bool()
            assert torch.equal(allowed(mask, window)[0], flag)
    assert said == (0 if window in (1, 3) else 2)


def test_positions_begin_again_with_each_document():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 9, 4]])
    want = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]]
    assert positions_in_documents(documents).tolist() == want
