"""Keys and values in 8 bits: how far from the floats, through growth and reordering, paged or not."""

import pytest
import torch

from heedful.nn.int8_cache import cache_bytes, check_cache_type, restore_keys_values, store_keys_values
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import CrossCache, KeyValueState


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_a_value_is_rounded_to_the_nearest_of_255_steps(size):
    v = numbers(2, 3, 5, size)
    _, stored = store_keys_values(v, v, "int8")
    assert stored.dtype == torch.int8 and stored.shape == (2, 3, 5, size + 2)
    assert stored.nbytes == v[..., 0].numel() * cache_bytes(size, "int8")
    _, found = restore_keys_values(stored, stored, "int8", torch.float32)
    step = v.abs().amax(-1, keepdim=True) / 127
    assert ((found - v).abs() <= step * 0.502 + v.abs() / 256).all()  # the scale is a bfloat16


def test_a_large_channel_does_not_take_the_scale_of_the_keys():
    k = numbers(100, 64)
    k[:, 7] += 100
    keys, values = restore_keys_values(*store_keys_values(k, k, "int8"), "int8", torch.float32)
    errors = [(found - k)[:, :7].square().mean().sqrt() for found in (keys, values)]
    assert errors[0] < 0.25 * errors[1] < 0.1


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, 1e-42
    for found in restore_keys_values(*store_keys_values(x, x, "int8"), "int8", torch.float32):
        assert (found[0] == 0).all() and not found[1:3].isfinite().any() and found[3].isfinite().all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_position_is_stored_the_same_however_it_comes(paged):
    """Positions one by one, in rows of unequal length, selected and cut off, give what all at once give."""
    k, v = numbers(2, 2, 9, 32), numbers(2, 2, 9, 32) * 3
    whole = KeyValueState(1, 2, kind="int8").caches[0].extend(k, v)
    pool = BlockPool(8, 4, kind="int8")
    state = PagedState(pool, 1, 2) if paged else KeyValueState(1, 2, kind="int8")
    (cache,) = state.caches
    cache.extend(k[:, :, :5], v[:, :, :5], [5, 3])
    state.advance([5, 3])
    state.truncate(3)
    for i in range(3, 9):
        found = cache.extend(k[:, :, i : i + 1], v[:, :, i : i + 1])
        state.advance(1)
    assert all(torch.equal(*pair) for pair in zip(found, whole, strict=True))
    state.select([1, 0, 0])
    again = state.caches[0].extend(k[[1, 0, 0], :, :1], v[[1, 0, 0], :, :1])
    assert all(torch.equal(a[:, :, :9], b[[1, 0, 0]]) for a, b in zip(again, whole, strict=True))


def test_an_encoders_keys_and_values_are_kept_in_8_bits_too():
    k = numbers(2, 2, 9, 32)
    cache, more = CrossCache("int8"), CrossCache("int8")
    cache.fill(k, k)
    more.fill(k + 1, k + 1)
    assert cache.keys.dtype == torch.int8
    cache.append_rows(more, [1])
    cache.select([2, 0])
    for found in cache.read():
        assert (found - torch.stack([k[1] + 1, k[0]])).abs().max() < 0.05


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="int8, not as int4"):
        check_cache_type("int4")
