"""What a training says: a bar or lines while it goes on, and files in the run's folder.

    log.jsonl                   one object a line, by "kind": "step", "validation", "note"; NaN and infinity are null
    samples/step-0000200.txt    what the model wrote then
    loss.png                    training and validation loss beside the baselines (train/picture.py)
    baselines.json              losses to compare with, by name
    summary.json                how it ended

A resumed run goes on in the same files; what they say of steps after the checkpoint is removed first, so that in the
end they are those of a run that was never interrupted. Logging a step costs a few microseconds: files are written once
a second; the terminal, TensorBoard and Weights & Biases four times.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from heedful.train import picture
from heedful.train.run import write_whole
from heedful.train.screen import Screen, clock, count
from heedful.train.trackers import Tracker, trackers

LOG, PICTURE, SUMMARY, SAMPLES = "log.jsonl", "loss.png", "summary.json", "samples"
BASELINES = "baselines.json"
WRITE_EVERY, SHOW_EVERY, DRAW_EVERY = 1.0, 0.25, 60.0  # seconds at least
FORGET = 0.97  # the shown loss and speed are means that forget 3 % with every step


@dataclass
class History:
    """What the log has said so far."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add_step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        self.steps.append(step)
        self.losses.append(loss)
        self.tokens += tokens
        self.seconds += seconds

    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best evaluation."""
        finite = [(loss, step) for step, loss in self.validation if math.isfinite(loss)]
        return (min(finite)[1], min(finite)[0]) if finite else None


class RunLog:
    """The log of a training from step `begin` to `steps`. Without a `folder` nothing is written; `quiet` shows nothing.

    `bytes_per_token` makes it a language model: perplexity and bits per byte go with every evaluation. `baselines` are
    losses to compare with, by name. `unit` is what is counted: tokens, or images.
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
        unit: str = "tokens",
    ) -> None:
        self.folder, self.steps, self.at, self.quiet = folder, steps, begin, quiet
        self.baselines, self.bytes_per_token, self.unit = dict(baselines or {}), bytes_per_token, unit
        self.history = History()
        self._lines: list[str] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            cut(folder, begin, self.history)
            if self.baselines:
                write_whole(folder / BASELINES, json.dumps(_valid(self.baselines)) + "\n")
        self._trackers: list[Tracker] = trackers(settings, folder, begin)
        self._screen = None if quiet else Screen(begin, steps)
        now = time.perf_counter()
        self._written = self._shown = self._drawn = now
        self._mean, self._weight = [0.0, 0.0, 0.0], 0.0  # of loss, tokens, seconds
        atexit.register(self.close)  # whatever happens, the last lines are written and the terminal is as it was

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what happens ----------------------------------------------------------------------------------------------

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
        """A step of the optimizer: its mean loss, its tokens and the time it took. `utilisation` is a share of 1."""
        self.at = step
        self.history.add_step(step, loss, tokens, seconds)
        numbers = {**(metrics or {}), "loss": loss, "lr": lr, "norm": norm}
        if utilisation is not None:
            numbers["utilisation"] = utilisation
        self._log({"kind": "step", "step": step, **numbers, "tokens": tokens, "seconds": seconds})
        if math.isfinite(loss):
            self._weight = FORGET * self._weight + 1
            self._mean = [FORGET * m + x for m, x in zip(self._mean, (loss, tokens, seconds), strict=True)]
        now = time.perf_counter()
        if now - self._written >= WRITE_EVERY:
            self._write()
            self._written = now
        if now - self._shown >= SHOW_EVERY or step == self.steps:
            self._shown = now
            for tracker in self._trackers:
                tracker.numbers(step, {f"train/{k}": v for k, v in numbers.items()})
            if self._screen is not None:
                self._screen.progress(step, self._words(utilisation))
        elif self._screen is not None and self._screen.is_due(step):
            self._screen.progress(step, self._words(utilisation))

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """The validation loss after a step, and what else was measured."""
        self.history.validation.append((step, loss))
        scores = {"loss": loss, **self.language_scores(loss), **(metrics or {})}
        self._log({**scores, "kind": "validation", "step": step})
        for tracker in self._trackers:
            tracker.numbers(step, {f"validation/{k}": v for k, v in scores.items()})
        others = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items() if name != "loss"]
        self._say(", ".join([f"step {step}: validation loss {loss:.4f}", *others]))
        if time.perf_counter() - self._drawn >= DRAW_EVERY:
            self.draw()

    def sample(self, step: int, text: str) -> None:
        """What the model writes after a step."""
        if self.folder is not None:
            (self.folder / SAMPLES).mkdir(exist_ok=True)
            path = self.folder / SAMPLES / f"step-{step:07}.txt"
            path.write_text(text, encoding="utf-8", errors="replace", newline="")
        for tracker in self._trackers:
            tracker.text(step, "sample", text)
        self._say("\n".join(f"  │ {line}" for line in text.splitlines()))

    def note(self, text: str) -> None:
        """Something a person should know. A signal's handler may call it."""
        self._log({"kind": "note", "step": self.at, "text": text})
        self._say(text)

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """The end: write and show the summary (with what the caller adds to it), draw the picture, close."""
        result = {**self.summary(), **(summary or {})}
        if self.folder is not None:
            write_whole(self.folder / SUMMARY, json.dumps(_valid(result), indent=2, ensure_ascii=False) + "\n")
            self.draw()
        self.close()
        if self._screen is not None:
            self._screen.table(self._rows(result))

    def flush(self) -> None:
        """All lines are on the disk: before a checkpoint is written, so that no step up to it is missing."""
        self._write(to_disk=True)

    def close(self) -> None:
        """Write what is left, and give the terminal back; the log can go on after it."""
        self._write()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._screen is not None:
            self._screen.stop()
        atexit.unregister(self.close)

    # --- numbers ---------------------------------------------------------------------------------------------------

    def language_scores(self, loss: float) -> dict[str, float]:
        """Perplexity and bits per byte, if this is a language model."""
        if self.bytes_per_token is None:
            return {}
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"perplexity": perplexity, "bits_per_byte": loss / math.log(2) / self.bytes_per_token}

    def summary(self) -> dict[str, Any]:
        """How it stands, as numbers."""
        history = self.history
        found: dict[str, Any] = {"step": self.at}
        if best := history.best():
            found |= {"best_step": best[0], "validation_loss": best[1], **self.language_scores(best[1])}
        if len(history.losses):
            last = [loss for loss in history.losses[-max(1, len(history.losses) // 60) :] if math.isfinite(loss)]
            found["training_loss"] = sum(last) / len(last) if last else math.nan
            if not best:
                found |= self.language_scores(found["training_loss"])
        found |= {self.unit: history.tokens, "seconds": history.seconds}
        if history.seconds > 0:
            found[f"{self.unit}_per_second"] = history.tokens / history.seconds
        return found

    def draw(self) -> None:
        """Write the picture of the losses so far."""
        if self.folder is None or not (self.history.steps or self.history.validation):
            return
        aside = self.folder / f".{PICTURE}"
        steps, losses = zip(*self.history.validation, strict=True) if self.history.validation else ((), ())
        unit = "nats per token" if self.bytes_per_token is not None else ""
        try:
            picture.draw(aside, (self.history.steps, self.history.losses), (steps, losses), self.baselines, unit=unit)
        except ImportError as error:
            self._say(f"no {PICTURE}: {error}; `pip install matplotlib`")
            return
        aside.replace(self.folder / PICTURE)
        self._drawn = time.perf_counter()

    # --- words -----------------------------------------------------------------------------------------------------

    def _words(self, utilisation: float | None) -> str:
        """Loss, speed and so on for the bar."""
        loss, tokens, seconds = (m / max(self._weight, 1e-9) for m in self._mean)
        words = [f"loss {loss:.4f}"]
        if seconds > 0:
            words.append(f"{count(tokens / seconds)} {self.unit}/s")
        if utilisation is not None:
            words.append(f"{utilisation:.0%} utilisation")
        return "  ".join(words)

    def _rows(self, result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The summary as a person reads it."""
        ended = f" ({result['reason']})" if "reason" in result else ""
        yield "steps", f"{result['step']:,}{ended}"
        if "validation_loss" in result:
            yield "best validation loss", f"{result['validation_loss']:.4f} at step {result['best_step']:,}"
        elif "training_loss" in result:
            yield "training loss", f"{result['training_loss']:.4f}"
        if "perplexity" in result:
            yield "perplexity", f"{result['perplexity']:,.4g}"
            yield "bits per byte", f"{result['bits_per_byte']:.4f}"
        for name, loss in self.baselines.items():
            yield f"{name} baseline", f"{loss:.4f}"
        yield self.unit, f"{count(result[self.unit])} in {clock(result['seconds'])}"
        if (rate := result.get(f"{self.unit}_per_second")) is not None:
            yield f"{self.unit}/s", count(rate)
        if self.folder is not None:
            yield "model", str(result.get("model", self.folder))
            if (self.folder / PICTURE).exists():
                yield "loss picture", str(self.folder / PICTURE)
            resume = f"heedful train --resume {self.folder}"
            more = f" --set train.steps={2 * self.steps}" if result["step"] >= self.steps else ""
            # Language models have a perplexity. Whatever others do, the playground shows it.
            use = "generate" if "perplexity" in result else "serve"
            yield "go on", f"heedful {use} {self.folder}\n{resume}{more}"

    def _say(self, text: str) -> None:
        if self._screen is not None:
            self._screen.say(text)

    # --- the log ---------------------------------------------------------------------------------------------------

    def _log(self, said: dict[str, Any]) -> None:
        if self.folder is None:
            return
        try:
            line = json.dumps(said, allow_nan=False)
        except ValueError:
            line = json.dumps(_valid(said))
        self._lines.append(line)

    def _write(self, *, to_disk: bool = False) -> None:
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


def cut(folder: Path, begin: int, history: History) -> None:
    """Leave of the files what is about steps up to `begin`, and of the log what can be read; add it to the history."""
    path = folder / LOG
    if path.exists():
        aside = folder / f".{LOG}.partial"
        with path.open(encoding="utf-8", errors="replace") as old, aside.open("w", encoding="utf-8") as new:
            for line in old:
                if (said := _read(line)) is not None and said["step"] <= begin:
                    new.write(line)
                    _remember(said, history)
            new.flush()
            os.fsync(new.fileno())
        aside.replace(path)
    for sample in (folder / SAMPLES).glob("step-*.txt"):
        number = sample.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > begin:
            sample.unlink()


def _read(line: str) -> dict[str, Any] | None:
    """A line of the log; None for one that was not written to its end."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and type(said.get("step")) is int and line.endswith("\n") else None


def _remember(said: dict[str, Any], history: History) -> None:
    loss = math.nan if said.get("loss") is None else float(said["loss"])
    if said.get("kind") == "step":
        history.add_step(said["step"], loss, said.get("tokens") or 0, said.get("seconds") or 0.0)
    elif said.get("kind") == "validation":
        history.validation.append((said["step"], loss))


def _valid(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {k: _valid(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
