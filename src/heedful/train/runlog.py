"""The log of a run: progress on the terminal, and files in the run's folder.

    log.jsonl                   JSON lines of "kind" step, validation or note; NaN and infinity are null
    samples/step-0000200.txt    text generated after that step; .png: images
    loss.png                    training and validation loss beside the baselines (train/loss_plot.py)
    baselines.json              reference losses in nats: a "uniform" guess, ln V; the entropy of tokens or classes
    summary.json                how it ended

A resumed run appends to the same files, after entries past its checkpoint are removed, so that they end up as those of
a run that was never interrupted. Logging a step costs a few microseconds: files are written once a second; the
terminal, TensorBoard and Weights & Biases four times a second.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from heedful.text.parse import parse_json
from heedful.train import loss_plot
from heedful.train.progress import ProgressDisplay, format_clock, format_count
from heedful.train.run import SUMMARY, write_atomic
from heedful.train.trackers import Tracker, make_trackers

LOG, PLOT, SAMPLES = "log.jsonl", "loss.png", "samples"
BASELINES = "baselines.json"
WRITE_EVERY, SHOW_EVERY, PLOT_EVERY = 1.0, 0.25, 60.0  # seconds at least
ENDED = {"patience": "stopped early", "target": "the target was reached"}
SHOWN_STEPS = 20  # at most, of which the loss and the speed on the terminal are means


@dataclass
class History:
    """Losses, tokens and seconds logged so far, before a resume too."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    validation: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # of each validation, by its step
    tokens: int = 0
    seconds: float = 0.0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SHOWN_STEPS))  # tokens, seconds

    def add_step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Record an optimizer step."""
        self.steps.append(step)
        self.losses.append(loss)
        self.tokens += tokens
        self.seconds += seconds
        self.recent.append((tokens, seconds))

    def loss(self) -> float:
        """The mean loss of the last steps: a fiftieth of all, so that it does not lag where the loss falls fast."""
        n = min(SHOWN_STEPS, max(1, len(self.losses) // 50))
        last = [loss for loss in self.losses[-n:] if math.isfinite(loss)]
        return sum(last) / len(last) if last else math.nan

    def tokens_per_second(self) -> float:
        """The throughput of the last steps, 0 if it is not known."""
        tokens, seconds = map(sum, zip(*self.recent, strict=True)) if self.recent else (0, 0)
        return tokens / seconds if seconds > 0 else 0.0

    def best(self) -> tuple[int, float] | None:
        """Step and loss of the lowest validation loss, after a step."""
        finite = [(loss, step) for step, loss in self.validation if step and math.isfinite(loss)]
        return (min(finite)[1], min(finite)[0]) if finite else None


class RunLog:
    """The log of a run from step `begin` to `steps`. Without a `folder` nothing is written; `quiet` prints nothing.

    With `bytes_per_token`, known for language models, validation reports perplexity and bits per byte too; with
    `dimensions`, the numbers of a token that is a pixel (1 for grey), bits per dimension. `baselines`
    are reference losses by name, in nats. `unit` is what throughput counts: tokens, or images.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        steps: int,
        settings: Any,
        begin: int = 0,
        quiet: bool = False,
        baselines: Mapping[str, float] | None = None,
        bytes_per_token: float | None = None,
        dimensions: int | None = None,
        unit: str = "tokens",
    ) -> None:
        self.folder, self.steps, self.at, self.quiet = folder, steps, begin, quiet
        self.baselines, self.bytes_per_token, self.unit = dict(baselines or {}), bytes_per_token, unit
        self.dimensions = dimensions
        self.history = History()
        self._lines: list[str] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            truncate_log(folder, begin, self.history)
            self.history.recent.clear()  # another process or machine may be faster or slower
            if self.baselines:
                write_atomic(folder / BASELINES, json.dumps(_without_nonfinite(self.baselines)) + "\n")
        self._trackers: list[Tracker] = make_trackers(settings, folder, begin)
        self._display = None if quiet else ProgressDisplay(begin, steps)
        now = time.perf_counter()
        self._written = self._shown = self._plotted = now
        atexit.register(self.close)  # also after an error: write the last lines, restore the terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- events ----------------------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        loss: float,
        *,
        lr: float,
        norm: float,
        tokens: int,
        seconds: float,
        utilisation: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Log an optimizer step: mean loss, gradient norm, tokens, duration; `utilisation` is from 0 to 1."""
        self.at = step
        self.history.add_step(step, loss, tokens, seconds)
        numbers = {**(metrics or {}), "loss": loss, "lr": lr, "norm": norm}
        if utilisation is not None:
            numbers["utilisation"] = utilisation
        self._log({"kind": "step", "step": step, **numbers, "tokens": tokens, "seconds": seconds})
        now = time.perf_counter()
        if now - self._written >= WRITE_EVERY:
            self._write()
            self._written = now
        if now - self._shown >= SHOW_EVERY or step == self.steps:
            self._shown = now
            for tracker in self._trackers:
                tracker.scalars(step, {f"train/{k}": v for k, v in numbers.items()})
            if self._display is not None:
                self._display.update(step, self._words(utilisation))
        elif self._display is not None and self._display.is_due(step):
            self._display.update(step, self._words(utilisation))

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """Log the validation loss and metrics after a step."""
        self.history.validation.append((step, loss))
        self.history.metrics[step] = dict(metrics or {})
        scores = {"loss": loss, **self.language_scores(loss), **(metrics or {})}
        self._log({**scores, "kind": "validation", "step": step})
        for tracker in self._trackers:
            tracker.scalars(step, {f"validation/{k}": v for k, v in scores.items()})
        others = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items() if name != "loss"]
        self._say(", ".join([f"step {step}: validation loss {loss:.4f}", *others]))
        if time.perf_counter() - self._plotted >= PLOT_EVERY:
            self.plot()

    def sample(self, step: int, made: str | np.ndarray) -> None:
        """Write and show the text, or an image (H, W, 3) uint8, that the model generated after a step."""
        path = None if self.folder is None else self.folder / SAMPLES / f"step-{step:07}"
        if path is not None:
            path.parent.mkdir(exist_ok=True)
        if isinstance(made, np.ndarray):
            if path is not None:
                from matplotlib.image import imsave

                imsave(path.with_suffix(".png"), made)
                self._say(f"  │ {path.with_suffix('.png')}")
            return
        text = made
        if path is not None:
            path.with_suffix(".txt").write_text(text, encoding="utf-8", errors="replace", newline="")
        for tracker in self._trackers:
            tracker.text(step, "sample", text)
        self._say("\n".join(f"  │ {line}" for line in text.splitlines()))

    def note(self, text: str, *, show: bool = True) -> None:
        """Log and show a message; safe to call from a signal handler."""
        self._log({"kind": "note", "step": self.at, "text": text})
        if show:
            self._say(text)

    def finish(self, summary: Mapping[str, Any] | None = None, *, next_commands: Sequence[str] = ()) -> None:
        """Write and show the summary (updated with what the caller gives) and what to type next, plot the losses,
        close."""
        result = {**self.summary(), **(summary or {})}
        if self.folder is not None:
            write_atomic(
                self.folder / SUMMARY, json.dumps(_without_nonfinite(result), indent=2, ensure_ascii=False) + "\n"
            )
            self.plot()
        self.close()
        if self._display is not None:
            self._display.table(self._rows(result, next_commands))

    def flush(self) -> None:
        """Bring all lines to the disk; called before a checkpoint is written, so that no step up to it is missing."""
        self._write(to_disk=True)

    def close(self) -> None:
        """Write pending lines and restore the terminal; logging may continue after it."""
        self._write()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._display is not None:
            self._display.stop()
        atexit.unregister(self.close)

    # --- numbers ---------------------------------------------------------------------------------------------------

    def language_scores(self, loss: float) -> dict[str, float]:
        """Perplexity and bits per byte of a loss, or bits per dimension of one of pixels; {} for other losses."""
        if self.dimensions is not None:
            return {"bits_per_dimension": loss / math.log(2) / self.dimensions}
        if self.bytes_per_token is None:
            return {}
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"perplexity": perplexity, "bits_per_byte": loss / math.log(2) / self.bytes_per_token}

    def summary(self) -> dict[str, Any]:
        """The results so far, as summary.json has them."""
        history = self.history
        found: dict[str, Any] = {"step": self.at}
        if best := history.best():
            found |= {"best_step": best[0], "validation_loss": best[1], **self.language_scores(best[1])}
            named = (("metrics_before", 0), ("metrics", best[0]))
            found |= {name: history.metrics[step] for name, step in named if history.metrics.get(step)}
        if len(history.losses):
            last = [loss for loss in history.losses[-max(1, len(history.losses) // 60) :] if math.isfinite(loss)]
            found["training_loss"] = sum(last) / len(last) if last else math.nan
            if not best:
                found |= self.language_scores(found["training_loss"])
        found |= {self.unit: history.tokens, "seconds": history.seconds}
        if history.seconds > 0:
            found[f"{self.unit}_per_second"] = history.tokens / history.seconds
        return found

    def plot(self) -> None:
        """Write the plot of the losses so far."""
        if self.folder is None or not (self.history.steps or self.history.validation):
            return
        aside = self.folder / f".{PLOT}"
        steps, losses = zip(*self.history.validation, strict=True) if self.history.validation else ((), ())
        unit = "nats per token" if self.bytes_per_token is not None else ""
        try:
            loss_plot.plot_losses(
                aside, (self.history.steps, self.history.losses), (steps, losses), self.baselines, unit=unit
            )
        except ImportError as error:
            self._say(f"no {PLOT}: {error}; `pip install matplotlib`")
            return
        aside.replace(self.folder / PLOT)
        self._plotted = time.perf_counter()

    # --- text for people -------------------------------------------------------------------------------------------

    def _words(self, utilisation: float | None) -> str:
        """Loss, throughput and utilisation for the progress bar."""
        words = [f"loss {self.history.loss():.4f}"]
        if (rate := self.history.tokens_per_second()) > 0:
            words.append(f"{format_count(rate)} {self.unit}/s")
        if utilisation is not None:
            words.append(f"{utilisation:.0%} utilisation")
        return "  ".join(words)

    def _rows(self, result: Mapping[str, Any], next_commands: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The rows of the final table."""
        of = f" of {self.steps:,}" if result["step"] < self.steps else ""
        ended = f"{of} ({ENDED.get(result['reason'], result['reason'])})" if "reason" in result else ""
        yield "steps", f"{result['step']:,}{ended}"
        if "validation_loss" in result:
            yield "best validation loss", f"{result['validation_loss']:.4f} at step {result['best_step']:,}"
        elif "training_loss" in result:
            yield "training loss", f"{result['training_loss']:.4f}"
        for name, loss in self.baselines.items():
            yield f"{name} baseline", f"loss {loss:.4f}"
        n = f" of {result['validation_examples']:,}" if result.get("validation_examples") else ""
        for name, value in result.get("metrics", {}).items():
            before = result.get("metrics_before", {}).get(name)
            began = "" if before is None else f"{before:.4g} before training, "
            yield f"{name.replace('_', ' ')}{n}", f"{began}{value:.4g} at step {result['best_step']:,}"
        if "perplexity" in result:
            yield "perplexity", f"{result['perplexity']:,.4g}"
            yield "bits per byte", f"{result['bits_per_byte']:.4f}"
        if "bits_per_dimension" in result:
            yield "bits per dimension", f"{result['bits_per_dimension']:.4f}"
        yield self.unit, f"{format_count(result[self.unit])} in {format_clock(result['seconds'])}"
        if (rate := result.get(f"{self.unit}_per_second")) is not None:
            yield f"{self.unit}/s", format_count(rate)
        if self.folder is not None:
            yield "model", str(result.get("model", self.folder))
            if (self.folder / PLOT).exists():
                yield "loss plot", str(self.folder / PLOT)
            more = 2 * self.steps if result["step"] >= self.steps else 0
            resume = f"heedful train --resume {self.folder}"
            if result.get("reason") == "patience":
                resume += " --set train.patience=0"
            if more:
                resume += f" --set train.steps={more}"
            yield "use it", "\n".join(next_commands or [f"heedful serve {self.folder}"])
            yield "train longer", resume

    def _say(self, text: str) -> None:
        """Print text unless quiet."""
        if self._display is not None:
            self._display.print(text)

    # --- the log ---------------------------------------------------------------------------------------------------

    def _log(self, entry: dict[str, Any]) -> None:
        """Add a line to the log file; non-finite numbers become null."""
        if self.folder is None:
            return
        try:
            line = json.dumps(entry, allow_nan=False)
        except ValueError:
            line = json.dumps(_without_nonfinite(entry))
        self._lines.append(line)

    def _write(self, *, to_disk: bool = False) -> None:
        """Append pending lines to the log file; `to_disk` waits for them to be on the disk."""
        if self.folder is None:
            return
        path = self.folder / LOG
        lines, self._lines = self._lines, []
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
                if to_disk:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error


