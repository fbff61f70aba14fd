"""Start or resume a training run: what `heedful train` does.

from heedful.recipes import train

model = train("my.txt", {"train": {"steps": 200}})
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful import __version__
from heedful.data.dataset import Draw
from heedful.loaded import Loaded, load
from heedful.models.base import Model, TruncationWarning
from heedful.models.image_gpt import ImageGPT
from heedful.recipes.build import CONVERSATIONS, TrainingSetup, build_training
from heedful.recipes.resolve import resolve_recipe
from heedful.tasks.complete_image import completion_grid
from heedful.tasks.exact import right_answers
from heedful.text import Tokenizer
from heedful.train.adapters import adapt, adapted
from heedful.train.checkpoint import Checkpoint
from heedful.train.distributed import Processes
from heedful.train.recipe import Recipe, merge_tables
from heedful.train.run import Run, to_toml
from heedful.train.runlog import RunLog
from heedful.train.trainer import Summary, Trainer, trainable_parameters
from heedful.weights.adapter import load_adapter
from heedful.weights.save import save_tokenizer, write_config
from heedful.weights.save_adapter import write_adapter

N_COMPLETED = 8  # images of which samples complete the upper half


def train(
    what: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    init_from: str | None = None,
    kind: str = "",
    sample: bool = False,
    folder: Path | None = None,
    quiet: bool = False,
) -> Loaded:
    """Train by a recipe (name or file), or on a data file or folder; returns the best model of the run.

    `changes` are settings of the recipe, {"train": {"steps": 200}}; `init_from` is a model to fine-tune; `kind` says
    what data is read as ("labels" for example), `sample` replaces a recipe's data by a small sample; `folder` is the
    run's folder, by default runs/NAME-1 and so on.
    """
    found = resolve_recipe(what, changes, init_from=init_from, kind=kind, sample=sample)
    return _run(found.recipe, folder or found.name, quiet, notes=found.notes)


def resume(
    folder: str | Path, changes: Mapping[str, Any] | None = None, *, restart: bool = False, quiet: bool = False
) -> Loaded:
    """Resume a run from its newest checkpoint; the result is that of a run never interrupted.

    A run whose checkpoints are all damaged is refused and left as it is. `restart` starts any run anew at step 1: what
    was there is moved to a subfolder before-1, -2 and so on.
    """
    run = Run.open(Path(folder))
    return _run(Recipe.from_dict(merge_tables(run.recipe, changes or {})), run.folder, quiet, run, restart)


def _run(
    recipe: Recipe,
    folder: Path | str,
    quiet: bool,
    run: Run | None = None,
    restart: bool = False,
    notes: Sequence[str] = (),
) -> Loaded:
    """Set up and train in a new folder, or in that of `run`; a name (str) becomes a new folder runs/NAME-N."""
    if "lora" in recipe.adapter.kind and "init_from" not in recipe.model:
        raise ValueError(
            f"{recipe.adapter.kind} adapts a model that is trained already: say which with --init-from MODEL"
        )
    with Processes.start(recipe.train.device) as processes, ExitStack() as ending:
        say = _Say(quiet or not processes.main)
        saved = tokenizer = None
        with processes.main_first():  # it fills the cache of tokenized text
            if run is not None:
                if processes.main:
                    run.lock()
                    ending.callback(run.unlock)  # also after an error: a notebook may try again
                saved = None if restart else run.newest(say)
                tokenizer = run.tokenizer() if saved is None else _tokenizer(saved.path)
            setup = build_training(recipe, tokenizer)
        for note in (*notes, *setup.notes):
            say(note)
        if recipe.adapter.kind != "none":
            adapt(setup.model, setup.recipe.adapter)
            n_trainable = sum(p.numel() for p in trainable_parameters(setup.model))
            say(f"{recipe.adapter.kind}: {n_trainable:,} parameters learn")
        if isinstance(folder, str):
            folder = Path(processes.broadcast_text(str(Run.next_name(Path("runs"), folder))))
        plain = setup.recipe.to_dict()
        if run is None:
            if processes.main:
                run = Run.create(folder, to_toml(plain), _facts(setup))
                ending.enter_context(_removed_unless_begun(run))
                run.lock()
                ending.callback(run.unlock)
                if setup.tokenizer is not None:
                    setup.tokenizer.save(run.folder)
        else:
            run.check_same(plain, _facts(setup))
            if processes.main:
                if restart and (aside := run.set_aside()) is not None:
                    say(f"starting anew at step 1; what was there is in {aside}")
                run.rewrite_recipe(to_toml(plain))
        summary = _train(setup, run, folder, saved, processes, quiet, notes if saved is None else ())
        say("")
    if summary.reason == "stopped":
        say(f"stopped at step {summary.step}; `heedful train --resume {folder}` goes on")
    return load(folder)


@contextmanager
def _removed_unless_begun(run: Run) -> Iterator[None]:
    """Remove a new run's folder if it fails before its first step, so that the corrected command may use it."""
    try:
        yield
    except BaseException:
        if not run.has_begun():
            shutil.rmtree(run.folder)
        raise


