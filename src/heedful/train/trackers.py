"""Optional experiment trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Where metrics go beside the run's own log."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step by name."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""

    def close(self) -> None:
        """Write what is pending."""


def make_trackers(settings: Any, folder: Path | None, begin: int) -> list[Tracker]:
    """The trackers that the [log] table enables; ValueError if one is not installed."""
    found: list[Tracker] = []
    wanted: dict[str, Callable[[Path, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
    for name, kind in wanted.items():
        if not getattr(settings, name):
            continue
        if folder is None:
            raise ValueError(f"log.{name} writes into the run's folder, and this training has none")
        try:
            importlib.import_module(name)
        except ImportError:
            raise ValueError(f"log.{name} needs a package: `pip install {name}`, or leave it out") from None
        found.append(kind(folder, begin))
    return found


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, begin: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what an interrupted run had written past its checkpoint.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=begin + 1 if begin else None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step by name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        self.writer.add_text(name, "    " + text.replace("\n", "\n    "), step)  # as it is, no markup

    def close(self) -> None:
        """Write what is pending."""
        self.writer.close()


class WandB:
    """A run of the project "heedful" (WANDB_PROJECT changes it); WANDB_MODE=offline needs no account."""

    def __init__(self, folder: Path, begin: int) -> None:
        wandb = importlib.import_module("wandb")
        # A resumed run continues the same W&B run, by its id.
        note = folder / "wandb-id.txt"
        if not note.exists():
            note.write_text(secrets.token_hex(4), encoding="utf-8")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "heedful"),
            name=folder.name,
            id=note.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step by name."""
        self.run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        self.run.log({name: text}, step=step)

    def close(self) -> None:
        """Write what is pending."""
        self.run.finish()
