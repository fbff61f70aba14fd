"""What is exported ends, is read and computes in transformers (and by its metadata in llama.cpp) as here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from heedful.cli import main
from heedful.data.images import decode_image
from heedful.loaded import Loaded
from heedful.models.image_gpt import ImageGPT
from heedful.models.transformer import Transformer, TransformerConfig
from heedful.recipes.launch import train
from heedful.weights.resolve import shipped_models
from heedful.zoo import read_card
from support.trainings import changes

transformers = pytest.importorskip("transformers")

PROMPTS = {
    "chat": "Hello",
    "books": "It was",
    "shakespeare": "ROMEO:",
    "tiny": "the",
    "tiny-books": "It was",
    "sums": "12+34=",
    "t5-tasks": "translate English to German: A man sleeps.",
    "translator": "Ein Mann schläft.",
}
END = {"chat", "sums", "t5-tasks", "translator"}  # whose answers to these end before 40 tokens
PLAIN: dict[str, Any] = {"repetition_penalty": 1.0}


def theirs(folder, loaded: Loaded, prompt: str, n: int) -> tuple[list[int], list[int]]:
    """The prompt and the new tokens, as transformers generates greedily."""
    auto = transformers.AutoModelForCausalLM if loaded.continues_prompt else transformers.AutoModelForSeq2SeqLM
    model, tokenizer = auto.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    begin = inputs["input_ids"]
    found = model.generate(**inputs, max_new_tokens=n, do_sample=False, num_beams=1, **PLAIN)[0].tolist()
    return begin[0].tolist(), found[begin.shape[1] if loaded.continues_prompt else 1 :]


def assert_same_end(folder, loaded: Loaded, prompt: str, n: int) -> bool:
    """Whether the text ended before n tokens."""
    chats = loaded.tokenizer.chat_template is not None
    target, source = loaded.encode_prompt(prompt, chat=chats)
    (result,) = loaded.complete(prompt, chat=chats, max_tokens=n, temperature=0, beams=1, **PLAIN)
    ours = result.choices[0].tokens
    begin, tokens = theirs(folder, loaded, prompt, n)
    assert begin == list(source or target)
    ended = result.choices[0].finish_reason == "stop"
    assert tokens[: len(ours)] == ours
    assert len(tokens) == len(ours) + ended, "the end is one token more there"
    assert not ended or tokens[-1] in loaded.chat_eos_ids
    return ended


@pytest.mark.parametrize("name", PROMPTS)
def test_an_export_ends_as_here(name, tmp_path):
    loaded = heedful.load(name)
    loaded.save(tmp_path / "m")
    n = min(40, (loaded.model.context_length or 99) - 20)
    assert assert_same_end(tmp_path / "m", loaded, PROMPTS[name], n) == (name in END)
    again = heedful.load(tmp_path / "m")
    assert (again.bos_id, again.eos_ids, again.pad_id) == (loaded.bos_id, loaded.chat_eos_ids, loaded.pad_id)


def ends(folder) -> list[int] | int | None:
    return transformers.GenerationConfig.from_pretrained(folder).eos_token_id


@pytest.mark.parametrize("name", shipped_models())
def test_the_files_of_models_that_ship_have_every_special_token(name):
    """Their weights are compressed: transformers reads the configs as they are."""
    folder, loaded = shipped_models()[name], heedful.load(name)
    if "generate" not in loaded.abilities or isinstance(loaded.model, ImageGPT):
        assert not (folder / "generation_config.json").exists() or isinstance(loaded.model, ImageGPT)
        return
    generation = transformers.GenerationConfig.from_pretrained(folder)
    found = generation.eos_token_id
    assert ([] if found is None else found if isinstance(found, list) else [found]) == list(loaded.chat_eos_ids)
    assert (generation.bos_token_id, generation.pad_token_id) == (loaded.bos_id, loaded.pad_id)
    assert generation.decoder_start_token_id == (None if loaded.continues_prompt else loaded.model.start_id)
    config = json.loads((folder / "config.json").read_text())
    assert {"bos_token_id", "eos_token_id", "pad_token_id"} <= config.keys()
    if config["model_type"] != "heedful":
        assert transformers.AutoConfig.from_pretrained(folder).eos_token_id == found


def test_a_model_of_characters_has_no_letter_for_an_end(tmp_path):
    """LLaMA's end is token 2 unless config.json has a null: here a letter."""
    run = tmp_path / "run"
    (tmp_path / "my.txt").write_text("the cat sees the dog and the dog sees the cat. " * 40)
    train(tmp_path / "my.txt", changes(), folder=run, quiet=True)
    assert main(["export", str(run), str(tmp_path / "m")]) == 0
    loaded = heedful.load(run)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    assert config.model_type == "llama" and config.eos_token_id is None and config.bos_token_id is None
    assert ends(tmp_path / "m") is None
    loaded.model.head.weight.data[2] += 100 * loaded.model.head.weight.data.abs().max()  # it writes this letter alone
    loaded.save(tmp_path / "letter")
    assert not assert_same_end(tmp_path / "letter", loaded, "the cat", 9)
    best = next((run / "checkpoints").glob("step-*"))
    assert "generation_config.json" in {path.name for path in best.iterdir()}, "a checkpoint is read as it is, too"


