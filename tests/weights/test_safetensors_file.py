"""Safetensors files that lie about themselves: an error at once, nothing allocated, nothing half loaded."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import heedful
from heedful.weights.safetensors_file import SafetensorsFiles
from support.folders import safetensors_bytes, saved, tiny_llama

DATA = bytes(range(24))


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def read(path, content: bytes) -> dict[str, torch.Tensor]:
    path.write_bytes(content)
    with SafetensorsFiles([path]) as files:
        return {name: files.get(name).clone() for name in files.names()}


def test_a_good_file_is_read(tmp_path):
    found = read(tmp_path / "x", safetensors_bytes({"a": entry(), "__metadata__": {"format": "pt"}}, DATA))
    assert found["a"].shape == (2, 3) and found["a"].numpy().tobytes() == DATA


BAD = {
    "empty": b"",
    "short": b"\x01\x00",
    "length past the file": struct.pack("<Q", 10**6) + b"{}",
    "absurd length": struct.pack("<Q", 2**63) + b"{}" + DATA,
    "largest length": b"\xff" * 8 + b"{}",
    "no JSON": safetensors_bytes(b"{'a': 1}", DATA),
    "half JSON": safetensors_bytes(b'{"a": {"dtype": "F32"', DATA),
    "no UTF-8": safetensors_bytes(b'{"\xff": 1}', DATA),
    "deep JSON": safetensors_bytes(b'{"a":' + b"[" * 200_000, DATA),
    "a list": safetensors_bytes([entry()], DATA),
    "a number": safetensors_bytes(b"7", DATA),
    "an entry that is no object": safetensors_bytes({"a": [1]}, DATA),
    "no dtype": safetensors_bytes({"a": {"shape": [2, 3], "data_offsets": [0, 24]}}, DATA),
    "something more": safetensors_bytes({"a": entry() | {"code": "import os"}}, DATA),
    "unknown dtype": safetensors_bytes({"a": entry("F31")}, DATA),
    "dtype that is no text": safetensors_bytes({"a": entry(["F32"])}, DATA),
    "shape too small": safetensors_bytes({"a": entry(shape=(2, 2))}, DATA),
    "shape too large": safetensors_bytes({"a": entry(shape=(2, 4))}, DATA),
    "negative shape": safetensors_bytes({"a": entry(shape=(-2, -3))}, DATA),
    "shape with a fraction": safetensors_bytes({"a": entry(shape=(2.0, 3))}, DATA),
    "shape with a truth": safetensors_bytes({"a": entry(shape=(True, 6))}, DATA),
    "shape that is no list": safetensors_bytes({"a": entry() | {"shape": "23"}}, DATA),
    "overflowing shape": safetensors_bytes({"a": entry(shape=(2**62, 4, 6))}, DATA),
    "shape that overflows to the right size": safetensors_bytes({"a": entry(shape=(2**63, 2, 6))}, DATA),
    "zero times absurd": safetensors_bytes({"a": entry(shape=(0, 2**70), offsets=(0, 0))}),
    "a thousand dimensions": safetensors_bytes({"a": entry(shape=[1] * 1000 + [6])}, DATA),
    "range past the file": safetensors_bytes({"a": entry(shape=(2, 6), offsets=(0, 48))}, DATA),
    "range backwards": safetensors_bytes({"a": entry(offsets=(24, 0))}, DATA),
    "negative range": safetensors_bytes({"a": entry(offsets=(-24, 0))}, DATA),
    "three offsets": safetensors_bytes({"a": entry(offsets=(0, 24, 24))}, DATA),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(shape=(1,), offsets=(8, 12))}, DATA),
    "same range twice": safetensors_bytes({"a": entry(), "b": entry()}, DATA),
    "hole": safetensors_bytes({"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(20, 24))}, DATA),
    "does not begin at 0": safetensors_bytes({"a": entry(shape=(5,), offsets=(4, 24))}, DATA),
    "bytes left over": safetensors_bytes({"a": entry()}, DATA + b"more"),
    "bytes missing": safetensors_bytes({"a": entry()}, DATA[:-1]),
    "name twice": safetensors_bytes(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode(), DATA),
    "metadata that is no table": safetensors_bytes({"__metadata__": [1], "a": entry()}, DATA),
    "metadata with a number": safetensors_bytes({"__metadata__": {"a": 1}, "a": entry()}, DATA),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_headers_are_refused(content, tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read(path, content)


def test_an_absurd_length_allocates_nothing(tmp_path):
    """A sparse file of 2 GB whose header claims all of it."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**31 - 8))
        file.truncate(2**31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="not a safetensors file"):
        SafetensorsFiles([path])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(safetensors_bytes({"a": entry()}, DATA))
    with SafetensorsFiles([path]) as files:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(OSError, match="was changed"):
            files.get("a")


def test_a_tensor_in_two_shards(tmp_path):
    for name in "x", "y":
        (tmp_path / name).write_bytes(safetensors_bytes({"a": entry()}, DATA))
    with pytest.raises(ValueError, match="in another file too"):
        SafetensorsFiles([tmp_path / "x", tmp_path / "y"])


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["pickle", "zip"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.safetensors"])
def test_a_pickle_is_never_opened(kind, name, tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    trap = tmp_path / "trap"
    payload = pickle.dumps(Payload(str(trap)))
    if kind == "pickle":
        (folder / name).write_bytes(payload)
    else:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("model/data.pkl", payload)
    message = "pickle" if name == "model.safetensors" else "heedful convert"
    for given_name in folder, folder / name:
        with pytest.raises(ValueError, match=message if given_name is folder else "."):
            heedful.load(given_name)
    assert not trap.exists()


def test_a_git_lfs_pointer_says_what_to_do(tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        heedful.load(folder)


GOOD = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4).half(), "c": torch.zeros(0, 3)})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoiled_bytes_are_an_error_or_mean_the_same(data, tmp_path):
    """Changed, cut and lengthened at random: either an error, or tensors that fill the file exactly."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(st.sampled_from(["set", "delete", "insert", "cut"]))
        if what == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif what == "delete":
            del content[at : at + data.draw(st.integers(1, 8))]
        elif what == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            del content[max(at, 1) :]
        if not content:
            return
    try:
        found = read(tmp_path / "x", bytes(content))
    except (ValueError, OSError):
        return
    length = int.from_bytes(content[:8], "little")
    assert sum(t.nbytes for t in found.values()) == len(content) - 8 - length


def test_one_changed_byte_in_a_model_is_an_error_or_a_number(tmp_path):
    """The whole way through `load`: only the header's bytes, where every change is about meaning."""
    folder = saved(tmp_path / "m", tiny_llama(n_layers=1))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, 8 + length, (150,), generator=generator).tolist():
        spoiled = bytearray(content)
        spoiled[at] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        path.write_bytes(bytes(spoiled))
        try:
            heedful.load(folder)
        except (ValueError, OSError):
            pass