def _train(
    setup: TrainingSetup,
    run: Run | None,
    folder: Path,
    saved: Checkpoint | None,
    processes: Processes,
    quiet: bool,
    notes: Sequence[str],
) -> Summary:
    """Train with a log, checkpoints and samples, from the checkpoint `saved` if there is one; the log begins with
    `notes`, which were shown before."""
    recipe = setup.recipe
    log = RunLog(
        folder if processes.main else None,
        steps=recipe.train.steps,
        begin=0 if saved is None else saved.step,
        settings=recipe.log,
        quiet=quiet or not processes.main,
        baselines=setup.baselines,
        bytes_per_token=setup.bytes_per_token,
        dimensions=setup.model.palette.shape[1] if isinstance(setup.model, ImageGPT) else None,
        unit="images" if recipe.data.kind == "images" else "tokens",
    )
    with log:
        for note in notes:
            log.note(note, show=False)
        if processes.main:
            processes.report = log.note  # the run's log says which process failed
        if saved is not None:
            if adapted(setup.model):
                load_adapter(setup.model, saved.path)
            else:
                saved.restore(setup.model)
        trainer = Trainer(
            setup.model,
            setup.objective,
            setup.train,
            setup.validation,
            recipe,
            processes=processes,
            log=log,
            save=_Saver(run, setup),
            sample=_Sampler(setup) if recipe.log.samples else None,
        )
        if saved is not None:
            trainer.restore(saved.tensors(), saved.numbers)
            log.note(f"going on from step {saved.step}")
        summary = trainer.train()
        scores = _right_answers(setup, log) if recipe.data.kind == "reversal" and processes.main else {}
        log.finish(
            {
                **scores,
                "step": summary.step,
                "best": summary.best,
                "best_step": summary.best_step,
                "reason": summary.reason,
                "folder": str(folder),
                "validation_examples": 0 if setup.validation is None else len(setup.validation),
            },
            next_commands=next_commands(setup, folder),
        )
    return summary


def next_commands(setup: TrainingSetup, folder: Path) -> list[str]:
    """What to type to use the model of a run."""
    abilities, kind = setup.model.abilities, setup.recipe.data.kind
    if kind == "images":
        return [f"heedful classify --model {folder} --image FILE", f"heedful serve {folder} --open"]
    if kind in CONVERSATIONS and setup.tokenizer is not None and setup.tokenizer.chat_template is not None:
        return [f"heedful chat --model {folder}", f"heedful serve {folder} --open"]
    commands = {
        "translate": 'heedful translate --model {} "..."',
        "classify": 'heedful classify --model {} "..."',
        "tag": 'heedful tag --model {} "..."',
        "answer": 'heedful answer --model {} "QUESTION" "PASSAGE"',
        "generate": 'heedful generate {} "..."',
        "fill": 'heedful fill {} "... _ ..."',
    }
    usable = abilities if setup.tokenizer is not None else ()
    command = next((text.format(folder) for ability, text in commands.items() if ability in usable), None)
    return [*([command] if command else []), f"heedful serve {folder} --open"]


