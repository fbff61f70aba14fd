"""Muon of many matrices at once is torch's of one after the other."""

import pytest
import torch

from heedful.train.muon import BatchedMuon


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_together_are_torchs_one_by_one(adjust):
    def train(kind: type[torch.optim.Muon]) -> tuple[list[torch.Tensor], torch.optim.Muon]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(16, 16), (16, 16), (48, 16), (16, 48), (48, 16)]
        matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = kind(matrices, lr=0.05, weight_decay=0.2, momentum=0.9, adjust_lr_fn=adjust)
        for step in range(3):
            for i, p in enumerate(matrices):
                p.grad = None if (step, i) == (1, 4) else torch.randn(p.shape, generator=generator)
            optimizer.step()
        return matrices, optimizer

    (theirs, before), (ours, after) = train(torch.optim.Muon), train(BatchedMuon)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # products in bfloat16
    for key, state in before.state_dict()["state"].items():
        torch.testing.assert_close(state, after.state_dict()["state"][key])
