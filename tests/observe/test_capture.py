"""Capture: every family by one table of names, nothing changed by looking, everything restored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from heedful.generate.batch import greedy_batch
from heedful.kernels.accelerate import accelerate
from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel
from heedful.nn.attention import Watch
from heedful.observe.capture import capture
from heedful.observe.interventions import activation_patch, mean_ablation, zero_ablation
from heedful.observe.names import activation_names
from support.case import Case, error
from support.families import CASES
from support.tiny import tiny

every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
BY_NAME = {case.name: case for case in CASES}
speaking = pytest.mark.parametrize(
    "case",
    [BY_NAME[n] for n in ("gpt2", "llama3", "t5", "marian", "seq2seq-gru-bi-additive")],
    ids=lambda c: c.name,
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def traces(model: nn.Module) -> list[str]:
    """Whatever somebody who looked has left behind."""
    left = [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    left += [n for n, m in model.named_modules() if isinstance(m, Watch) and m.on]
    return left + [key for key, value in vars(model).items() if callable(value) and not isinstance(value, nn.Module)]


@every
def test_every_name_of_every_family(case: Case):
    """All that is listed is computed, in the shape that is listed; the output stays; no trace is left."""
    model, batch = case.model(), case.batch()
    counted, plain = case.counted(batch), model(batch).logits
    with capture(model, "*") as acts:
        first = model(batch).logits
    assert list(acts) == list(activation_names(model))
    for name, shape in activation_names(model).items():
        assert len(acts[name].shape) == len(shape), name
        sizes = zip(shape, acts[name].shape, strict=True)
        assert all(want == got for want, got in sizes if isinstance(want, int) and want > 1), name
    assert error(first[counted], plain[counted]) < 1e-6
    with capture(model, "*") as again:
        assert torch.equal(model(batch).logits, first)  # the same path on both sides: the same bits
    assert all(torch.equal(acts[name], again[name]) for name in acts)
    assert torch.equal(model(batch).logits, plain)
    assert not traces(model)
    for name in acts:
        if name.endswith(".weights"):
            whole = acts[name].sum(dim=-1)
            assert error(whole, torch.ones_like(whole)) < 1e-6
            if name.startswith("decoder") and ".self." in name:
                assert acts[name].triu(1).abs().max() == 0  # exactly nothing of the future


REFERENCES = [
    "gpt1", "gpt2", "gpt-neo", "gpt-j", "gpt-neox", "llama3", "mistral", "qwen3", "gemma1", "gemma2", "phi3", "olmo2",
    "mixtral", "image-gpt", "bert-masked", "bert-tag", "roberta-masked", "distilbert-masked", "vit", "t5", "marian",
]  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_values_are_the_references(name: str):
    case = BY_NAME[name]
    reference, batch = case.reference(), case.batch()
    if hasattr(reference, "set_attn_implementation"):
        reference.set_attn_implementation("eager")  # the only one that shows its weights
    rows = case.rows(batch)[:1]  # without padding: what stands there is nobody's business
    batch = rows[0]
    ours = case.ours(reference)
    theirs = case._call(reference, batch, output_attentions=True, output_hidden_states=True)
    with capture(ours, ["*.weights", "*.before", "*.output", "*.after"]) as acts:
        ours(batch)
    if isinstance(ours, EncoderDecoderModel):
        compare(acts, "encoder", theirs.encoder_attentions, theirs.encoder_hidden_states)
        compare(acts, "decoder", theirs.decoder_attentions, theirs.decoder_hidden_states)
        for i, weights in enumerate(theirs.cross_attentions):
            assert error(acts[f"decoder.{i}.cross.weights"], weights) < 1e-5
    else:
        half = "decoder" if isinstance(ours, DecoderModel) else "encoder"
        compare(acts, half, theirs.attentions, theirs.hidden_states)


def compare(acts, half: str, attentions, states) -> None:
    assert len(attentions) > 0 and len(states) == len(attentions) + 1
    for i, weights in enumerate(attentions):
        assert error(acts[f"{half}.{i}.self.weights"], weights) < 1e-5
        assert error(acts[f"{half}.{i}.before"], states[i]) < 1e-5
    # The reference's last state is normed in most families, and not yet in ViT.
    last = [acts[f"{half}.output"], acts[f"{half}.{len(attentions) - 1}.after"]]
    assert min(error(x, states[-1]) for x in last) < 1e-5


@pytest.mark.parametrize("kind", ["additive", "dot", "general", "concat"])
def test_recurrent_attention_is_what_the_model_says_it_is(kind: str):
    model = tiny("seq2seq", attention=kind).eval()
    batch = Batch(torch.tensor([[0, 5, 9, 3]]), source=torch.tensor([[7, 8, 9, 10, 11]]))
    with capture(model, ["decoder.*", "logits"]) as acts:
        out = model(batch)
    last = model.config.n_layers - 1
    assert torch.equal(acts[f"decoder.{last}.cross.weights"], out.extra["alignment"])
    assert acts[f"decoder.{last}.cross.keys"].shape == (1, 1, 5, 32)
    assert acts[f"decoder.{last}.cross.queries"].shape == (1, 1, 4, 32)
    seen = acts[f"decoder.{last}.cross.weights"] @ acts[f"decoder.{last}.cross.values"]
    assert error(seen, acts[f"decoder.{last}.cross.heads"]) < 1e-6
    assert torch.equal(acts["logits"], out.logits)


def test_scores_are_queries_times_keys():
    for name in ("gpt2", "llama3", "t5"):  # plain, rotated and grouped, biased
        case = BY_NAME[name]
        model, batch = case.model(), case.rows(case.batch())[0]
        with capture(model, "decoder.0.self.*") as acts:
            model(batch)
        q, k = acts["decoder.0.self.queries"], acts["decoder.0.self.keys"]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scale = model.decoder.blocks[0].attention.scale or q.shape[-1] ** -0.5
        scores = q @ k.transpose(-2, -1) * scale
        if model.decoder.bias is not None:
            place = torch.arange(q.shape[2])
            scores = scores + model.decoder.bias(place[None], place)
        allowed = torch.ones(scores.shape[-2:]).tril().bool()
        assert error(acts["decoder.0.self.scores"][..., allowed], scores[..., allowed]) < 1e-5
        assert torch.isinf(acts["decoder.0.self.scores"][..., ~allowed]).all()


@speaking
def test_generation_step_by_step(case: Case):
    """Each call of the model has its own tensors: the prompt's, then a row for each token."""
    model, batch = case.model(), case.batch()
    row = case.rows(batch)[0]
    prompt = dataclasses.replace(row, tokens=row.tokens[:, :3])
    where = next(n for n in activation_names(model) if n.startswith("decoder") and n.endswith(".weights"))
    with capture(model, [where, "logits", "decoder.embeddings"]) as acts:
        _, state = model.start(prompt)
        for t in range(3, 7):
            model.step(row.tokens[:, t], state)
    assert [x.shape[-2] for x in acts.steps(where)] == [3, 1, 1, 1, 1]
    assert [x.shape[1] for x in acts.steps("decoder.embeddings")] == [3, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"5 times: acts.steps"):
        acts[where]
    with capture(model, [where, "logits"]) as whole:
        model(dataclasses.replace(row, tokens=row.tokens[:, :7]))
    for t, (weights, logits) in enumerate(zip(acts.steps(where), acts.steps("logits"), strict=True), start=2):
        expected = whole[where][:, :, t]
        assert error(weights[:, :, -1], expected[..., : weights.shape[-1]]) < 1e-5
        assert error(logits, whole["logits"][:, t]) < 1e-5


