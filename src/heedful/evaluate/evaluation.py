"""Evaluate a model on a task: every score with its 95 % confidence interval, items kept and resumable.

    heedful.load("sentiment").evaluate("classification", "dev.tsv")

With a folder `out`, an evaluation is kept in out/MODEL-TASK-DATA-KEY: items.jsonl has a line for each item, written as
they come, and scores.json the result. The key is a digest of the task, its settings, the data and the weights, so that
an interrupted evaluation goes on where it stopped, and another one never gets its items. The batch size is not part of
it, nor the limit: items of the first N serve a longer evaluation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from heedful import __version__
from heedful.evaluate.bootstrap import Metric, PairedTest, interval, paired_test, value_of
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.evaluate.tasks import create_task
from heedful.text.parse import parse_json
from heedful.text.tokenizer import Tokenizer

EVALUATIONS = "evaluations"  # the folder in a run, or in the current one


@dataclass(frozen=True)
class Score:
    """A metric's value on the items, and its 95 % confidence interval."""

    metric: str
    value: float
    low: float
    high: float
    unit: str  # "%": 0 to 100
    higher_is_better: bool


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a task, and the records of its items."""

    model: str
    task: str
    data: str  # names of the files
    data_hash: str
    n: int
    n_all: int  # items that there are; n of them were evaluated
    settings: Mapping[str, Any]
    scores: list[Score]
    details: Mapping[str, Any]
    records: list[Record] = field(repr=False)
    metrics: list[Metric] = field(repr=False)
    folder: Path | None = None

    def __getitem__(self, metric: str) -> float:
        """The value of a metric by its name."""
        found = {score.metric: score.value for score in self.scores}
        if metric not in found:
            raise KeyError(f"{metric}: the metrics are {', '.join(found)}")
        return found[metric]

    def to_dict(self) -> dict[str, Any]:
        """The result without its records, as scores.json has it; a score that is not defined (NaN) is None."""
        told = {key: getattr(self, key) for key in ("model", "task", "data", "data_hash", "n", "n_all", "settings")}
        scores = [{k: None if v != v else v for k, v in asdict(score).items()} for score in self.scores]
        return {**told, "scores": scores, "details": self.details, "heedful": __version__}


def evaluate(
    loaded: LoadedModel,
    name: str,
    data: str | Path | Sequence[str | Path] = (),
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    weights: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model on a task's items, the first `limit` of them; see the module. `settings` are the task's own.

    Without a folder `out` nothing is written; `resume` False begins anew. `weights` is the `weights_digest` from before
    the weights were packed, which leaves few to tell models apart. `progress` is called with the number of items
    done and of all."""
    for what, number in ("limit", limit), ("batch_size", batch_size):
        if number is not None and number < 1:
            raise ValueError(f"{what} is {number}: it must be 1 or more")
    task = create_task(name, settings).resolved(loaded)
    paths = data_paths(name, task, data)
    items = read_items(task, loaded, paths)
    chosen, data_hash = items[:limit], hash_files(paths)
    used = {key: value for key, value in asdict(task).items() if key != "name"}
    label = ", ".join(path.name for path in paths) or "hub"
    key = {"task": name, "settings": used, "data_hash": data_hash, "weights": weights or weights_digest(loaded)}
    folder = None if out is None else Path(out) / folder_name(loaded.name, name, label, key)
    with ItemsFile(folder, key, chosen, resume=resume) as kept:
        progress(len(kept.records), len(chosen))
        size = batch_size or task.batch_size
        while (done := len(kept.records)) < len(chosen):
            batch = chosen[done : done + size]
            said = task.predict(loaded, batch)
            kept.append([item_record(item, one) for item, one in zip(batch, said, strict=True)])
            progress(len(kept.records), len(chosen))
        records = kept.records
    metrics = task.metrics(records)
    scores = [_score(metric, len(records)) for metric in metrics]
    details = task.details(records)
    result = Evaluation(
        loaded.name, name, label, data_hash, len(records), len(items), used, scores, details, records, metrics, folder
    )
    if folder is not None:
        _write_json(folder / scores_file(result), result.to_dict())
    return result


def compare(first: Evaluation, other: Evaluation) -> list[PairedTest]:
    """How each metric of `other` differs from that of `first`; ValueError unless the items are the same."""
    asked = [[(r["id"], r["input"], r["reference"]) for r in one.records] for one in (first, other)]
    if asked[0] != asked[1]:
        told = " (other windows: set the same window for both)" if "window" in first.settings else ""
        raise ValueError(
            f"{first.model} and {other.model} were not asked the same items{told}: there is no paired test"
        )
    theirs = {metric.name: metric for metric in other.metrics}
    return [paired_test(m, theirs[m.name], first.n) for m in first.metrics if m.name in theirs]


