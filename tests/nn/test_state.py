"""What the cache gives back is what was put in, row by row, through growth, reordering and forgetting."""

import pytest
import torch

from heedful.nn.state import KeyValueState

HEADS, SIZE = 2, 3


def extend(state, rows, *, real=None):
    """Append numbers to each row of every layer: key (row, head, place) holds the number, the value its negative."""
    numbers = torch.tensor(rows, dtype=torch.float32)  # (B, T)
    k = numbers[:, None, :, None].expand(-1, HEADS, -1, SIZE)
    out = [cache.extend(k + 100 * i, -k - 100 * i) for i, cache in enumerate(state.caches)]
    state.advance(len(rows[0]) if real is None else real)
    return out


def remembered(state, layer=0):
    """Each row's numbers, checked to be the same in all heads, and the negative in the values."""
    cache = state.caches[layer]
    rows = []
    for b, n in enumerate(state.lengths):
        k, v = cache.keys[b, :, :n], cache.values[b, :, :n]
        assert torch.equal(v, -k) and torch.equal(k, k[:1, :, :1].expand_as(k))
        rows.append([int(x) - 100 * layer for x in k[0, :, 0]])
    return rows


def test_what_was_read_comes_back():
    state = KeyValueState(2, 2)
    assert (state.n_rows, state.starts, state.n_keys(3)) == (2, 0, 3)
    (k, v), _ = extend(state, [[1, 2, 3], [4, 5, 6]])
    assert k.shape == v.shape == (2, HEADS, 3, SIZE)
    (k, _), (deeper, _) = extend(state, [[7], [8]])
    assert k[:, 0, :, 0].tolist() == [[1, 2, 3, 7], [4, 5, 6, 8]]
    assert torch.equal(deeper, k + 100)
    assert remembered(state, 1) == [[1, 2, 3, 7], [4, 5, 6, 8]]


def test_it_grows_by_doubling_and_keeps_all():
    state = KeyValueState(1, 1)
    capacities = set()
    for i in range(33):
        extend(state, [[i]])
        capacities.add(state.caches[0].keys.shape[2])
    assert remembered(state) == [list(range(33))]
    assert sorted(capacities) == [1, 2, 4, 8, 16, 32, 64]


def test_capacity_allocates_ahead():
    state = KeyValueState(1, 1, capacity=20)
    extend(state, [[0]])
    block = state.caches[0].keys
    for i in range(1, 20):
        extend(state, [[i]])
    assert state.caches[0].keys is block
    extend(state, [[20]])
    assert remembered(state) == [list(range(21))]


def test_rows_of_unequal_length():
    state = KeyValueState(2, 3)
    extend(state, [[1, 2, 3], [4, 0, 0], [6, 7, 0]], real=[3, 1, 2])  # 0 is padding
    assert state.starts == [3, 1, 2] and state.n_keys(2) == 5
    (k, _), _ = extend(state, [[10, 11], [12, 13], [14, 15]])
    assert k.shape[2] == 5
    for layer in (0, 1):
        assert remembered(state, layer) == [[1, 2, 3, 10, 11], [4, 12, 13], [6, 7, 14, 15]]


def test_select_reorders_and_repeats():
    state = KeyValueState(2, 3)
    extend(state, [[1, 2], [3, 0], [5, 6]], real=[2, 1, 2])
    state.select(torch.tensor([2, 1, 1, 0]))
    assert (state.n_rows, state.lengths) == (4, [2, 1, 1, 2])
    extend(state, [[7], [8], [9], [10]])
    for layer in (0, 1):  # the two copies of row 1 are rows of their own
        assert remembered(state, layer) == [[5, 6, 7], [3, 8], [3, 9], [1, 2, 10]]
    state.select([])
    assert state.n_rows == 0


def test_truncate_forgets_the_newest():
    state = KeyValueState(1, 2)
    extend(state, [[1, 2, 3], [4, 5, 6]])
    state.truncate([1, 9])  # 9 is more than there is
    assert state.lengths == [1, 3]
    extend(state, [[7], [8]])
    assert remembered(state) == [[1, 7], [4, 5, 6, 8]]
    state.truncate(1)
    assert remembered(state) == [[1], [4]]
    assert state.starts == 1