def test_the_engines_own_generation_can_be_watched_and_says_the_same():
    model = tiny("gpt").eval()
    prompt = Batch(torch.tensor([[5, 6, 7]]))
    plain = greedy_batch(model, prompt, 6)
    with capture(model, "decoder.1.self.weights") as acts:
        assert greedy_batch(model, prompt, 6) == plain
    assert [x.shape[-1] for x in acts.steps("decoder.1.self.weights")] == [3, 4, 5, 6, 7, 8]
    assert not traces(model)


def test_packed_models_can_be_watched():
    model = tiny("llama").eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    with capture(model, "decoder.0.self.*") as plain:
        model(tokens)
    accelerate(model, "inference", precision="float32")
    with capture(model, ["decoder.0.self.*", "logits"]) as acts:
        _, state = model.start(Batch(tokens[:, :3]))
        model.step(tokens[:, 3], state)
    for name in plain:
        want, got = plain[name], acts.steps(name)[-1]
        want = (
            want if name.endswith(("keys", "values")) else want[:, -1:] if name.endswith("output") else want[:, :, -1:]
        )
        finite = torch.isfinite(want)
        assert error(got[finite], want[finite]) < 1e-4, name
    assert not traces(model)


# --- edits -----------------------------------------------------------------------------------------------------------


def test_a_head_without_output_is_a_head_without_projection():
    model = tiny("gpt").eval()
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    with capture(model, "logits", edit={"decoder.1.self.heads": zero_ablation(heads=[2])}) as acts:
        model(tokens)
    block = model.decoder.blocks[1].attention
    size = block.d_head
    block.output.weight.data[:, 2 * size : 3 * size] = 0
    assert error(acts["logits"], model(tokens).logits) < 1e-6


