"""heedful convert: pickled checkpoints become safetensors with all their tensors, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import heedful
from heedful.cli import main
from heedful.models.base import Batch
from heedful.weights import convert, unpickle
from heedful.weights.save import write_safetensors

IDS = torch.tensor([[3, 5, 8, 13]])


def pickled(reference: torch.nn.Module, folder: Path, n_shards: int = 1) -> Path:
    """A reference model's folder as it was before safetensors."""
    reference.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = list(reference.state_dict().items())
    for i in range(n_shards):
        name = "pytorch_model.bin" if n_shards == 1 else f"pytorch_model-{i + 1:05}-of-{n_shards:05}.bin"
        torch.save(dict(state[i::n_shards]), folder / name)
    return folder


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=30)
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=3)).eval()


@pytest.fixture
def in_process(monkeypatch):
    """The conversion without the process of its own, for speed."""
    run = lambda source, target: write_safetensors(unpickle.read_tensors(source), target)  # noqa: E731
    monkeypatch.setattr(convert, "_unpickle", run)


def test_a_classifier_keeps_its_head(tmp_path, capsys):
    """As a user does it: the error names the command, the command writes what loads."""
    reference, folder, out = bert(), tmp_path / "old", tmp_path / "new"
    pickled(reference, folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]))
    torch.save({"anything": 1}, folder / "training_args.bin")
    with pytest.raises(ValueError, match=f"heedful convert {folder} NEW_FOLDER"):
        heedful.load(folder)
    assert main(["convert", str(folder), str(out)]) == 0
    assert f"{len(reference.state_dict())} tensors written to {out}" in capsys.readouterr().out
    loaded = heedful.load(out)
    with torch.no_grad():
        assert torch.allclose(loaded.model(Batch(IDS)).logits, reference(IDS).logits, atol=1e-6)
    assert len(loaded.classify("a b")) == 3 and not list(out.glob("*.bin"))
    assert main(["convert", str(folder), str(out)]) == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("n_shards", [1, 2])
def test_tied_weights_and_shards(n_shards, tmp_path, in_process):
    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=30)).eval()
    convert.convert_checkpoint(pickled(reference, tmp_path / "old", n_shards), tmp_path / "new")
    with torch.no_grad():
        got = heedful.load(tmp_path / "new").model(IDS).logits
        assert torch.allclose(got, reference(IDS).logits, atol=1e-6)


class Malicious:
    """What a pickle of which runs a command when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
def test_nothing_in_a_file_is_run(save, tmp_path, in_process):
    folder = pickled(bert(), tmp_path / "old")
    save({"weight": torch.zeros(2), "more": Malicious(tmp_path / "touched")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        convert.convert_checkpoint(folder, tmp_path / "new")
    assert not (tmp_path / "touched").exists() and not (tmp_path / "new").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half written stays"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"w": torch.ones(2)}}, None),
        ({"w": torch.ones(2), "epoch": 3}, "'epoch', which is no tensor"),
        ([torch.ones(2)], "no table of tensors"),
        ({}, "no table of tensors"),
        (b"garbage", "cannot be read|more than tensors"),
        (b"", "cannot be read|more than tensors"),
    ],
)
def test_only_tables_of_tensors_are_read(content, message, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    if message is None:
        assert torch.equal(unpickle.read_tensors(path)["w"], torch.ones(2))
    else:
        with pytest.raises(ValueError, match=message):
            unpickle.read_tensors(path)


def test_what_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match="took more than 0 seconds"):
        convert.convert_checkpoint(pickled(bert(), tmp_path / "old"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_tensors_of_another_model_are_told(tmp_path, in_process):
    folder = pickled(bert(), tmp_path / "old")
    torch.save({"embeddings.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="the weights do not fit the model"):
        convert.convert_checkpoint(folder, tmp_path / "new")
    with pytest.raises(ValueError, match="no pickled weights"):
        convert.pickled_files(tmp_path)
