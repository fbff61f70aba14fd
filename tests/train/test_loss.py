"""Cross-entropy in chunks is the plain one, gradients too, and never holds all logits in fp32."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.models.base import Batch
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.heads import HeadParts, MaskedHead
from heedful.nn.head import LanguageHead
from heedful.train.loss import CHUNK, cross_entropy, language_loss
from heedful.train.objectives import causal

N, E, V = 50, 16, 301
SMALL = 4 * V * 7  # bytes of 7 rows


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head(kind):
    tied = nn.Parameter(noise(V, E, seed=1))
    made = {
        "plain": lambda: LanguageHead(E, V, tied=tied),
        "all": lambda: LanguageHead(E, V, tied=tied, bias=True, scale=0.25, softcap=3.0),
        "masked": lambda: MaskedHead(HeadParts(E, 2, tied)),
    }[kind]()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if not name.startswith("norm"):
                p.copy_(0.3 * noise(*p.shape, seed=p.ndim))
    return made


def targets(share_ignored=0.3):
    found = torch.randint(V, (5, N // 5), generator=torch.Generator().manual_seed(3))
    return found.masked_fill(torch.rand(found.shape, generator=torch.Generator().manual_seed(4)) < share_ignored, -100)


def gradients(loss, module, x):
    module.zero_grad()
    x.grad = None
    (loss * 1.7).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None} | {"hidden": x.grad}


def compare(module, wanted, smoothing=0.0, tolerance=2e-6, **options):
    """Against the plain formula in fp64; the same in fp32 is off by 1e-6 itself."""
    exact = copy.deepcopy(module).double()
    x = noise(5, N // 5, E).requires_grad_()
    y = x.detach().double().requires_grad_()
    plain = nn.functional.cross_entropy(
        exact(y).flatten(0, 1), wanted.flatten(), reduction="sum", label_smoothing=smoothing
    )
    want = gradients(plain, exact, y)
    ours = language_loss(module, x, wanted, smoothing, **options)
    got = gradients(ours.sum, module, x)
    assert ours.n_targets == (wanted != -100).sum()
    torch.testing.assert_close(ours.sum.double(), plain, rtol=tolerance, atol=tolerance)
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["plain", "all", "masked"])
@pytest.mark.parametrize("size", [SMALL, 4 * V, CHUNK["cpu"]])
def test_chunks_are_the_plain_way(kind, smoothing, size):
    compare(head(kind), targets(), smoothing, chunk_bytes=size)
    compare(head(kind), targets(0.0), smoothing, chunk_bytes=size)


def test_rows_that_do_not_count_may_also_be_weighed(monkeypatch):
    """As on a GPU, where leaving them out would mean waiting."""
    import heedful.train.loss

    monkeypatch.setattr(heedful.train.loss, "target_rows", lambda t: torch.arange(t.numel()))
    compare(head("all"), targets(), 0.1, chunk_bytes=SMALL)


def test_frozen_parts_get_no_gradient():
    module = head("all")
    module.weight.requires_grad_(False)
    compare(module, targets(), chunk_bytes=SMALL)
    module.bias.requires_grad_(False)
    compare(module, targets(), chunk_bytes=SMALL)


class Watch(TorchDispatchMode):
    """The largest fp32 tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32:
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("way", ["direct", "hooked"])
def test_the_logits_are_never_all_there_in_fp32(mixed, way):
    module, wanted = LanguageHead(E, 5000), torch.randint(5000, (400,))
    if way == "hooked":
        module.register_forward_hook(lambda m, i, o: o)
    x = noise(400, E).requires_grad_()
    with Watch() as watch:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = language_loss(module, x, wanted, chunk_bytes=4 * 5000 * 40)
        loss.sum.backward()
    assert watch.largest == max(40 * 5000, E * 5000)
    with Watch() as watch:
        language_loss(module, x, wanted, chunk_bytes=2**40).sum.backward()
    assert watch.largest == 400 * 5000  # the watcher sees what it should


def test_a_model_trains_without_its_logits(monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", 4 * 997 * 16)
    model = GPT.create(GPTConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=997, max_len=32, dropout=0.0))
    batch = Batch(torch.randint(997, (8, 32), generator=torch.Generator().manual_seed(0)))
    with Watch() as watch:
        loss = causal(model, batch)
        loss.sum.backward()
    assert watch.largest <= 997 * 16 < 8 * 31 * 997
    got = model.embed.weight.grad.clone()
    monkeypatch.setitem(CHUNK, "cpu", 2**40)
    model.zero_grad()
    plain = causal(model, batch)
    plain.sum.backward()
    torch.testing.assert_close(loss.sum, plain.sum)
    torch.testing.assert_close(got, model.embed.weight.grad)


def test_bfloat16_products_keep_softmax_and_sums_in_fp32():
    module, wanted, x = head("plain"), targets(), noise(5, N // 5, E).requires_grad_()
    exact = cross_entropy(module(x), wanted)
    want = gradients(exact.sum, module, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = language_loss(module, x, wanted, chunk_bytes=SMALL)
    assert loss.sum.dtype == torch.float32
    torch.testing.assert_close(loss.sum, exact.sum, rtol=5e-3, atol=0)
    got = gradients(loss.sum, module, x)
    for name in want:
        assert got[name].dtype == torch.float32
        error = (got[name] - want[name]).norm() / want[name].norm()
        assert error < 0.02, name


def test_autocast_keeps_no_copy_without_gradients():
    """A tied weight that was cast for the loss must still learn where it is used afterwards."""
    module, x = head("plain"), noise(4, E)
    with torch.autocast("cpu", torch.bfloat16):
        language_loss(module, x.requires_grad_(), torch.tensor([1, 2, 3, 4]), chunk_bytes=4 * V)
        nn.functional.linear(x.detach(), module.weight).sum().backward()
    assert module.weight.grad.abs().sum() > 0


class LowRank(nn.Module):
    """What an adapter makes of a head: another module, with a head inside."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(noise(2, E)), nn.Parameter(noise(V, 2, seed=5))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def test_a_head_that_is_changed_or_watched_is_called():
    compare(LowRank(head("all")), targets(), 0.1, chunk_bytes=SMALL)
    for kind in "plain", "masked":
        module, seen = head(kind), []
        module.register_forward_hook(lambda m, i, o, seen=seen: seen.append(len(o)))
        compare(module, targets(), chunk_bytes=SMALL)
        assert len(seen) > 2


def test_without_gradients_none_are_computed():
    module, x = head("plain"), noise(50, E)
    with torch.no_grad(), Watch() as watch:
        loss = language_loss(module, x, targets().flatten(), chunk_bytes=SMALL)
    assert not loss.sum.requires_grad
    torch.testing.assert_close(loss.sum, cross_entropy(module(x), targets().flatten()).sum.detach())
    assert watch.largest <= V * E


def test_nothing_to_learn_from_is_no_loss():
    for kind in "plain", "masked":
        module, x = head(kind), noise(5, 10, E).requires_grad_()
        loss = language_loss(module, x, torch.full((5, 10), -100))
        loss.sum.backward()
        assert loss.sum == 0 and loss.n_targets == 0 and not x.grad.any()
