"""The trainer by itself: what a step is, how it deals with what goes wrong, when it stops, and what it keeps."""

import math
from functools import partial

import pytest
import torch
import torch._inductor.config

from heedful.data.corpus import Corpus, TokenWindows
from heedful.data.corruption import MaskedWindows
from heedful.data.pairs import Pairs
from heedful.text import train_wordpiece
from heedful.train import cost, loss, torch_compile
from heedful.train.diagnostics import TrainingDiverged, out_of_memory_advice
from heedful.train.objectives import causal, make_objective, seq2seq
from heedful.train.recipe import Recipe, merge_tables
from heedful.train.runlog import RunLog
from heedful.train.trainer import Trainer
from support.tiny import tiny
from support.together import Lines, V
from support.trainings import WORDS, story


class Told(RunLog):
    """A log that keeps what it is told."""

    def __init__(self, recipe):
        super().__init__(None, steps=recipe.train.steps, settings=recipe.log, quiet=True)
        self.notes, self.losses, self.judged, self.steps_told = [], [], [], []

    def note(self, text):
        self.notes.append(text)

    def step(self, step, loss, **more):
        self.losses.append(loss)
        self.steps_told.append(more)

    def validation(self, step, loss, metrics=None):
        self.judged.append(loss)


def fresh(family="gpt", **settings):
    """A model with its paper's first weights, always the same, without dropout unless it is asked for."""
    none = {} if family == "llama" else {"dropout": 0.0}
    model = tiny(family, **{**none, **settings})
    torch.manual_seed(0)
    model.init_weights()
    return model


def recipe(**tables):
    usual = {
        "train": {"steps": 3, "batch_size": 32, "workers": 0, "device": "cpu", "eval_every": 1000},
        "optimizer": {"lr": 0.01},
        "schedule": {"name": "constant", "warmup": 0},
    }
    return Recipe.from_dict(merge_tables(usual, tables))


def trainer_of(model, objective=causal, data=None, validation=None, save=None, **tables):
    settings = recipe(**tables)
    data = Lines(50, model.family) if data is None else data
    return Trainer(model, objective, data, validation, settings, log=Told(settings), save=save)


def test_utilisation_is_a_share(monkeypatch):
    """Also where the peak rate was measured on a busy machine, and where two steps arrive at once, as on a GPU."""
    monkeypatch.setattr(cost, "peak_rate", lambda device, dtype: 1.0)
    trainer = trainer_of(fresh(), train={"steps": 30, "batch_size": 2})
    trainer.log.quiet = False
    trainer.train()
    found = [more["utilisation"] for more in trainer.log.steps_told]
    assert found[:19] == [None] * 19 and all(0 < share <= 1 for share in found[19:])


def test_a_training_goes_on_where_flops_cannot_be_counted(monkeypatch):
    def fail(*_):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(cost, "count_flops", fail)
    trainer = trainer_of(fresh(), train={"steps": 22, "batch_size": 2})
    trainer.log.quiet = False
    trainer.train()
    assert [more["utilisation"] for more in trainer.log.steps_told] == [None] * 22
    assert sum("no such operator" in note for note in trainer.log.notes) == 1


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_bits(one, other):
    return all(torch.equal(one[name], other[name]) for name in one | other)


def distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one | other)


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences():
    texts = story(30).split("\n\f\n")
    tokenizer = train_wordpiece([" ".join(WORDS)] * 3, 60)
    ids = [tokenizer.encode(text) for text in texts]
    return MaskedWindows(Corpus.of(ids), tokenizer, 24)


# 32 windows of 8 tokens and one of 3: a step of 32 meets it, and no step of 8 is without padding elsewhere.
WINDOWS = TokenWindows(Corpus.of([[1 + i * i % (V - 1) for i in range(32 * 8 + 4)]]), 8, shifted=False)
ROWS = [[1 + i * j % (V - 1) for j in range(1, 3 + 5 * i % 10)] for i in range(1, 51)]
PAIRS = Pairs(ROWS, ROWS[::-1], start_id=0, eos_id=1)
IN_PARTS = {
    "lines of unequal length": ("gpt", causal, None),
    "a last partial window": ("gpt", causal, WINDOWS),
    "rotary, a last partial window": ("llama", causal, WINDOWS),
    "masked": ("bert", make_objective({"name": "masked"}), None),
    "an encoder and a decoder": ("t5", seq2seq, PAIRS),
    "recurrent": ("seq2seq", seq2seq, PAIRS),
}


@pytest.mark.parametrize("batch_size, accumulate", [(32, 4), (30, 4), (33, 33)])
@pytest.mark.parametrize("name", IN_PARTS)
def test_small_batches_together_are_the_large_one(name, batch_size, accumulate):
    family, objective, data = IN_PARTS[name]
    found = {}
    for parts in (1, accumulate):
        model = fresh(family, **({"attention_dropout": 0.0} if family == "bert" else {}))
        train = {"batch_size": batch_size, "accumulate": parts}
        trainer = trainer_of(model, objective, data, train=train, optimizer={"name": "sgd", "lr": 0.1})
        trainer.train()
        found[parts] = weights_of(model), trainer.log.losses
    assert distance(weights_of(fresh(family)), found[1][0]) > 1e-3
    assert distance(found[1][0], found[accumulate][0]) < 1e-6
    assert found[accumulate][1] == pytest.approx(found[1][1], abs=1e-6)