def test_ids_outside_the_vocabulary_are_not_written(tmp_path):
    loaded = heedful.load("tiny")
    loaded.model.special = {"bos_token_id": 50256, "eos_token_id": [50256, 3], "pad_token_id": -1}
    loaded.save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [None, [3], None]
    assert ends(tmp_path / "m") == [3]


@pytest.mark.parametrize("name", ["chat", "books", "tiny-books"])
def test_a_gguf_file_ends_as_here(name, tmp_path):
    """llama.cpp ends at eos, at the end of a turn, and at special tokens of these names."""
    gguf = pytest.importorskip("gguf")
    by_name = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"}
    loaded = heedful.load(name)
    loaded.save_gguf(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    found = {fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")} - {None}
    control = [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == gguf.TokenType.CONTROL]
    found |= {i for i in control if fields["tokenizer.ggml.tokens"][i] in by_name}
    assert found == set(loaded.chat_eos_ids)
    again = heedful.load(tmp_path / "m.gguf")
    assert set(again.chat_eos_ids) == set(loaded.chat_eos_ids)


def test_a_gguf_file_has_three_ends_as_llama_3_has(tmp_path):
    gguf = pytest.importorskip("gguf")
    loaded = heedful.load("tiny-books")
    ends = [len(loaded.tokenizer) - n for n in (2, 3, 4)]
    loaded.model.special["eos_token_id"] = ends
    loaded.save_gguf(tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert [fields[f"tokenizer.ggml.{end}_token_id"].contents() for end in ("eos", "eot", "eom")] == ends
    assert heedful.load(tmp_path / "m.gguf").eos_ids == tuple(ends)


# --- other layouts ---------------------------------------------------------------------------------------------------

SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 48, "vocab_size": 41, "max_len": 24, "start_id": 3}
TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"n_decoder_layers": 1, "act": "gelu", "scale_embedding": False},
    {"shared": False, "target_vocab_size": 37},
    {"shared": False, "tied": False, "positions": "halves"},
    {"pad_id": 0, "start_id": 0},
]


@pytest.mark.parametrize("settings", TRANSFORMERS)
def test_a_transformer_of_2017_is_written_as_marian(settings, tmp_path):
    torch.manual_seed(0)
    model = Transformer.create(TransformerConfig(**(SMALL | settings))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.special = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 0}
    heedful.save(model, tmp_path / "m")
    reference, info = transformers.MarianMTModel.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["unexpected_keys"]
    source, target = torch.randint(5, 37, (2, 3, 9))
    batch = heedful.models.base.Batch(target, source=source)
    with torch.no_grad():
        ours = model(batch).logits
        hub = reference.eval()(input_ids=source, decoder_input_ids=target).logits
        again = heedful.load(tmp_path / "m").model(batch).logits
    torch.testing.assert_close(hub[..., : ours.shape[-1]], ours, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, ours, atol=1e-5, rtol=1e-5)


