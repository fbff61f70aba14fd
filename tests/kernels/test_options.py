"""A part with an option that the kernels do not know is computed by the plain path, whatever the option is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from heedful.kernels import accelerate
from heedful.models.base import Batch
from heedful.nn.attention import Attention
from heedful.nn.block import ParallelBlock, PostNormBlock, PreNormBlock
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward
from heedful.nn.head import LanguageHead
from heedful.nn.norm import RMSNorm
from heedful.nn.stack import Stack
from support.case import without_dropout
from support.families import CASES

FAMILIES = {c.name: c for c in CASES}
# Every kind of part that some replacement takes over, and a family that has it.
PARTS = [
    (Attention, "llama3"),
    (FeedForward, "llama3"),  # gated
    (FeedForward, "gpt2"),
    (RMSNorm, "llama3"),
    (nn.LayerNorm, "gpt2"),
    (nn.Linear, "gpt2"),
    (PreNormBlock, "gpt2"),
    (PostNormBlock, "gpt1"),
    (ParallelBlock, "gpt-j"),
    (Stack, "gpt2"),
    (LanguageHead, "gpt2"),
    (Embedding, "gpt2"),
    (Attention, "t5"),
    (PreNormBlock, "t5"),
]
parts = pytest.mark.parametrize("kind, family", PARTS, ids=[f"{kind.__name__}-{name}" for kind, name in PARTS])


@pytest.fixture
def invented(monkeypatch):
    """Gives a kind of part an option that doubles its output, in the class's own forward, as a new option would be."""

    def invent(kind: type[nn.Module]) -> None:
        real = kind.forward

        def forward(self, *given, **named):
            out = real(self, *given, **named)
            return out if self.__dict__.get("invented") is None else out * self.invented

        monkeypatch.setattr(kind, "forward", forward)

    return invent


def with_option(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    found = [m for m in model.modules() if type(m) is kind]
    assert found
    for module in found[:1]:  # one part is enough to be wrong
        module.invented = 1.5
    return model


@parts
@torch.no_grad()
def test_decoding_heeds_an_option_it_does_not_know(kind, family, invented):
    invented(kind)
    case = FAMILIES[family]
    plain = with_option(case.model(), kind)
    fast = accelerate(copy.deepcopy(plain), "inference", precision="float32")
    batch = case.batch()
    start = batch if case.packs else Batch(source=batch.source, source_lengths=batch.source_lengths)
    results = []
    for model in plain, fast, case.model():
        logits, state = model.start(start)
        results.append(torch.cat([logits, model.step(torch.tensor([4, 5, 6]), state)]))
    want, found, without = results
    assert (found - want).abs().max() < 1e-4 * want.abs().max()
    assert (without - want).abs().max() > 1e-2 * want.abs().max()  # the option shows


@parts
def test_training_heeds_an_option_it_does_not_know(kind, family, invented):
    invented(kind)
    case = FAMILIES[family]
    plain = with_option(without_dropout(case.model()).train(), kind)
    fast = accelerate(copy.deepcopy(plain), "training")
    gradients = []
    for model in plain, fast:
        case.objective(model, case.batch()).sum.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, want in gradients[0].items():
        assert (gradients[1][name] - want).abs().max() <= 1e-4 * max(1, want.abs().max()), name


def test_an_option_that_is_off_is_no_obstacle():
    """None is how parts say that they do without an option, new ones too."""
    model = FAMILIES["gpt2"].model()
    for module in model.modules():
        module.invented = None
    plain = {type(m) for m in accelerate(copy.deepcopy(FAMILIES["gpt2"].model()), "inference").modules()}
    assert {type(m) for m in accelerate(model, "inference").modules()} == plain
