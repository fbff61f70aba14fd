"""Images completed from their first pixels."""

from __future__ import annotations

import pytest
import torch

import heedful


def test_half_an_image_is_completed():
    loaded = heedful.load("digits-gpt")
    begun = torch.zeros(32, dtype=torch.long)
    images = loaded.complete_image(begun, n=2, seed=3)
    assert images.shape == (2, 64) and (images[:, :32] == 0).all() and images.max() < 16
    assert torch.equal(images, loaded.complete_image(begun, n=2, seed=3))
    assert not torch.equal(images[0], images[1])
    assert loaded.complete_image(begun[:0]).shape == (1, 64)
    for wrong in (torch.full((3,), 16), torch.zeros(64, dtype=torch.long), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="pixels"):
            loaded.complete_image(wrong)