def read_items(task: Task, loaded: LoadedModel, paths: Sequence[Path]) -> Sequence[Item]:
    """The items of a task; ValueError if there are none. Where the reader of a recipe's data wants to know a column,
    the error names the task's setting."""
    try:
        items = task.items(loaded, paths)
    except ValueError as problem:
        raise ValueError(re.sub(r"\bdata\.(text|label|target)\b", r"the setting \1", str(problem))) from None
    if not items:
        raise ValueError(f"{', '.join(map(str, paths))}: there is nothing to evaluate")
    return items


def data_paths(name: str, task: Task, data: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of a task; ValueError where there are too few, too many, or one does not exist."""
    given = [data] if isinstance(data, str | Path) else list(data)
    paths = [Path(os.path.expanduser(path)) for path in given]
    fewest, most = task.n_files
    if not fewest <= len(paths) <= most:
        raise ValueError(f"{name} is measured on data: give {task.reads}")
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"there is no file {path} (nor below a folder that HEEDFUL_DATA names); {name} reads {task.reads}"
            )
    if paths and hasattr(task, "name"):
        from heedful.evaluate.harness import LOCAL_TASKS, local_file

        if task.name not in LOCAL_TASKS:
            raise ValueError(f"{name} is read from the hub; from files there are {', '.join(LOCAL_TASKS)}")
        return [local_file(task.name, paths[0])]
    return paths


def hash_files(paths: Sequence[Path]) -> str:
    """SHA-256 of a file's bytes, or of the hashes of several files and of all in a folder."""
    files = [
        f for path in paths for f in (sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])
    ]
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def weights_digest(loaded: LoadedModel) -> str:
    """A digest of a model's weights and tokenizer; of packed weights, of those that are left and the precision."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(getattr(loaded.model, "_packed_precision", None)).encode())
    for name, tensor in loaded.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    tokenizer = loaded.tokenizer
    for one in () if tokenizer is None else {id(t): t for t in (tokenizer, tokenizer.target)}.values():
        digest.update(_vocabulary(one))
    return digest.hexdigest()


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    text: str = tokenizer.backend.to_str()
    return text.encode()


def folder_name(model: str, task: str, data: str, key: Mapping[str, Any]) -> str:
    """MODEL-TASK-DATA-KEY, with nothing that a file's name cannot have."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()
    parts = [model, task, data.split(",")[0].partition(".")[0]]
    return "-".join([*(re.sub(r"[^\w.]+", "-", part)[:60] for part in parts), digest])


def scores_file(result: Evaluation) -> str:
    """scores.json, or for the first N items scores-first-N.json."""
    return "scores.json" if result.n == result.n_all else f"scores-first-{result.n}.json"


def saved_scores(folder: Path) -> list[dict[str, Any]]:
    """The results of complete evaluations below a folder, as `Evaluation.to_dict` gave them, oldest first; files that
    are damaged are left out."""
    found = []
    for path in sorted(folder.glob("*/scores.json"), key=lambda p: p.stat().st_mtime):
        try:
            result = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(result, dict) and isinstance(result.get("scores"), list):
                found.append(result)
        except (OSError, ValueError):
            continue
    return found


def _score(metric: Metric, n: int) -> Score:
    value, (low, high) = value_of(metric, n), interval(metric, n)
    return Score(metric.name, value, low, high, metric.unit, metric.higher_is_better)


def item_record(item: Item, said: Record) -> Record:
    """The record of an item: what was asked, then what the task's `predict` gave."""
    prediction, score = said.pop("prediction"), said.pop("score")
    asked = {"id": item.id, "input": item.shown, "reference": item.reference}
    return {**asked, "prediction": prediction, "score": score, **said}


def _write_json(path: Path, what: Mapping[str, Any]) -> None:
    """Write a JSON file, complete or not at all."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(what, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


class ItemsFile:
    """The records of an evaluation, appended to items.jsonl of its folder; None keeps them in memory alone."""

    def __init__(self, folder: Path | None, key: Mapping[str, Any], items: Sequence[Item], *, resume: bool) -> None:
        self.records: list[Record] = []
        self.file = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "items.jsonl"
        if not resume:
            path.unlink(missing_ok=True)
        _write_json(folder / "settings.json", {**key, "heedful": __version__})
        kept = 0  # bytes of whole lines that are records of these items
        if path.exists():
            with path.open("rb") as file:
                for item, line in zip(items, file, strict=False):
                    record = _parse(line, item)
                    if record is None:
                        break
                    self.records.append(record)
                    kept += len(line)
        self.file = path.open("ab")
        if len(self.records) < len(items):  # what follows is torn, since a longer evaluation would have gone on
            self.file.truncate(kept)

    def append(self, records: Sequence[Record]) -> None:
        """Add records; they are on the disk when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        self.records += [parse_json(line) for line in lines]  # as they will be read
        if self.file is not None:
            self.file.write("".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))
            self.file.flush()

    def __enter__(self) -> ItemsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _parse(line: bytes, item: Item) -> Record | None:
    """The record in a line; None if it is torn or not that item's."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and {"id", "prediction", "score"} <= record.keys()
    return record if whole and record["id"] == item.id else None
