"""Converting pickled checkpoints (.bin, .pt) to a folder with safetensors, with all their tensors, the head's too.

Each file is opened in a process of its own (`heedful.weights.unpickle`) which reads tensors alone and is bounded in
memory and time. Configs and tokenizer files are copied. The result must fit the model that config.json describes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from heedful.weights import hub
from heedful.weights.folder import (
    PICKLES,
    allowed_roots,
    meta_model,
    own_names,
    read_config,
    regular_file,
    weight_files,
)
from heedful.weights.load import match_tensors
from heedful.weights.safetensors_file import SafetensorsFiles
from heedful.weights.save import new_folder

# What training programs store beside the weights, which has no tensors of the model.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "trainer_state")
COPIED = (".json", ".txt", ".model", ".jinja", ".spm")
MAX_COPIED = 2**28  # bytes of a file that is copied
SLOWEST = 20 * 10**6  # bytes per second below which a conversion is given up,
PATIENCE = 120.0  # after these seconds


def convert_checkpoint(name: str | Path, target: str | Path) -> int:
    """Write the pickled checkpoint `name` (a folder, a file in it, or a hub id) as the folder `target`; returns the
    number of tensors."""
    source, target = Path(name).expanduser(), Path(target)
    if not source.exists() and hub.is_id(str(name)):
        source = hub.download(str(name), pickles=True)
    if not source.exists():
        raise ValueError(f"there is no file or folder {source}")
    folder = source if source.is_dir() else source.parent
    files = pickled_files(folder) if source.is_dir() else {source.name: _safetensors_name(source.name, alone=True)}
    if not is_adapter_file(files):
        meta_model(read_config(folder))  # what heedful cannot load need not be converted
    with new_folder(target) as aside:
        for pickled, file in files.items():
            _unpickle(regular_file(folder, pickled), aside / file)
        _copy_others(folder, aside)
        n = _write_index(aside, list(files.values()))
        if not is_adapter_file(files):
            check_fit(aside)
    return n


def pickled_files(folder: Path) -> dict[str, str]:
    """The folder's pickled weights, and the safetensors file that each becomes."""
    names = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES and not p.name.startswith(NOT_WEIGHTS))
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
        raise ValueError(f"{folder} has safetensors already: there is nothing to convert")
    usual = [n for n in names if n.startswith(("pytorch_model", "adapter_model"))] or names
    if not usual:
        raise ValueError(f"there are no pickled weights ({', '.join(PICKLES)}) in {folder}")
    if len(usual) > 1 and not all("-of-" in n for n in usual):
        raise ValueError(f"which of {', '.join(usual)} are the weights? Give the file instead of its folder")
    return {n: _safetensors_name(n, alone=len(usual) == 1) for n in usual}


def is_adapter_file(files: dict[str, str]) -> bool:
    """Whether the weights are an adapter's, which has no config of a model."""
    return set(files.values()) == {"adapter_model.safetensors"}


def _safetensors_name(name: str, *, alone: bool) -> str:
    if name.startswith("adapter_model"):
        return "adapter_model.safetensors"
    return "model.safetensors" if alone else Path(name.replace("pytorch_model", "model")).stem + ".safetensors"


def _unpickle(source: Path, target: Path) -> None:
    """Run the program that reads the tensors; ValueError with what it says, or if it takes too long."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FORCE")}
    ours = str(Path(__file__).parents[2])
    environment["PYTHONUTF8"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "heedful.weights.unpickle", str(source), str(target)]
    patience = PATIENCE + source.stat().st_size / SLOWEST
    try:
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=patience)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{source} took more than {patience:.0f} seconds: it is not converted") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise ValueError(last if str(source) in last else f"{source} was not converted: {last}")


def _copy_others(folder: Path, target: Path) -> None:
    """Copy the config, the tokenizer and what else is data, from the folder and those in it."""
    roots = allowed_roots(folder)
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        inside = any(path.resolve().is_relative_to(root) for root in roots)
        if path.suffix not in COPIED or path.name.endswith(".index.json") or not inside or not path.is_file():
            continue
        if path.stat().st_size <= MAX_COPIED:
            place = target / path.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def _write_index(folder: Path, files: list[str]) -> int:
    """The index of several shards; the number of tensors."""
    names: dict[str, str] = {}
    for file in files:
        with SafetensorsFiles([folder / file]) as source:
            names |= dict.fromkeys(source.names(), file)
    if len(files) > 1:
        size = sum((folder / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(names)


def check_fit(folder: Path) -> None:
    """ValueError that lists every disagreement between a folder's tensors and its config.json."""
    config = read_config(folder)
    with SafetensorsFiles(weight_files(folder)) as source:
        model = meta_model(config, set(source.names()))
        weights = own_names(model, config) or model.weight_map()
        parameters = dict(model.named_parameters())
        match_tensors(weights.entries(parameters), weights, source, {n: p.shape for n, p in parameters.items()})