def truncate_log(folder: Path, begin: int, history: History) -> None:
    """Remove log lines and samples of steps after `begin`, and unreadable lines; add the rest to the history."""
    path = folder / LOG
    if path.exists():
        aside = folder / f".{LOG}.partial"
        with path.open(encoding="utf-8", errors="replace") as old, aside.open("w", encoding="utf-8") as new:
            for line in old:
                if (entry := _read(line)) is not None and entry["step"] <= begin:
                    new.write(line)
                    _add_to_history(entry, history)
            new.flush()
            os.fsync(new.fileno())
        aside.replace(path)
    for sample in (folder / SAMPLES).glob("step-*.*"):
        number = sample.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > begin:
            sample.unlink()


def _read(line: str) -> dict[str, Any] | None:
    """A parsed log line; None if it is incomplete."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int and line.endswith("\n") else None


def _add_to_history(entry: dict[str, Any], history: History) -> None:
    """Add a parsed log line to the history."""
    loss = math.nan if entry.get("loss") is None else float(entry["loss"])
    if entry.get("kind") == "step":
        history.add_step(entry["step"], loss, entry.get("tokens") or 0, entry.get("seconds") or 0.0)
    elif entry.get("kind") == "validation":
        history.validation.append((entry["step"], loss))
        others = ("kind", "step", "loss", "perplexity", "bits_per_byte", "bits_per_dimension")
        history.metrics[entry["step"]] = {k: v for k, v in entry.items() if k not in others and v is not None}


def _without_nonfinite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become None."""
    if isinstance(value, Mapping):
        return {k: _without_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
