"""Adapters as files: against the peft library on the reference models, our own, and broken ones."""

import copy
import json

import pytest
import torch

import heedful
from heedful.nn.lora import adapted
from heedful.train.adapters import adapt, merge
from heedful.weights.adapter import load_adapter, with_adapter
from heedful.weights.folder import load_folder
from heedful.weights.save import save
from heedful.weights.save_adapter import save_adapter
from support.adapters import lora_settings as settings
from support.adapters import stir, tiny
from support.case import error
from support.families import CASES

# Fused matrices of every kind, transposed ones, a head of its own, two stacks, experts.
CASE = {case.name: case for case in CASES}
FAMILIES_TESTED = [
    "llama3",
    "gpt2",
    "gpt-neox",
    "bert-classify",
    "t5",
    "phi3",
    "gpt1",
    "distilbert-tag",
    "mixtral",
]
TARGETS = {
    "llama3": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "attn.c_proj"],
    "gpt-neox": ["query_key_value", "dense"],
    "bert-classify": ["query", "value", "intermediate.dense"],
    "t5": ["q", "v", "wo"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "vit": ["q_proj", "fc1"],  # as the reference calls them in memory, which is not as in its files
}


@torch.no_grad()
def logits(case, ours, batch):
    return ours(batch).logits[case.counted(batch)]


@torch.no_grad()
def reference_logits(case, reference, batch):
    return case.reference_logits(reference, batch)[case.counted(batch)]


@pytest.mark.parametrize("name", FAMILIES_TESTED)
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_merged_export_equals_what_ran(name, kind, tmp_path):
    case = CASE[name]
    ours, batch = case.model(), case.batch()
    adapt(ours, settings(kind))
    ran = logits(case, stir(ours), batch)
    save(merge(ours), tmp_path / "merged")
    assert error(logits(case, load_folder(tmp_path / "merged"), batch), ran) < 1e-5


@pytest.fixture(scope="session")
def peft():
    return pytest.importorskip("peft", reason="peft, the other implementation of adapters, is not installed")


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")  # peft's, of its own for experts
@pytest.mark.parametrize("name", FAMILIES_TESTED)
def test_peft_reads_what_we_write(name, peft, tmp_path):
    case = CASE[name]
    reference, batch = case.reference(), case.batch()
    ours = case.ours(reference)
    adapt(ours, settings())
    ran = logits(case, stir(ours), batch)
    assert error(ran, reference_logits(case, reference, batch)) > 0.01, "the adapter does nothing"
    save_adapter(ours, tmp_path / "adapter", "a-tiny-model")
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    assert error(reference_logits(case, theirs, batch), ran) < 1e-5


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", list(TARGETS))
def test_we_read_what_peft_writes(name, rslora, peft, tmp_path):
    case = CASE[name]
    reference, batch = case.reference(), case.batch()
    ours = case.ours(reference)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[name], init_lora_weights=False, use_rslora=rslora,
        rank_pattern={} if rslora else {TARGETS[name][0]: 2}, alpha_pattern={} if rslora else {TARGETS[name][1]: 3},
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = peft.get_peft_model(reference, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    load_adapter(ours, tmp_path / "adapter")
    # init_lora_weights=False draws B too: what the file's config says of it does not matter for what was saved
    assert error(logits(case, ours, batch), reference_logits(case, theirs, batch)) < 1e-5


@pytest.mark.parametrize("targets", [["attention.value"], ["attention.query", "attention.value"]])
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3"])
def test_a_part_of_a_fused_matrix_alone(name, targets, peft, tmp_path):
    case = CASE[name]
    reference, batch = case.reference(), case.batch()
    ours = case.ours(reference)
    adapt(ours, settings(targets=targets))
    ran = logits(case, stir(ours), batch)
    save_adapter(ours, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "adapter").eval()
    assert error(reference_logits(case, theirs, batch), ran) < 1e-5
    again = case.ours(reference)
    assert load_adapter(again, tmp_path / "adapter") == list(adapted(ours))
    assert {m.rank for m in adapted(again).values()} == {4}, "as it was, not of the whole matrix"


def test_a_head_that_learned_in_full_goes_along(peft, tmp_path):
    case = CASE["bert-classify"]
    reference, batch = case.reference(), case.batch()
    ours = case.ours(reference)
    adapt(ours, settings(trainable=["head"]))
    ours.head.classifier.weight.data.normal_()
    ran = logits(case, stir(ours), batch)
    save_adapter(ours, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "adapter").eval()
    assert error(reference_logits(case, theirs, batch), ran) < 1e-5
    again = case.ours(reference)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(case, again, batch), ran)
    assert again.head.classifier.weight.requires_grad

    theirs.save_pretrained(tmp_path / "theirs")
    third = case.ours(reference)
    load_adapter(third, tmp_path / "theirs")
    assert torch.equal(logits(case, third, batch), ran)


