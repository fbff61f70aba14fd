"""`heedful eval`: how good a model is on a task, with confidence intervals; or which of several models is better."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.arguments import MODEL, add_device, add_kv_cache, add_quantize, add_set
from heedful.cli.results import ProgressLines

if TYPE_CHECKING:
    from rich.progress import Progress

    from heedful.evaluate.evaluation import Evaluation

LM_DATA = "lm-benchmarks"  # below HEEDFUL_DATA, the rows of lm_eval's tasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the task, its data, others to compare with."""
    parser.add_argument("model", nargs="?", help=MODEL)
    parser.add_argument(
        "task", nargs="?",
        help="perplexity, translation, exact_match, squad, entities, classification, similarity, bits_per_dimension; "
        "lambada_openai, winogrande, hellaswag, piqa, arc_easy, arc_challenge or another task of "
        "lm-evaluation-harness (--list says more)",
    )  # fmt: skip
    parser.add_argument(
        "data",
        nargs="*",
        help="its files, here or below the folder that HEEDFUL_DATA names; two for translation and exact_match",
    )
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="MODEL", help="other models, each tested against the first"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items alone")
    add_set(parser, "a setting of the task, as window=512; repeatable (--list has them)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="items at a time; the scores do not depend on it")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="where evaluations are kept, each in a folder MODEL-TASK-DATA-KEY with its items and scores (default: "
        "evaluations, in a run's folder for a run, else here)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True,
        help="go on with an evaluation of the same model, settings and data that was interrupted (default)",
    )  # fmt: skip
    add_quantize(parser)
    add_kv_cache(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--list", action="store_true", help="list the tasks, what each reads and its settings")


def run(options: argparse.Namespace) -> int:
    """Evaluate the models and print their scores."""
    if options.list:
        print(describe_tasks())
        return 0
    if options.model is None or options.task is None:
        raise ValueError(
            "which model, and which task? heedful eval MODEL TASK DATA; `heedful eval --list` has the tasks"
        )
    from heedful.evaluate.tasks import check_task

    check_task(options.task)  # before torch and the model are loaded
    from heedful.evaluate.report import format_comparison, format_evaluation

    results = [evaluate_model(name, options) for name in (options.model, *options.compare)]
    if options.json:
        print(json.dumps(comparison(results) if options.compare else results[0].to_dict(), indent=1))
    else:
        print(format_comparison(results) if options.compare else format_evaluation(results[0]))
    return 0


def evaluate_model(name: str, options: argparse.Namespace) -> Evaluation:
    """The evaluation of one model, with a progress bar; it is kept in --out, in the run's folder or here."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    import heedful
    from heedful.evaluate.evaluation import EVALUATIONS, evaluate, weights_digest
    from heedful.evaluate.tasks import create_task
    from heedful.kernels.accelerate import accelerate, accelerate_as_stored
    from heedful.train.recipe import parse_changes
    from heedful.weights.manifest import is_run

    settings = parse_changes(options.set)
    create_task(options.task, settings)  # before the weights are read: a mistake is told at once
    data = find_files(options.task, options.data)
    how = {"device": options.device, "kv_cache": options.kv_cache}
    loaded = heedful.load(name, dtype=None if options.quantize else torch.float32, **how)
    weights = f"{weights_digest(loaded)} {options.quantize}"
    weights += f" {options.kv_cache}" if options.kv_cache else ""
    if options.quantize is not None:
        accelerate(loaded.model, "inference", precision=options.quantize)
    elif loaded.model.device.type == "cpu":
        accelerate_as_stored(loaded.model)
    out = options.out or (Path(name) if is_run(Path(name)) else Path()) / EVALUATIONS
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        return evaluate(
            loaded, options.task, data, limit=options.limit, batch_size=options.batch_size, out=out,
            resume=options.resume, weights=weights, progress=show(bar, loaded.name, console.is_terminal), **settings,
        )  # fmt: skip


def show(bar: Progress, name: str, on_terminal: bool) -> Any:
    """A function that shows how many items are done."""
    if not on_terminal:
        lines = ProgressLines(None, name)
        return lambda done, total: lines.update(done, total)
    task = bar.add_task(name)
    return lambda done, total: bar.update(task, completed=done, total=total)


def find_files(task: str, data: list[str]) -> list[Path]:
    """The data as given or below HEEDFUL_DATA; rows of lm_eval's tasks are looked for there by themselves."""
    from heedful.evaluate.tasks import HARNESS_TASKS
    from heedful.recipes.data_paths import find_data

    if not data and task in HARNESS_TASKS and (found := find_data(LM_DATA)) is not None:
        return [found]
    return [find_data(name) or Path(name) for name in data]


def comparison(results: list[Evaluation]) -> dict[str, Any]:
    """Every result, and the paired tests of each model against the first (null where the items differ)."""
    from dataclasses import asdict

    from heedful.evaluate.evaluation import compare

    first, *others = results
    tests: dict[str, Any] = {}
    for other in others:
        try:
            tests[other.model] = [asdict(test) for test in compare(first, other)]
        except ValueError:
            tests[other.model] = None
    return {"results": [result.to_dict() for result in results], "against_first": tests}


def describe_tasks() -> str:
    """The tasks with what each reads, and its settings with their defaults."""
    from dataclasses import fields

    from heedful.evaluate.tasks import HARNESS_TASKS, TASKS, task_class

    lines, width = [], max(map(len, (*TASKS, *HARNESS_TASKS))) + 2
    for name in TASKS:
        cls = task_class(name)
        settings = ", ".join(f"{f.name}={json.dumps(f.default)}" for f in fields(cls))
        lines += [f"{name:<{width}}{cls.about}", f"{'':<{width}}data: {cls.reads}"]
        lines += [f"{'':<{width}}settings: {settings}"] * bool(settings) + [""]
    lines.append(
        "Of lm-evaluation-harness (pip install 'heedful[harness]'), with rows from a file or folder, else from the"
    )
    lines.append(f"folder {LM_DATA} below HEEDFUL_DATA, else from the hub; others by their names there:")
    lines += [f"{name:<{width}}{about}" for name, about in HARNESS_TASKS.items()]
    return "\n".join(lines)
