"""The loss over the vocabulary by a Triton kernel: PyTorch's losses and gradients, on a GPU or by the interpreter."""

import copy

import pytest
import torch
import torch.nn.functional as F

from heedful.kernels.cuda import has_triton
from heedful.nn.head import LanguageHead
from heedful.train import loss
from support.case import error
from support.interpreted import DEVICE, INTERPRETED

pytestmark = pytest.mark.skipif(
    not (has_triton() and (INTERPRETED or torch.cuda.is_available())),
    reason="needs a CUDA device and Triton, or Triton and TRITON_INTERPRET=1",
)
N, WIDTH = 5000, 5056  # more than a block, and padded


@pytest.fixture
def kernel(monkeypatch):
    from heedful.kernels.cuda.cross_entropy import cross_entropy_in_place

    monkeypatch.setitem(loss.compiled_cross_entropy, DEVICE, cross_entropy_in_place)
    return cross_entropy_in_place


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_pytorchs(kernel, softcap, smoothing, dtype):
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, WIDTH, generator=draw)).to(DEVICE, dtype)
    targets = torch.tensor([0, 1, 4095, 4096, N - 1, 77], device=DEVICE)
    exact = logits[:, :N].double().requires_grad_()
    capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    expected = F.cross_entropy(capped, targets, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    losses, d = kernel(logits.clone(), targets, N, softcap, smoothing)
    torch.testing.assert_close(losses.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert d.dtype == dtype and not d[:, N:].any()
    assert error(d[:, :N], exact.grad) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_infinite_logits(kernel):
    """-inf is a token without probability; NaN and inf make the loss NaN, as PyTorch has it."""
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[0, :50], logits[1, 3], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    targets = torch.tensor([60, 5, 5, 5], device=DEVICE)
    expected = F.cross_entropy(logits, targets, reduction="none")
    losses, _ = kernel(logits.clone(), targets, 64, None, 0.0)
    torch.testing.assert_close(losses, expected, equal_nan=True)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_chunked_loss_has_the_plain_gradients(kernel, monkeypatch, has_bias):
    """With rows without a target, in several chunks."""
    torch.manual_seed(0)
    plain, x = LanguageHead(16, N, bias=has_bias), torch.randn(40, 16)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    targets = torch.randint(0, N, (40,))
    targets[::7] = -100
    found = []
    for by_kernel in (False, True):
        if not by_kernel:
            monkeypatch.delitem(loss.compiled_cross_entropy, DEVICE)
        else:
            monkeypatch.setitem(loss.compiled_cross_entropy, DEVICE, kernel)
        head = copy.deepcopy(plain).to(DEVICE)
        hidden = x.clone().to(DEVICE).requires_grad_()
        total = loss.language_loss(head, hidden, targets.to(DEVICE), chunk_bytes=12 * 4 * N).sum
        total.backward()
        found.append([total, hidden.grad, *(p.grad for p in head.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
