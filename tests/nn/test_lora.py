"""LoRA layers and their 4 bits, against their formulas."""

import copy

import pytest
import torch
from torch import nn

from heedful.nn.lora import LEVELS, NF4, LoRALinear
from support.case import error


@pytest.mark.parametrize("bias", [True, False])
def test_a_new_adapter_changes_nothing_and_a_trained_one_adds_its_product(bias):
    torch.manual_seed(0)
    base = nn.Linear(12, 7, bias)
    x, layer = torch.randn(3, 5, 12), LoRALinear(copy.deepcopy(base), 4, 8.0)
    assert torch.equal(layer(x), base(x))
    layer.lora_b.data.normal_()
    torch.testing.assert_close(layer(x), base(x) + 2.0 * x @ layer.lora_a.T @ layer.lora_b.T)
    torch.testing.assert_close(layer.merged()(x), layer(x))


def test_dropout_is_on_the_adapters_input_alone():
    layer = LoRALinear(nn.Linear(6, 6), 2, 2.0, dropout=0.5).train()
    x = torch.randn(4, 6)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.lora_b.data.normal_()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_nf4_rounds_to_the_nearest_level_of_its_block():
    """By hand, one block after the other, but for the second quantization, which is within 1/254 of its range."""
    torch.manual_seed(0)
    weight = torch.randn(48, 100)
    blocks, levels = weight.reshape(-1, 64), torch.tensor(LEVELS)
    magnitude = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks / magnitude)[..., None].sub(levels).abs().argmin(-1)
    by_hand = (levels[nearest] * magnitude).view(48, 100)
    ours = NF4(weight).dense()
    assert (ours - by_hand).abs().mean() < 0.01 * by_hand.abs().mean()
    # What the paper's data type costs a normal distribution: about a tenth of the weights' size.
    assert (ours - weight).std() < 0.1 * weight.std()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (300, 130)])
def test_nf4_keeps_any_shape_zeros_and_the_largest(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[0, 0] = 0
    stored = NF4(weight)
    assert stored.dense().shape == shape
    assert stored.dense()[0, 0] == 0
    assert NF4(torch.zeros(shape)).dense().eq(0).all()
    even = torch.full(shape, 0.3)
    torch.testing.assert_close(NF4(even).dense(), even)


def test_four_bits_take_an_eighth_of_the_memory():
    stored = NF4(torch.randn(1024, 1024))
    n = sum(b.nbytes for b in stored.buffers())
    assert n * 8 / 1024**2 == pytest.approx(4.127, abs=0.001), "bits per weight, as in the paper's section 3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_four_bits_are_those_of_the_plain_layer_with_its_weights(dtype):
    torch.manual_seed(0)
    base = nn.Linear(96, 40).to(dtype)
    layer = LoRALinear(copy.deepcopy(base), 4, 8.0, quantized=True)
    layer.lora_b.data.normal_()
    plain = copy.deepcopy(base)
    plain.weight = nn.Parameter(layer.stored.dense())
    plain = LoRALinear(plain, 4, 8.0)
    plain.load_state_dict({"lora_a": layer.lora_a, "lora_b": layer.lora_b}, strict=False)
    results = []
    for module in (layer, plain):
        x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, module.lora_a.grad, module.lora_b.grad])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        # In bfloat16 the plain layer adds its bias before it rounds, ours after.
        assert error(a, b) < (1e-5 if dtype == torch.float32 else 0.02)


def test_the_full_weight_is_not_kept_for_the_backward_pass():
    layer = LoRALinear(nn.Linear(256, 256, bias=False), 2, 2.0, quantized=True)
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        layer(torch.randn(4, 256, requires_grad=True)).sum().backward()
    assert all(t.nbytes < 256 * 256 for t in kept), "in 4 bytes it would be four times that"


def test_under_autocast_four_bits_multiply_in_its_type():
    layer = LoRALinear(nn.Linear(64, 32), 2, 2.0, quantized=True)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("quantized", [False, True])
def test_on_a_gpu_as_on_a_cpu(quantized):
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(200, 130), 4, 8.0, quantized=quantized)
    layer.lora_b.data.normal_()
    x = torch.randn(3, 200, requires_grad=True)
    moved, there = copy.deepcopy(layer).cuda(), x.detach().cuda().requires_grad_()
    layer(x).square().sum().backward()
    moved(there).square().sum().backward()
    assert error(there.grad.cpu(), x.grad) < 1e-4
    assert error(moved.lora_a.grad.cpu(), layer.lora_a.grad) < 1e-4
    if quantized:  # and quantized there; a magnitude may fall on the next of its steps
        weight = torch.randn(130, 200)
        assert error(NF4(weight.cuda()).dense().cpu(), NF4(weight).dense()) < 0.02


@pytest.mark.parametrize("quantized", [False, True])
def test_without_memory_it_has_its_shapes(quantized):
    with torch.device("meta"):
        layer = LoRALinear(nn.Linear(200, 130), 4, 8.0, quantized=quantized)
        assert layer(torch.empty(3, 200)).shape == (3, 130)
    assert all(t.is_meta for t in [*layer.parameters(), *layer.buffers()])
