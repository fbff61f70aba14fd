"""Muon of many matrices at once is torch's of one after the other; a step that is not finite changes nothing."""

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


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(8, 4, generator=generator)) for _ in range(2)]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
    ours, theirs = BatchedMuon(matrices, lr=0.1), BatchedMuon(plain, lr=0.1)
    for skipped in (True, False, True, False):
        gradients = [torch.randn(8, 4, generator=generator) for _ in matrices]
        ours.found_inf = torch.tensor(float(skipped))
        for p, q, gradient in zip(matrices, plain, gradients, strict=True):
            p.grad, q.grad = torch.full_like(gradient, torch.nan) if skipped else gradient, gradient
        ours.step()
        if not skipped:
            theirs.step()
    for p, q in zip(matrices, plain, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])


def test_a_learning_rate_may_be_a_tensor():
    found = []
    for kind in (float, torch.tensor):
        generator = torch.Generator().manual_seed(0)
        matrix = torch.nn.Parameter(torch.randn(8, 4, generator=generator))
        optimizer = BatchedMuon([matrix], lr=0.1)
        optimizer.param_groups[0]["lr"] = kind(0.1)
        for _ in range(3):
            matrix.grad = torch.randn(8, 4, generator=generator)
            optimizer.step()
        found.append(matrix.detach())
    torch.testing.assert_close(*found)