def test_small_batches_of_masked_pairs_are_the_large_one(sentences):
    found = []
    for parts in (1, 4):
        model = fresh("bert", head="pretraining", attention_dropout=0.0, vocab_size=60)
        trainer = trainer_of(
            model,
            make_objective({"name": "masked", "share": 0.15}),
            sentences,
            train={"accumulate": parts},
            optimizer={"name": "sgd", "lr": 0.1},
        )
        trainer.train()
        found.append(weights_of(model))
    assert distance(*found) < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_one_seed_is_one_training(optimizer):
    def trained(seed):
        model = fresh(dropout=0.2)
        trainer_of(model, train={"seed": seed, "accumulate": 2}, optimizer={"name": optimizer}).train()
        return weights_of(model)

    first, again, other = trained(7), trained(7), trained(8)
    assert same_bits(first, again) and not same_bits(first, other)


def test_activations_computed_again_are_the_same():
    def trained(again):
        model = fresh(dropout=0.2)
        trainer_of(model, train={"checkpoint_activations": again}).train()
        return weights_of(model)

    assert same_bits(trained(True), trained(False))


def test_bfloat16_products_leave_float32_weights_and_learn_about_the_same():
    losses = {}
    for precision in ("float32", "bfloat16"):
        model = fresh()
        trainer = trainer_of(model, train={"precision": precision, "steps": 20})
        trainer.train()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {t.dtype for t in trainer.state()[0].values()} == {torch.float32}
        losses[precision] = trainer.log.losses
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.05)
    assert losses["float32"][-1] < losses["float32"][0] - 0.5


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Spoiled:
    """An objective whose loss is not a number in the given calls."""

    def __init__(self, *calls):
        self.calls, self.n = calls, 0

    def __call__(self, model, batch):
        loss = causal(model, batch)
        self.n += 1
        if self.n in self.calls:
            loss.sum = loss.sum * math.nan
        return loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_a_bad_step_changes_nothing_and_is_reported(optimizer):
    model = fresh()
    seen = []
    trainer = trainer_of(
        model,
        Spoiled(3),
        save=lambda trainer, _: seen.append((weights_of(model), trainer.state())),
        train={"steps": 4, "save_every": 1},
        optimizer={"name": optimizer},
    )
    assert trainer.train().step == 4
    assert trainer.log.notes == ["step 3 skipped: its gradient is not finite (1 in a row)"]
    assert math.isnan(trainer.log.losses[2])
    (before, state), (after, state_after) = seen[1:3]
    assert same_bits(before, after)
    assert all(torch.equal(state[0][k], state_after[0][k]) for k in state[0])
    assert not same_bits(after, seen[3][0])
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_one_bad_part_of_a_step_spoils_the_step_alone():
    model = fresh()
    trainer = trainer_of(model, Spoiled(6), train={"accumulate": 4})
    trainer.train()
    assert [math.isnan(loss) for loss in trainer.log.losses] == [False, True, False]
    assert len(trainer.log.notes) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # without it the blocks may run as one operation
def test_training_halts_after_bad_steps_in_a_row_and_names_the_layer(dropout):
    model = fresh(dropout=dropout)
    saved = []
    trainer = trainer_of(
        model,
        save=lambda trainer, _: saved.append(trainer.step),
        train={"steps": 20, "halt_after": 3, "save_every": 4},
    )
    part = model.decoder.blocks[1].feedforward.up
    calls = 0

    def spoil(module, given, output):
        nonlocal calls
        calls += 1
        return output * math.nan if calls > 6 else output

    part.register_forward_hook(spoil)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row .*decoder\.blocks\.1\.feedforward\.up") as halted:
        trainer.train()
    assert "last checkpoint is intact" in str(halted.value) and "optimizer.lr" in str(halted.value)
    assert saved == [4, 8] and len(trainer.log.notes) == 3  # step 8 is bad, and its weights are those of step 6
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_bad_steps_that_are_not_in_a_row_do_not_halt():
    trainer = trainer_of(fresh(), Spoiled(1, 2, 4, 5), train={"steps": 6, "halt_after": 3})
    assert trainer.train().reason == "finished" and len(trainer.log.notes) == 4


def test_a_gradient_that_breaks_on_the_way_back_is_named():
    model = fresh()
    model.decoder.blocks[0].attention.query.weight.register_hook(lambda gradient: gradient * math.inf)
    trainer = trainer_of(model, train={"halt_after": 2})
    with pytest.raises(TrainingDiverged, match=r"decoder\.blocks\.0\.attention\.query\.weight \(its gradient\)"):
        trainer.train()


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. not enough memory"),
        MemoryError(),
    ],
    ids=["a GPU's", "a CPU's", "Python's"],
)
def test_out_of_memory_says_what_to_set(problem):
    def objective(model, batch):
        if batch.tokens.device.type != "meta":
            raise problem
        return causal(model, batch)

    with pytest.raises(ValueError, match="out of memory: ") as advice:
        trainer_of(fresh(), objective).train()
    assert "--set train.accumulate=" in str(advice.value)


