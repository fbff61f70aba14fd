"""Several real processes, each with a part of a model, compute what one does with the whole."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import asdict, fields

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.cli import main
from heedful.generate.engine import Engine
from heedful.generate.grammar import Grammar
from heedful.generate.leader import request_from_json
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate
from heedful.kernels.tensor_parallel import check_parts
from heedful.nn.lora import LoRALinear
from heedful.weights.save import save
from support import divided, together
from support.case import error
from support.families import CASES

GENERATIVE = {case.name: case for case in CASES if case.generates}
UNEVEN = {"gpt3-13b", "smollm2"}  # 3 heads
# Of every family the first, and those with parts that it has not: tied heads, norms of heads, soft caps.
FIRST = {case.make.__module__.rpartition(".")[2]: name for name, case in reversed(GENERATIVE.items())}
DIVIDED = sorted({*FIRST.values(), "llama3", "llama3.2", "qwen3", "gemma2"} - {FIRST["seq2seq"]})
ENGINE = {"llama3": ["contiguous", "paged"], "t5": ["contiguous"]}
FEWER_HEADS = "olmo2"  # two for keys, which are normalized together, and four processes


def write_models(folder, names):
    for name in names:
        model, batch = GENERATIVE[name].model(), GENERATIVE[name].batch()
        save(model, folder / "models" / name)
        tensors = {key: value for key, value in vars(batch).items() if value is not None}
        save_file(tensors, folder / "models" / name / "batch.safetensors")
    (folder / "engine.json").write_text(json.dumps({name: ENGINE[name] for name in names if name in ENGINE}))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_models(folder, DIVIDED)
    jobs = {"ids": divided.compute, "parts": divided.own_part, "led": divided.led, "command": divided.command}
    measured, ends, said = together.launch(2, folder, jobs)
    assert ends == [0, 0], said
    return folder, measured


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    write_models(folder, [FEWER_HEADS])
    _, ends, said = together.launch(4, folder, {"ids": divided.compute})
    assert ends == [0] * 4, said
    return folder


def check_logits(folder, name):
    """Of the whole batch, padding included."""
    expected = divided.logits(GENERATIVE[name].model(), GENERATIVE[name].batch())
    found = load_file(folder / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    assert all(error(found[key], expected[key]) < 1e-5 for key in expected)


@pytest.mark.parametrize("name", DIVIDED)
def test_two_processes_compute_the_logits_of_one(two, name):
    check_logits(two[0], name)


def test_processes_may_be_more_than_key_value_heads(four):
    check_logits(four, FEWER_HEADS)


@pytest.mark.parametrize("name, state", [(name, state) for name, states in ENGINE.items() for state in states])
def test_two_processes_generate_what_one_does(two, name, state):
    model, batch = GENERATIVE[name].model(), GENERATIVE[name].batch()
    assert two[1]["ids"][f"{name}, {state}"] == divided.generated(model, batch, state, temperature=0)


def test_each_process_has_a_half_and_all_sample_the_same(two):
    whole = GENERATIVE["llama2"].model()
    first, second = two[1]["parts"]
    norms = sum(p.numel() for p in whole.parameters() if p.ndim == 1)
    assert first["numbers"] + second["numbers"] == whole.n_parameters() + norms  # those are in both
    assert first["cached heads"] == second["cached heads"] == 2
    assert first["sampled"] == second["sampled"]
    assert first["abilities"] == ["generate", "stream"]


def test_followers_take_the_steps_of_the_leader(two):
    (result,) = Engine(GENERATIVE["llama3"].model()).run(
        [Request((1, 2, 3), max_tokens=8, sampling=Sampling(temperature=0))]
    )
    greedy, random = two[1]["led"]
    assert greedy == result.choices[0].tokens and len(random) == 8


def test_a_request_survives_the_way_to_the_followers():
    sampling = Sampling(0.5, 7, 0.9, 0.1, 0.8, 1.1, 0.2, 0.3, 2, {5: 1.5}, 2**62 + 1)
    request = Request(
        (1, 2), (3,), 9, sampling, ("stop",), frozenset({4, 8}), 2, 3, 5, True, 1, 6, True, False, Grammar.regex("a+")
    )
    defaults = {field.name: field.default for field in fields(Request)}
    assert all(getattr(request, name) != default for name, default in defaults.items())  # a new field is sent, too
    sent = json.loads(json.dumps(asdict(request), default=list))
    assert request_from_json(sent) == request
    assert request_from_json(json.loads(json.dumps(asdict(Request((1,))), default=list))) == Request((1,))


def test_the_command_prints_once(two):
    with redirect_stdout(io.StringIO()) as printed:
        main(["generate", "tiny-books", "The king", "--temperature", "0", "--max-tokens", "8"])
    assert two[1]["command"] == [printed.getvalue(), ""]


# --- what cannot be divided ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNEVEN))
def test_heads_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match="3 attention heads do not divide evenly over 2 processes: use a number that"):
        check_parts(GENERATIVE[name].model(), 2)


def with_option(model):
    model.decoder.blocks[0].attention.sink = torch.zeros(4)  # invented
    return model


def with_adapter(model):
    attention = model.decoder.blocks[0].attention
    attention.query = LoRALinear(attention.query, rank=2, alpha=1)
    return model


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        (
            with_option,
            2,
            "blocks.0.attention, a Attention, has an option that tensor parallelism does not know",
        ),
        (lambda model: accelerate(model, "inference"), 2, "a packed model is not divided"),
        (with_adapter, 2, "a model with adapters is not divided"),
        (lambda model: model, 3, "4 attention heads do not divide"),
        (lambda model: GENERATIVE["seq2seq-gru-uni-dot"].model(), 2, "only Transformers that generate"),
    ],
)
def test_what_no_plan_understands_is_refused(change, size, message):
    with pytest.raises(ValueError, match=message):
        check_parts(change(GENERATIVE["llama3"].model()), size)


def test_one_process_is_told_to_start_several(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node"):
        heedful.load("tiny", tensor_parallel=True)
    with pytest.raises(ValueError, match="leave out quantize or tensor_parallel"):
        heedful.load("tiny", tensor_parallel=True, quantize="int8")