@pytest.mark.parametrize("name", [*FAMILIES_TESTED, "vit", "transformer"])
def test_saved_and_loaded_adapters_are_the_same_to_the_bit(name, tmp_path):
    case = CASE[name]
    reference = case.reference()
    ours = case.ours(reference)
    adapt(ours, settings())
    stir(ours)
    save_adapter(ours, tmp_path / "adapter")
    again = case.ours(reference)
    assert sorted(load_adapter(again, tmp_path / "adapter")) == sorted(adapted(ours))
    for key, layer in adapted(again).items():
        mine = adapted(ours)[key]
        assert torch.equal(layer.lora_a, mine.lora_a) and torch.equal(layer.lora_b, mine.lora_b)
        assert layer.scale == mine.scale


def test_a_fresh_adapter_comes_back_into_the_layers_it_was_of(tmp_path):
    """All of B is zero: only the layers that are there can tell whose rank is whose."""
    ours = tiny()
    adapt(ours, settings())
    save_adapter(ours, tmp_path / "adapter")
    again = tiny()
    torch.manual_seed(5)
    adapt(again, settings())
    load_adapter(again, tmp_path / "adapter")
    for key, layer in adapted(again).items():
        assert torch.equal(layer.lora_a, adapted(ours)[key].lora_a)
    other = tiny()
    adapt(other, settings(rank=2))
    with pytest.raises(ValueError, match="other layers or ranks"):
        load_adapter(other, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["llama3", "gpt2", "gpt-neox", "phi3", "t5"])
def test_dora_is_merged(name, peft, tmp_path):
    case = CASE[name]
    reference, batch = case.reference(), case.batch()
    ours = case.ours(reference)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[name], init_lora_weights=False, use_dora=True,
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "magnitude" in parameter_name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    merged = with_adapter(ours, tmp_path / "adapter")
    assert error(logits(case, merged, batch), reference_logits(case, theirs, batch)) < 1e-5


TIED = [
    ({"modules_to_save": ["lm_head"]}, False),
    ({"modules_to_save": ["embed_tokens"]}, False),
    ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
]


@pytest.mark.filterwarnings("ignore:.*(tie|tied).*")  # peft's, of what is tested here
@pytest.mark.parametrize("settings, tied", TIED)
def test_an_adapter_of_peft_alone_in_its_folder(settings, tied, peft, tmp_path):
    """As save_pretrained writes it: without config.json and tokenizer, of a model whose head is its embedding."""
    transformers = pytest.importorskip("transformers")
    base = heedful.load("sums")
    base.model.float()
    base.save(tmp_path / "base")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    how = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **settings}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(**how)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    loaded = heedful.load(tmp_path / "adapter")
    ids = torch.tensor([loaded.tokenizer.encode("12+34=")])
    with torch.no_grad():
        assert error(loaded.model(ids).logits, again(ids).logits) < 1e-5
    assert loaded.model.config.tied == tied
    begin = torch.tensor([loaded.encode_prompt("12+34=")[0]])
    tokens = again.generate(input_ids=begin, max_new_tokens=8, do_sample=False)[0, begin.shape[1] :].tolist()
    (result,) = loaded.complete("12+34=", max_tokens=8, temperature=0)
    ours = result.choices[0].tokens
    assert tokens[: len(ours)] == ours and (len(ours) == 8 or tokens[len(ours) :] == [2])


def saved(tmp_path, **changes):
    model = tiny()
    adapt(model, settings(targets=["attention.output"]))
    folder = tmp_path / "adapter"
    save_adapter(stir(model), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"use_dora": True}, "cannot be trained here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"bias": "all"}, "bias"),
        ({"r": 10**9}, "expected"),
        ({"r": -1}, "numbers above 0"),
        ({"lora_alpha": "much"}, "numbers above 0"),
        ({"rank_pattern": {"(a+)+$": 3}}, "tables of modules' names"),
    ],
)
def test_adapters_of_another_kind_are_refused(changes, message, tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, saved(tmp_path, **changes))
    assert not adapted(model), "nothing was changed"


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match="nothing for this model"):
        load_adapter(tiny("llama", n_kv_heads=2, d_ff=8), folder)
    with pytest.raises(ValueError, match=r"A \[4, 32\] and B \[32, 4\], expected"):
        load_adapter(tiny(d_model=16), folder)
    with pytest.raises(ValueError, match="has what this model has not"):
        load_adapter(tiny(n_layers=1), folder)


def test_pickled_adapters_are_not_opened(tmp_path):
    folder = saved(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="can run code"):
        load_adapter(tiny(), folder)


def test_a_plain_model_has_no_adapter_to_save_and_a_full_folder_is_kept(tmp_path):
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(tiny(), tmp_path / "adapter")
    folder = saved(tmp_path)
    model = tiny()
    adapt(model, settings())
    with pytest.raises(ValueError, match="not empty"):
        save_adapter(model, folder)