def _right_answers(setup: TrainingSetup, log: RunLog) -> dict[str, dict[str, float]]:
    """The shares of right symbols and sequences in the training and the test data, logged too."""
    found = {}
    for name, data in ("training", setup.train), ("test", setup.validation):
        if data is not None:
            symbols, sequences = right_answers(setup.model, data)
            log.note(f"{name} data: {100 * symbols:.1f} % of symbols, {100 * sequences:.1f} % of sequences are right")
            found[f"right_in_{name}"] = {"symbols": symbols, "sequences": sequences}
    return found


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that was saved with a checkpoint, if it has one."""
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def _facts(setup: TrainingSetup) -> dict[str, Any]:
    """The run's facts.json: data fingerprints, which must match on resume, and versions."""
    return {
        "data": setup.train.fingerprint,
        "validation": "" if setup.validation is None else setup.validation.fingerprint,
        "versions": {"heedful": __version__, "torch": torch.__version__},
    }


class _Say:
    """Prints notes to stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


class _Saver:
    """Writes checkpoints: the whole model, or its adapters alone."""

    def __init__(self, run: Run | None, setup: TrainingSetup) -> None:
        self.run, self.setup = run, setup

    def __call__(self, trainer: Trainer, better: bool) -> None:
        tensors, numbers = trainer.state()
        alone = self._write_adapter if adapted(trainer.model) else None
        with trainer.processes.gathered(trainer.model, tensors) as whole:
            if self.run is not None and trainer.processes.main:
                self.run.save(
                    trainer.step,
                    trainer.model,
                    self.setup.tokenizer,
                    whole,
                    numbers,
                    better,
                    keep=trainer.settings.keep,
                    write_model=alone,
                )

    def _write_adapter(self, folder: Path) -> None:
        """Write the adapter, with the whole model's config: its head may differ from that of the base model."""
        model, tokenizer = self.setup.model, self.setup.tokenizer
        base = str(self.setup.recipe.model["init_from"])
        write_adapter(folder, model, str(Path(base).resolve()) if Path(base).exists() else base)
        write_config(folder, model, tokenizer)
        if tokenizer is not None:
            save_tokenizer(folder, tokenizer, model)


class _Sampler:
    """Generates a sample: text from the prompt, or completions of the first validation images' upper halves."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup, self.settings = setup, setup.recipe.log

    def __call__(self, model: Model, step: int) -> str | np.ndarray | None:
        if isinstance(model, ImageGPT) and self.setup.validation is not None:
            n = min(N_COMPLETED, len(self.setup.validation))
            whole = self.setup.validation.batch([Draw(0, i) for i in range(n)], 0).targets
            assert whole is not None
            model.eval()
            return completion_grid(model, whole, seed=step)
        if self.setup.tokenizer is None or "generate" not in model.abilities or "translate" in model.abilities:
            return None
        loaded = Loaded(model, self.setup.tokenizer, "sample")
        model.eval()
        if self.setup.recipe.data.kind in CONVERSATIONS and self.setup.tokenizer.chat_template is not None:
            prompt = self.settings.prompt or "Hello! What can you do?"
            n = self.settings.sample_tokens
            return f"{prompt}\n{loaded.generate(prompt, max_tokens=n, temperature=0.8, seed=step, chat=True)}"
        prompt = self.settings.prompt or ("" if loaded.bos_id is not None or loaded.eos_ids else "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)  # a sample may be as short as the context
            return prompt + loaded.generate(prompt, max_tokens=self.settings.sample_tokens, temperature=0.8, seed=step)
