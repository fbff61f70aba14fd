"""Optimizers against torch's own used by hand and the papers' formulas; states that survive a checkpoint to the bit."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from heedful.models.base import Batch
from heedful.models.registry import FAMILIES
from heedful.train import optimizers
from heedful.train.objectives import causal
from heedful.train.optimizers import lr_factor
from heedful.train.recipe import OptimizerSettings, ScheduleSettings

NAMES = ("adamw", "muon", "adafactor", "lion", "sgd")


def tiny(seed=0, family="gpt", **settings):
    torch.manual_seed(seed)
    cls = FAMILIES[family].load()
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 23, "max_len": 16, **settings}
    return cls.create(cls.config_class.from_dict(sizes)).eval()


def step(model, optimizer, number):
    tokens = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = causal(model, Batch(tokens))
    loss.sum.backward()
    optimizers.average_and_clip(model.parameters(), loss.n_targets, 1.0)
    optimizer.step()
    return loss.mean.item()


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def settings(name, **more):
    return OptimizerSettings(name=name, **{"lr": 0.01, **more})


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns_one_batch_by_heart(name):
    model = tiny()
    optimizer = optimizers.make_optimizer(
        model, settings(name, lr={"sgd": 0.3, "adafactor": 0.1}.get(name, 0.01), muon_lr=0.05)
    )
    losses = [step(model, optimizer, 0) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_restored_training_goes_on_to_the_bit(name, tmp_path):
    model = tiny()
    optimizer = optimizers.make_optimizer(model, settings(name))
    for n in range(5):
        step(model, optimizer, n)
    tensors, about = optimizers.optimizer_state(optimizer, model)
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "state.safetensors")
    later = tiny(seed=1)
    later.load_state_dict(model.state_dict())
    fresh = optimizers.make_optimizer(later, settings(name))
    optimizers.load_optimizer_state(fresh, later, load_file(tmp_path / "state.safetensors"), about)
    for n in range(5, 10):
        step(model, optimizer, n)
        step(later, fresh, n)
    for name_, weight in weights(later).items():
        assert torch.equal(weight, weights(model)[name_]), name_


def test_a_restored_state_does_not_share_memory_with_what_was_saved():
    model = tiny()
    optimizer = optimizers.make_optimizer(model, settings("adamw"))
    step(model, optimizer, 0)
    tensors, about = optimizers.optimizer_state(optimizer, model)
    other = tiny()
    fresh = optimizers.make_optimizer(other, settings("adamw"))
    optimizers.load_optimizer_state(fresh, other, tensors, about)
    before = {k: t.clone() for k, t in tensors.items()}
    step(other, fresh, 1)
    assert all(torch.equal(tensors[k], before[k]) for k in before)


def test_the_state_of_another_optimizer_or_model_is_refused():
    model = tiny()
    adamw, lion = (
        optimizers.make_optimizer(model, settings("adamw")),
        optimizers.make_optimizer(model, settings("lion")),
    )
    step(model, adamw, 0)
    tensors, about = optimizers.optimizer_state(adamw, model)
    with pytest.raises(ValueError, match=r"of adamw, the recipe asks for lion"):
        optimizers.load_optimizer_state(lion, model, tensors, about)
    model.embed.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'embed\.weight', which does not learn"):
        optimizers.load_optimizer_state(optimizers.make_optimizer(model, settings("adamw")), model, tensors, about)


def drive(model, number, *optimizers):
    """A step with gradients from nowhere: two ways to compute them would differ in their last bits."""
    draw = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    for one in optimizers:
        one.step()


def test_adamw_is_torchs_with_decay_on_matrices_alone():
    ours, theirs = tiny(), tiny()
    optimizer = optimizers.make_optimizer(ours, settings("adamw", betas=(0.8, 0.95), weight_decay=0.3))
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0}]
    by_hand = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False)
    for n in range(4):
        drive(ours, n, optimizer)
        drive(theirs, n, by_hand)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, weights(theirs)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(adjust):
    ours, theirs = tiny(), tiny()
    optimizer = optimizers.make_optimizer(ours, settings("muon", muon_lr=0.05, weight_decay=0.2, adjust_lr=adjust))
    matrices = [p for n, p in theirs.named_parameters() if ".blocks." in n and p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.2, momentum=0.95, adjust_lr_fn=adjust)
    tables = [theirs.embed.weight, theirs.position.weight]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    assert len(matrices) + len(tables) + len(vectors) == len(list(theirs.parameters()))
    groups = [{"params": tables, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99))
    for n in range(4):
        drive(ours, n, optimizer)
        drive(theirs, n, muon, adamw)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, weights(theirs)[name], rtol=1e-5, atol=1e-6)


def test_adafactor_is_torchs():
    ours, theirs = tiny(), tiny()
    optimizer = optimizers.make_optimizer(ours, settings("adafactor", weight_decay=0.0))
    by_hand = torch.optim.Adafactor(theirs.parameters(), lr=0.01)
    for n in range(4):
        drive(ours, n, optimizer)
        drive(theirs, n, by_hand)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, weights(theirs)[name])


def test_muon_without_transformer_blocks_says_what_to_use():
    with pytest.raises(ValueError, match="use adamw"):
        optimizers.make_optimizer(nn.Linear(3, 3), settings("muon"))


def test_muon_leaves_routers_to_adamw():
    model = tiny(family="mixtral", d_ff=8, n_kv_heads=2, n_experts=2, n_chosen=1)
    muon = optimizers.block_matrices(model)
    named = {n for n, p in model.named_parameters() if p in muon}
    assert not any("router" in n for n in named)
    assert any("experts.1.down" in n for n in named)


def test_lion_is_the_papers_algorithm():
    torch.manual_seed(0)
    module = nn.Linear(5, 4)
    weight, momentum = module.weight.detach().clone(), torch.zeros(4, 5)
    optimizer = optimizers.make_optimizer(module, settings("lion", lr=0.1, betas=(0.9, 0.99), weight_decay=0.5))
    for _ in range(5):
        gradient = torch.randn(4, 5)
        module.weight.grad = gradient.clone()
        optimizer.step()
        update = (0.9 * momentum + 0.1 * gradient).sign()
        weight = weight - 0.1 * (update + 0.5 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(module.weight.detach(), weight)


def test_the_schedule_moves_every_group_from_its_own_rate():
    optimizer = optimizers.make_optimizer(tiny(), settings("muon", muon_lr=0.05))
    optimizers.set_lr(optimizer, 0.5)
    optimizers.set_lr(optimizer, 0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.005, 0.001, 0.001])


def test_only_what_learns_is_optimized_and_a_tied_parameter_once():
    model = tiny()
    assert model.head.weight is model.embed.weight
    model.position.weight.requires_grad_(False)
    optimizer = optimizers.make_optimizer(model, settings("adamw"))
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters())) - 1
    assert not any(p is model.position.weight for p in held)


def test_nothing_that_learns_is_an_error():
    model = tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model learns"):
        optimizers.make_optimizer(model, settings("adamw"))


@pytest.mark.parametrize("n_targets", [7, torch.tensor(7), torch.tensor(7.0)])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_gradients_are_divided_and_clipped_as_torch_does(clip, n_targets):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))]
    theirs = [nn.Parameter(torch.zeros_like(p)) for p in ours]
    for a, b in zip(ours[:2], theirs[:2], strict=True):  # the third has none
        a.grad = 10 * torch.randn_like(a)
        b.grad = a.grad / 7
    norm = optimizers.average_and_clip(ours, n_targets, clip)
    wanted = nn.utils.clip_grad_norm_(theirs, clip or float("inf"))
    torch.testing.assert_close(norm, wanted)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_gradient_that_is_no_number_shows_in_the_norm():
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.0, float("nan"), 2.0])
    assert not torch.isfinite(optimizers.average_and_clip([weight], 1, 1.0))


def test_gradients_averaged_over_processes_may_be_of_less_than_one_target_each():
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    assert optimizers.average_and_clip([weight], torch.tensor(1) / 2, 0.0) == 2


@pytest.mark.parametrize("none", [0, torch.tensor(0)])
def test_a_batch_without_targets_does_not_divide_by_zero(none):
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.zeros(3)
    assert optimizers.average_and_clip([weight], none, 1.0) == 0


def test_ema_is_the_running_mean():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    ema, mean = optimizers.EMA(model, 0.9), 1.0
    for n in range(1, 200):
        model.weight.data.fill_(float(n % 7))
        ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * (n % 7)
    assert ema.means["weight"].item() == pytest.approx(mean, rel=1e-5)


def test_what_changes_with_the_step_may_stand_in_tensors():
    found = []
    for in_tensors in (False, True):
        model = tiny()
        ema, optimizer = optimizers.EMA(model, 0.99), optimizers.make_optimizer(model, settings("adamw"))
        for n in range(6):
            optimizers.set_lr(optimizer, 1 / (1 + n))
            if in_tensors and n == 2:  # in the middle, as a CUDA graph is captured
                optimizers.use_tensors(optimizer, ema, torch.device("cpu"))
            step(model, optimizer, n)
            ema.update()
        found.append({**weights(model), **{f"mean.{name}": mean for name, mean in ema.means.items()}})
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == in_tensors
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5)


def test_ema_swaps_in_and_out_and_is_restored(tmp_path):
    model = tiny()
    ema = optimizers.EMA(model, 0.99)
    optimizer = optimizers.make_optimizer(model, settings("adamw"))
    for n in range(3):
        step(model, optimizer, n)
        ema.update()
    trained, means = weights(model), {n: t.clone() for n, t in ema.tensors().items()}
    with pytest.raises(RuntimeError), ema.swapped():
        assert all(torch.equal(p, means[n]) for n, p in model.named_parameters())
        raise RuntimeError("an evaluation that fails")
    assert all(torch.equal(p, trained[n]) for n, p in model.named_parameters())

    save_file(ema.tensors(), tmp_path / "ema.safetensors")
    other = optimizers.EMA(model, 0.99)
    other.restore(load_file(tmp_path / "ema.safetensors"))
    for n in range(3, 5):
        step(model, optimizer, n)
        ema.update(), other.update()
    assert all(torch.equal(other.means[n], t) for n, t in ema.means.items())


def test_an_unknown_name_lists_the_known_ones():
    broken = SimpleNamespace(**{**OptimizerSettings().to_dict(), "name": "adam"})
    with pytest.raises(ValueError, match="adamw, muon, adafactor, lion and sgd"):
        optimizers.make_optimizer(nn.Linear(2, 2), broken)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_it_is_saved_and_restored_and_nothing_waits_for_it(name):
    def drive_there(model, number, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * number + 0.1)
        n_targets = torch.tensor(7, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizers.average_and_clip(model.parameters(), n_targets, 1.0)
            optimizers.average_and_clip(model.parameters(), 7, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()

    model, later = tiny().cuda(), tiny(seed=1).cuda()
    optimizer = optimizers.make_optimizer(model, settings(name))
    for n in range(3):
        drive_there(model, n, optimizer)
    tensors, about = optimizers.optimizer_state(optimizer, model)
    later.load_state_dict(model.state_dict())
    fresh = optimizers.make_optimizer(later, settings(name))
    optimizers.load_optimizer_state(fresh, later, {k: t.cpu() for k, t in tensors.items()}, about)
    for n in range(3, 6):
        drive_there(model, n, optimizer)
        drive_there(later, n, fresh)
    for name_, weight in weights(later).items():
        assert torch.equal(weight, weights(model)[name_]), name_


# --- learning-rate schedules, against the papers' formulas -----------------------------------------------------------

SCHEDULES = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_is_a_straight_line_to_the_full_rate(name):
    settings = ScheduleSettings(name=name, warmup=40)
    assert [lr_factor(settings, s, 1000) for s in range(40)] == [(s + 1) / 40 for s in range(40)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warm_up_the_first_step_has_the_full_rate(name):
    assert lr_factor(ScheduleSettings(name=name, warmup=0), 0, 100) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_decay_ends_exactly_at_its_final_share(name):
    settings = ScheduleSettings(name=name, warmup=10, final=0.25)
    assert lr_factor(settings, 200, 200) == 0.25
    assert lr_factor(settings, 250, 200) == 0.25, "beyond its end it stays"


def test_cosine_is_half_way_in_the_middle():
    settings = ScheduleSettings(name="cosine", warmup=100, final=0.1)
    assert lr_factor(settings, 550, 1000) == pytest.approx(0.55)


def test_inverse_sqrt_is_the_papers_equation_3():
    """d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), with steps counted from 1; ours has the highest at 1."""
    settings = ScheduleSettings(name="inverse_sqrt", warmup=4000)
    highest = 512**-0.5 * 4000**-0.5
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert lr_factor(settings, step - 1, 100_000) * highest == pytest.approx(paper, rel=1e-12)


def test_wsd_is_flat_until_its_last_share_of_the_steps():
    settings = ScheduleSettings(name="wsd", warmup=50, final=0.0, decay=0.2)
    assert all(lr_factor(settings, s, 1000) == 1.0 for s in range(50, 801))
    assert lr_factor(settings, 900, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_training_shorter_than_its_warm_up_has_a_rate_for_every_step(name):
    settings = ScheduleSettings(name=name, warmup=100)
    rates = [lr_factor(settings, s, 5) for s in range(5)]
    assert rates == [(s + 1) / 100 for s in range(5)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_after_warm_up_as_transformers_schedules(name):
    transformers = pytest.importorskip("transformers", reason="the other implementation is not installed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, 20, 200),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, 20, 200),
        "wsd": lambda: transformers.get_wsd_schedule(optimizer, 20, 40, num_training_steps=200, decay_type="linear"),
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, 20),
    }[name]()  # fmt: skip
    settings = ScheduleSettings(name=name, warmup=20, final=0.0, decay=0.2)
    for step in range(20, 200):
        assert lr_factor(settings, step, 200) == pytest.approx(theirs.lr_lambdas[0](step), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rate_is_positive_and_at_most_the_full_one(name):
    settings = ScheduleSettings(name=name, warmup=10, final=0.0)
    for step in range(100):
        rate = lr_factor(settings, step, 100)
        assert 0 < rate <= 1 and math.isfinite(rate)