def test_patching_everything_in_makes_the_other_run():
    """Activation patching: the whole residual stream of another text leads to that text's output."""
    for model in (tiny("gpt").eval(), tiny("llama").eval()):
        one, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 3, 7, 4]])
        with capture(model, ["decoder.1.before", "logits"]) as acts:
            model(other)
        with capture(model, "logits", edit={"decoder.1.before": activation_patch(acts["decoder.1.before"])}) as patched:
            model(one)
        assert torch.equal(patched["logits"], acts["logits"])
        part = {"decoder.1.before": activation_patch(acts["decoder.1.before"], positions=[0])}
        with capture(model, "logits", edit=part) as some:
            model(one)
        assert not torch.allclose(some["logits"], acts["logits"])
    model = tiny("seq2seq", attention="additive").eval()
    batch = Batch(torch.tensor([[0, 5, 9]]), source=torch.tensor([[7, 8, 9, 10]]))
    with capture(
        model, "decoder.*.cross.weights", edit={"decoder.*.cross.weights": lambda x: torch.full_like(x, 0.25)}
    ):
        even = model(batch).logits
    assert not torch.allclose(even, model(batch).logits)


def test_means_and_patterns_in_edits():
    model = tiny("bert", head="masked").eval()
    tokens = torch.tensor([[5, 6, 7, 8], [4, 9, 9, 4]])
    with capture(model, "*.feedforward.hidden", edit={"*.feedforward.hidden": mean_ablation()}) as acts:
        model(tokens)
    for name in acts:
        assert error(acts[name][0, 0], acts[name][1, 3]) < 1e-6
    with pytest.raises(ValueError, match="keep the shape"), capture(model, edit={"logits": lambda x: x[:1]}):
        model(tokens)
    with pytest.raises(ValueError, match="heads"), capture(model, edit={"*.self.heads": zero_ablation(heads=[4])}):
        model(tokens)
    assert not traces(model)


def test_gradients_through_what_was_captured():
    model = tiny("gpt")
    with torch.enable_grad(), capture(model, "decoder.0.self.weights", graph=True) as acts:
        model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
        assert acts["decoder.0.self.weights"].requires_grad
    with capture(model, "decoder.0.self.weights") as acts, torch.enable_grad():
        model(torch.tensor([[5, 6, 7]]))
    assert not acts["decoder.0.self.weights"].requires_grad


# --- names, nesting, faults ------------------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_nearest():
    model = tiny("gpt").eval()
    with pytest.raises(ValueError, match=r"decoder\.0\.self\.weight'.*decoder\.0\.self\.weights"):
        with capture(model, "decoder.0.self.weight"):
            pass
    with pytest.raises(ValueError, match="nothing here is called"):
        with capture(model, edit={"encoder.0.cross.scores": zero_ablation()}):
            pass
    with capture(model, "logits") as acts:
        with pytest.raises(ValueError, match="inside the `with`"):
            acts["logits"]
        with pytest.raises(KeyError, match="was not asked for"):
            acts["decoder.output"]
    assert not traces(model)


@pytest.mark.parametrize("family", ["gpt", "t5", "vit", "seq2seq"])
def test_captures_nest_and_end_in_any_order(family: str):
    model = tiny(family).eval()
    batch = {
        "gpt": Batch(torch.tensor([[5, 6, 7]])),
        "vit": Batch(images=torch.zeros(1, 3, 8, 8)),
    }.get(family, Batch(torch.tensor([[0, 6, 7]]), source=torch.tensor([[5, 6]])))
    first, second = capture(model, "*"), capture(model, ["*.embeddings", "logits"])
    one, other = first.__enter__(), second.__enter__()
    model(batch)
    first.__exit__(None, None, None)
    model(batch)
    second.__exit__(None, None, None)
    assert len(one.steps("logits")) == 1 and len(other.steps("logits")) == 2
    name = next(n for n in other if n.endswith("embeddings"))
    assert torch.equal(one[name], other.steps(name)[1])
    model(batch)
    assert len(other.steps("logits")) == 2
    assert not traces(model)


def test_an_exception_inside_restores_everything():
    model = tiny("t5").eval()
    batch = Batch(torch.tensor([[0, 6, 7]]), source=torch.tensor([[5, 6]]))
    with pytest.raises(RuntimeError, match="mine"), capture(model, "*"):
        model(batch)
        raise RuntimeError("mine")
    assert not traces(model)

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("in the edit")

    with (
        pytest.raises(RuntimeError, match="in the edit"),
        capture(model, "*", edit={"encoder.1.self.keys": fails}),
    ):
        model(batch)
    assert not traces(model)