def test_advice_that_cannot_be_measured_is_what_usually_helps():
    def advice(**train):
        with pytest.raises(ValueError) as told, out_of_memory_advice(recipe(train=train)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return str(told.value)

    assert "train.accumulate=4" in advice(accumulate=2) and "checkpoint_activations=true" in advice()
    every = advice(accumulate=32, checkpoint_activations=True, precision="bfloat16")
    assert "data.length=128" in every
    with pytest.raises(RuntimeError, match="another"), out_of_memory_advice(recipe()):
        raise RuntimeError("another problem")


# --- when it stops, and what it keeps --------------------------------------------------------------------------------


def test_patience_ends_a_training_that_gets_no_better():
    """With a rate of 0 nothing ever gets better than the first evaluation."""
    saved = []
    trainer = trainer_of(
        fresh(),
        validation=Lines(7, "gpt"),
        save=lambda trainer, better: saved.append((trainer.step, better)),
        train={"steps": 50, "eval_every": 2, "patience": 3},
        optimizer={"lr": 0.0},
    )
    summary = trainer.train()
    assert (summary.reason, summary.step, summary.best_step) == ("patience", 8, 2)
    assert saved == [(2, True), (4, False), (6, False), (8, False)]


def test_a_target_ends_a_training_that_reaches_it():
    trainer = trainer_of(fresh(), validation=Lines(7, "gpt"), train={"steps": 500, "eval_every": 1, "target": 3.8})
    summary = trainer.train()
    assert summary.reason == "target" and summary.step < 500
    assert summary.best == trainer.log.judged[-1] <= 3.8 < trainer.log.judged[-2]


@pytest.mark.parametrize("name", ["patience", "target"])
def test_stopping_early_needs_something_to_judge_by(name):
    with pytest.raises(ValueError, match=f"train.{name} .*validation"):
        trainer_of(fresh(), train={name: 2})


def test_a_running_mean_is_what_is_judged_and_saved():
    """With decay d, after n steps the mean is what the recurrence gives; training itself does not notice it."""
    model, plain = fresh(), fresh()
    weights, saved = [weights_of(model)], {}
    trainer = trainer_of(
        model,
        validation=Lines(7, "gpt"),
        save=lambda trainer, _: saved.update(weights_of(model)),
        train={"steps": 4, "eval_every": 4, "ema": 0.25},
    )
    without = trainer_of(
        plain, save=lambda trainer, _: weights.append(weights_of(plain)), train={"steps": 4, "save_every": 1}
    )
    trainer.train(), without.train()
    assert same_bits(weights_of(model), weights_of(plain))
    mean = weights[0]
    for n, now in enumerate(weights[1:], start=1):
        decay = min(0.25, (1 + n) / (10 + n))
        mean = {name: mean[name] * decay + now[name] * (1 - decay) for name in mean}
    assert distance(mean, saved) < 1e-6 < distance(saved, weights_of(model))
    averaged = fresh()
    averaged.load_state_dict(saved, strict=False)
    judge = trainer_of(averaged, validation=Lines(7, "gpt"))
    assert trainer.log.judged == [pytest.approx(judge.validate().loss, abs=1e-6)]


def test_evaluation_is_the_mean_over_all_targets_in_whatever_batches():
    losses = []
    for batch_size in (1, 3, 32):
        trainer = trainer_of(fresh(), validation=Lines(7, "gpt"), train={"batch_size": batch_size})
        losses.append(trainer.validate().loss)
    assert losses == [pytest.approx(losses[0], abs=1e-6)] * 3


def test_frozen_whole_is_refused():
    model = fresh()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        trainer_of(model)


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """What is compiled here is forgotten afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loss, "compiled_cross_entropy", {})
    torch_compile.compile_error.cache_clear()
    yield monkeypatch
    torch_compile.compile_error.cache_clear()
    torch._dynamo.reset()


def test_a_compiled_model_learns_the_same(compiler):
    """Everything but the machine code: PyTorch's compiler takes half a minute for that."""
    compiler.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for wanted in ("no", "yes"):
        model = fresh()
        trainer = trainer_of(model, validation=Lines(7, "gpt"), train={"compile": wanted, "eval_every": 3})
        trainer.train()
        found.append((weights_of(model), trainer.log.judged))
        assert not trainer.log.notes
    assert distance(found[0][0], found[1][0]) < 1e-4 and found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def test_without_a_compiler_training_goes_on_and_says_so(compiler):
    with torch._inductor.config.patch({"cpp.cxx": (None, "/missing/c++")}):
        trainer = trainer_of(fresh(), train={"compile": "yes"})
    (note,) = trainer.log.notes
    assert "torch.compile does not work here" in note and "/missing/c++" in note and "without it" in note
    assert trainer.train().reason == "finished"