def test_the_translator_translates_a_batch_as_in_transformers(tmp_path):
    """Sentences of several lengths, padded."""
    loaded = heedful.load("translator")
    loaded.save(tmp_path / "m")
    texts = ["Ein Mann schläft.", "Zwei Hunde spielen im Schnee mit einem roten Ball."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m")
    found = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=30, num_beams=1)
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == loaded.generate(texts, beams=1, temperature=0)


@pytest.mark.parametrize("settings", [{"norm_first": True}, {"final_norms": True}, {"max_len": None}])
def test_what_transformers_does_not_read_is_said(settings, tmp_path, capsys):
    heedful.save(Transformer.create(TransformerConfig(**(SMALL | settings))), tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "n")]) == 0
    said = capsys.readouterr().out
    assert "heedful alone reads this folder" in said and "Marian's layout" in said
    assert main(["export", "reversal", str(tmp_path / "r")]) == 0
    assert "transformers has no model like a seq2seq" in capsys.readouterr().out
    assert "transformers does not read" in (tmp_path / "r" / "README.md").read_text()


@pytest.mark.parametrize("n_channels", [1, 3])
def test_an_export_of_a_vision_model_makes_the_same_pixels(n_channels, tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    if n_channels == 1:
        loaded, side = heedful.load("fashion"), 28
    else:
        sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16, "image_size": 16, "patch_size": 4}
        loaded, side = Loaded(heedful.create("vit-b-16", **sizes), None, "small"), 23
    pixels = draw.integers(0, 256, (side, side, 3)[: 2 + (n_channels == 3)], dtype=np.uint8)
    image_module.fromarray(pixels).save(tmp_path / "image.png")
    loaded.save(tmp_path / "m")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "m")
    with image_module.open(tmp_path / "image.png") as image:
        found = processor(image, return_tensors="pt")["pixel_values"]
    size = loaded.model.config.image_size
    ours = decode_image(tmp_path / "image.png", size)[..., :n_channels].copy()
    ours = torch.from_numpy(ours).permute(2, 0, 1)[None].float() * (2 / 255) - 1
    torch.testing.assert_close(found, ours, atol=1e-5, rtol=0)


# --- saving ----------------------------------------------------------------------------------------------------------


def test_what_load_returns_is_saved_with_its_tokenizer(tmp_path):
    loaded = heedful.load("sums")
    heedful.save(loaded, tmp_path / "m")
    again = heedful.load(tmp_path / "m")
    assert again.generate("12+34=", temperature=0) == loaded.generate("12+34=", temperature=0)
    other = heedful.load("tiny").tokenizer
    heedful.save(loaded.model, tmp_path / "n", loaded.tokenizer)
    heedful.save(loaded, tmp_path / "o", other)
    assert len(heedful.load(tmp_path / "n").tokenizer) == len(loaded.tokenizer)
    assert len(heedful.load(tmp_path / "o").tokenizer) == len(other)


@pytest.mark.parametrize("name", ["chat", "sentiment", "fashion", "reversal"])
def test_an_export_has_a_card(name, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    heedful.load(name).save(tmp_path / "m")
    card = hub.ModelCard.load(tmp_path / "m" / "README.md")
    source = read_card(shipped_models()[name]).metadata
    assert card.data.license == source["license"] and card.data.datasets == source["datasets"]
    assert card.data.library_name == ("heedful" if name == "reversal" else "transformers")
    assert "heedful.load(" in card.text and name in card.text
    assert ("from_pretrained" in card.text) == (name != "reversal")
    heedful.load(tmp_path / "m").save(tmp_path / "n")
    assert hub.ModelCard.load(tmp_path / "n" / "README.md").data.license == source["license"], "it is passed on"