def test_free_empties_one_row():
    state = KeyValueState(1, 3)
    extend(state, [[1, 2], [3, 4], [5, 6]])
    state.free(1)
    assert state.lengths == [2, 0, 2]
    extend(state, [[7], [8], [9]])
    assert remembered(state) == [[1, 2, 7], [8], [5, 6, 9]]


def test_rows_join_and_leave_without_moving_the_others():
    state, other = KeyValueState(2, 1), KeyValueState(2, 3)
    extend(state, [[1, 2, 3]])
    extend(other, [[4, 5, 6, 7], [8, 0, 0, 0], [9, 10, 0, 0]], real=[4, 1, 2])
    state.append_rows(other, [2, 0, 2])
    assert state.lengths == [3, 2, 4, 2]
    block = state.caches[0].keys
    state.remove_row(1)  # the last takes its place
    state.append_rows(other, [1])
    assert state.caches[0].keys is block
    extend(state, [[11], [12], [13], [14]])
    for layer in (0, 1):
        assert remembered(state, layer) == [[1, 2, 3, 11], [9, 10, 12], [4, 5, 6, 7, 13], [8, 14]]
    state.remove_row(3)
    state.remove_row(0)
    assert remembered(state, 1) == [[4, 5, 6, 7, 13], [9, 10, 12]]


def test_rows_that_have_read_nothing_join_too():
    state, empty = KeyValueState(1, 1), KeyValueState(1, 2)
    extend(state, [[1, 2]])
    state.append_rows(empty)
    state.free(2)
    state.remove_row(0)
    state.append_rows(state, [0])
    state.select([2, 1])
    extend(state, [[3], [4]])
    assert remembered(state) == [[3], [4]]
    empty.append_rows(state)
    empty.remove_row(0)
    assert remembered(empty) == [[4], [], [3]]


def test_sources_of_different_length_join():
    state, other = KeyValueState(1, 1, cross=True), KeyValueState(1, 2, cross=True)
    for each, n in ((state, 3), (other, 5)):
        keys = torch.arange(float(each.n_rows))[:, None, None, None].expand(-1, HEADS, n, SIZE) + n
        each.cross[0].fill(keys, -keys)
    state.append_rows(other)
    assert state.memory_lengths.tolist() == [3, 5, 5]
    assert state.cross[0].keys[:, 0, :, 0].tolist() == [[3, 3, 3, 0, 0], [5] * 5, [6] * 5]
    state.remove_row(0)
    assert state.memory_lengths.tolist() == [5, 5] and state.cross[0].values[:, 0, 0, 0].tolist() == [-6, -5]


def test_before_the_first_token_there_is_nothing_to_do():
    state = KeyValueState(1, 2)
    state.select([1, 0, 0])
    state.truncate(0)
    state.free(2)
    assert state.lengths == [0, 0, 0]


def test_the_encoder_side_is_filled_once_and_follows_select():
    state = KeyValueState(1, 2, cross=True)
    (cross,) = state.cross
    state.select([0, 1])
    assert cross.empty
    keys = torch.arange(2.0)[:, None, None, None].expand(2, HEADS, 4, SIZE)
    cross.fill(keys, -keys)
    state.memory_lengths = torch.tensor([4, 3])
    state.select([1, 1, 0])
    assert cross.keys[:, 0, 0, 0].tolist() == [1, 1, 0]
    assert cross.values[:, 0, 0, 0].tolist() == [-1, -1, 0]
    assert state.memory_lengths.tolist() == [3, 3, 4]


def test_mistakes_are_named():
    state = KeyValueState(1, 2)
    for rows in ([2], [-1]):
        with pytest.raises(ValueError, match="2 rows"):
            state.select(rows)
    with pytest.raises(ValueError, match="truncate"):
        state.truncate([1])
    with pytest.raises(ValueError, match="truncate"):
        state.truncate(-1)
    with pytest.raises(ValueError, match="row 2"):
        state.free(2)
