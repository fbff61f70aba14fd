"""Checkpoints: what comes back is what went in, and nothing that happens while saving or afterwards goes unseen."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import heedful
from heedful.models.registry import FAMILIES
from heedful.train.checkpoint import newest_checkpoint, prune_checkpoints, write_checkpoint
from heedful.weights import save as weights
from heedful.weights.manifest import integrity_error
from support.folders import tiny_gpt, tiny_llama
from support.tiny import tiny


def tensors(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "optimizer.mean": torch.randn(7, 5, generator=g),
        "random": torch.get_rng_state(),
        "n": torch.tensor(step),
    }


def save(folder: Path, step: int, **more) -> Path:
    return write_checkpoint(folder, step, tiny_gpt(), None, tensors(step), {"step": step}, **more)


def found(folder: Path) -> tuple[int | None, list[str]]:
    told: list[str] = []
    saved = newest_checkpoint(folder, told.append)
    return (saved.step if saved else None), told


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_come_back_bit_for_bit(family, tmp_path):
    model = tiny(family)
    write_checkpoint(tmp_path, 7, model, None, {}, {})
    saved = newest_checkpoint(tmp_path, pytest.fail)
    assert saved is not None and saved.step == 7
    again = tiny(family)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    saved.restore(again)
    wanted = dict(model.named_parameters())
    assert all(torch.equal(p, wanted[n]) and p.dtype == torch.float32 for n, p in again.named_parameters())
    assert again.config == model.config


def test_tensors_and_numbers_come_back_bit_for_bit(tmp_path):
    base = torch.randn(6, 4)
    given = {
        **tensors(3),
        "transposed": base.T,
        "part": base[1:3],
        "same": base,
        "same again": base,
        "empty": torch.empty(0, 3),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),  # what follows is not aligned in the file
        "half": torch.tensor([1.5, math.nan, -0.0], dtype=torch.bfloat16),
        "is it": torch.tensor([True, False]),
    }
    numbers = {"loss": 0.1 + 0.2, "best": math.inf, "seed": 2**63 + 1, "names": ["é", "\n"], "none": None}
    write_checkpoint(tmp_path, 3, tiny_gpt(), None, given, numbers)
    saved = newest_checkpoint(tmp_path, pytest.fail)
    assert saved is not None and saved.numbers == numbers
    back = saved.tensors()
    assert back.keys() == given.keys()
    for name, tensor in back.items():
        assert tensor.dtype == given[name].dtype and tensor.shape == given[name].shape
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8),
            given[name].contiguous().view(-1).view(torch.uint8),
        )
        assert tensor.data_ptr() % 16 == 0  # its own memory, aligned
        tensor.zero_()
    assert not saved.tensors()["transposed"].eq(0).all()  # nothing was written into the file


def test_a_checkpoint_is_a_model_folder_that_all_may_read(tmp_path):
    path = save(tmp_path, 200)
    assert path == tmp_path / "step-0000200" and names(tmp_path) == ["step-0000200"]
    mine = tiny_gpt()
    loaded = heedful.load(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), mine.parameters(), strict=True))
    assert len({stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()}) == 1


def test_another_model_is_not_filled(tmp_path):
    save(tmp_path, 1)
    saved = newest_checkpoint(tmp_path, pytest.fail)
    assert saved is not None
    with pytest.raises(ValueError, match="holds another model: they differ in"):
        saved.restore(tiny_llama())
    with pytest.raises(ValueError, match=r"another model: .* \[61, 32\] there and \[61, 16\] here"):
        saved.restore(tiny_gpt(d_model=16))


def test_an_adapter_alone_and_more_files(tmp_path):
    def adapter(folder: Path) -> None:
        (folder / "adapter.txt").write_text("small")

    path = save(tmp_path, 1, write_model=adapter, also={"1_Pooling/config.json": {"mean": True}})
    assert names(path) == [
        "1_Pooling",
        "adapter.txt",
        "manifest.json",
        "training.json",
        "training.safetensors",
    ]
    assert json.loads((path / "1_Pooling/config.json").read_text()) == {"mean": True}
    assert integrity_error(path) is None
    (path / "1_Pooling/config.json").write_text("{}")
    assert "1_Pooling/config.json" in str(integrity_error(path))


def test_no_checkpoint_is_no_error(tmp_path):
    assert found(tmp_path) == (None, []) and found(tmp_path / "nowhere") == (None, [])


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_in_every_file(tmp_path):
    save(tmp_path, 100)
    path = save(tmp_path, 200)
    assert len(names(path)) == 6
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for place in {0, len(good) // 3, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[place] ^= 1
            file.write_bytes(bad)
            step, told = found(tmp_path)
            assert step == 100 and len(told) == 1
            assert told[0].startswith(f"step-0000200 is damaged: {file.name} is not as it was written")
            assert told[0].endswith("; using step-0000100")
        file.write_bytes(good)
    assert found(tmp_path) == (200, [])


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "training.json", "manifest.json"])
def test_lost_and_cut_files_are_found(file, tmp_path):
    save(tmp_path, 100)
    path = save(tmp_path, 200) / file
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    step, told = found(tmp_path)
    assert step == 100 and file in told[0]
    path.unlink()
    step, told = found(tmp_path)
    assert step == 100 and told == [f"step-0000200 is damaged: {file} is not there; using step-0000100"]


def test_every_damaged_one_is_told_of(tmp_path):
    for step in (1, 2, 3):
        (save(tmp_path, step) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged") as refused:
        found(tmp_path)
    assert all(f"step-000000{step}: config.json" in str(refused.value) for step in (1, 2, 3))
    save(tmp_path, 3)  # a save of the same step takes the place of the damaged one
    assert found(tmp_path) == (3, [])


def test_a_manifest_that_names_files_elsewhere_is_damaged(tmp_path):
    path = save(tmp_path / "c", 1)
    (tmp_path / "outside").write_text("x")
    from heedful.weights import manifest

    record = manifest.read_manifest(path)
    record["files"]["../../outside"] = {"size": 1, "blake2b": manifest._hash(tmp_path / "outside")}
    (path / "manifest.json").write_bytes(manifest._with_hash(record))
    assert integrity_error(path) == "manifest.json is not as it was written"


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> list[list[str]]:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork and SIGKILL")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kill.py"), tmp_path_factory.mktemp("killed"), "50"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_killed_at_any_moment_the_newest_complete_one_is_whole(killed):
    kills = [line for line in killed if line[0] != "limit"]
    assert not [line for line in kills if line[0] != "good"]
    assert len(kills) > 50 + 80  # operations of two saves
    left = " ".join(line[4] for line in kills)
    for what in ("step-0000300.partial", "step-0000100.gone", "step-0000300.old"):
        assert what in left  # some were killed in the middle of each thing there is to do


def test_leftovers_of_killed_saves_are_removed_by_the_next(tmp_path):
    save(tmp_path, 1)
    for name in (".step-0000002.partial", ".step-0000001.old", ".step-0000009.gone"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / ".mine").mkdir()
    assert found(tmp_path) == (1, [])
    save(tmp_path, 2)
    assert names(tmp_path) == [".mine", "step-0000001", "step-0000002"]


def test_one_killed_between_two_renames_comes_back(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".step-0000002.old")
    assert found(tmp_path) == (2, []) and names(tmp_path) == ["step-0000001", "step-0000002"]


# --- no room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["os.fsync", "Path.write_text", "save_file"])
def test_a_full_disk_leaves_the_old_ones_and_says_what_to_do(fails, tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        if fails == "save_file":  # as safetensors says it
            raise SafetensorError("Error while serializing: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with monkeypatch.context() as patch:
            where = {"os.fsync": os, "Path.write_text": Path, "save_file": weights}[fails]
            patch.setattr(where, fails.split(".")[-1], full)
            with pytest.raises(OSError, match="no space left") as error:
                save(tmp_path, step)
        assert error.value.errno == errno.ENOSPC
        for words in (f"step-000000{step}", "needs about 0.1 MB", "MB are free", "as they were", "--resume"):
            assert words in str(error.value)
        assert names(tmp_path) == ["step-0000001"] and found(tmp_path) == (1, [])
    save(tmp_path, 2)
    assert found(tmp_path) == (2, [])


def test_a_limit_of_the_system(killed):
    [(_, error, newest_step, there)] = [line for line in killed if line[0] == "limit"]
    assert "step-0000200 could not be written, file too large: it needs about 2.1 MB" in error
    assert newest_step == "100" and there == "['step-0000100']"


def test_an_error_of_another_kind_is_not_said_to_be_the_disk(tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        write_checkpoint(tmp_path, 1, tiny_gpt(), None, {}, {"what": object()})
    assert names(tmp_path) == []


# --- removing --------------------------------------------------------------------------------------------------------


def test_the_newest_and_the_protected_stay(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, 2, [1])
    assert names(tmp_path) == ["step-0000001", "step-0000004", "step-0000005"]
    prune_checkpoints(tmp_path, 0)
    assert names(tmp_path) == ["step-0000005"]


def test_the_newest_that_is_whole_stays_whatever_is_newer(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-0000004" / "manifest.json").unlink()
    file = tmp_path / "step-0000003" / "config.json"  # the same size, another byte
    file.write_bytes(file.read_bytes()[::-1])
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["step-0000002", "step-0000003", "step-0000004"]
    assert found(tmp_path)[0] == 2


def test_steps_are_in_the_order_of_numbers(tmp_path):
    for step in (9_999_999, 10_000_000, 5):
        save(tmp_path, step)
    assert found(tmp_path) == (10_000_000, [])
