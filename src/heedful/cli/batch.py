"""`heedful batch`: a file of requests answered, in the format of OpenAI's batches; it goes on where it was stopped."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING

from heedful.cli.arguments import MODEL, add_context_length, add_device, add_kv_cache, add_quantize
from heedful.cli.results import ProgressLines
from heedful.text.plural import counted

if TYPE_CHECKING:
    from rich.progress import Progress

    from heedful.serve.batch_files import AnswerFile, BatchAnswer
    from heedful.serve.options import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, the models, and where they run."""
    add = parser.add_argument
    add(
        "requests", metavar="REQUESTS",
        help='a line {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}} for each '
        "request; - is standard input",
    )  # fmt: skip
    add(
        "answers", metavar="ANSWERS",
        help="the answers are appended to this file; those that it has are not asked for again. - is standard output",
    )  # fmt: skip
    add(
        "--model", action="append", default=[],
        help=f"{MODEL}; NAME=PATH gives it the name that requests have. Repeatable (default: all that are here)",
    )  # fmt: skip
    add_device(parser)
    add_quantize(parser)
    add_kv_cache(parser)
    add_context_length(parser)
    add("--memory", type=float, metavar="GB", help="what loaded models may take together; idle ones make room")
    add("--max-rows", type=int, default=64, metavar="N", help="answers written at once by a model (default 64)")
    add(
        "--ray", nargs="?", const="", metavar="ADDRESS",
        help="on the workers of a Ray cluster (default: that of RAY_ADDRESS, else one of this machine's cores)",
    )  # fmt: skip
    add("--replicas", type=int, metavar="N", help="with --ray: the workers, each with the models (default 2)")
    add("--cpus", type=int, metavar="N", help="with --ray: cores of a worker (default: the cluster's, divided)")


def run(options: argparse.Namespace) -> int:
    """Answer what is not answered; exit code 1 if any answer is an error."""
    from heedful.serve.options import Options

    if options.ray is None and (options.replicas or options.cpus):
        raise ValueError("--replicas and --cpus are for --ray: without it there is one process, with all cores")
    for name in ("replicas", "cpus"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be 1 or more")
    names = ("device", "quantize", "kv_cache", "context_length", "memory", "max_rows")
    settings = Options(models=tuple(options.model), **{name: getattr(options, name) for name in names})
    from heedful.serve.batch_files import AnswerFile, RequestIndex

    with ExitStack() as files:
        index = RequestIndex(files.enter_context(open_requests(options.requests)))
        path = None if options.answers == "-" else Path(options.answers)
        answers = files.enter_context(AnswerFile(path, index))
        progress = files.enter_context(show_progress(answers))
        if progress.left:
            asyncio.run(answer_all(options, settings, progress))
    where, out = ("standard output", sys.stderr) if path is None else (path, sys.stdout)
    print(f"{where}: {progress.summary()}", file=out)
    return 1 if answers.n_failed else 0


@contextmanager
def open_requests(name: str) -> Iterator[IO[bytes]]:
    """The file of requests; a copy of what comes through a pipe, since it is read twice."""
    with ExitStack() as files:
        file = sys.stdin.buffer if name == "-" else files.enter_context(open(name, "rb"))
        if not file.seekable():
            pipe, file = file, files.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(pipe, file)
        yield file


async def answer_all(options: argparse.Namespace, settings: Options, progress: BatchProgress) -> None:
    """Answer what is not answered, in this process or on a Ray cluster."""
    requests = progress.answers.index.unanswered()
    if options.ray is None:
        from heedful.serve.batch import answer_batch

        return await answer_batch(requests, settings, progress.write)
    try:
        from heedful.serve.ray_batch import answer_batch_on_ray, connected, started_replicas
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'heedful[ray]'") from None
    with ExitStack() as cluster:
        cluster.enter_context(redirect_stdout(sys.stderr))  # Ray prints what becomes of its workers
        cluster.enter_context(connected(options.ray))
        actors = cluster.enter_context(started_replicas(settings, options.replicas or 2, options.cpus))
        await answer_batch_on_ray(requests, progress.left, actors, progress.write, max_rows=settings.max_rows)


class BatchProgress:
    """Counts answers and tokens as they are written, and shows them on stderr if that is a terminal."""

    def __init__(self, answers: AnswerFile, bar: Progress) -> None:
        self.answers, self.bar = answers, bar
        self.n_before = int(answers.index.answered.sum())
        self.left = len(answers.index) - self.n_before
        self.prompt_tokens = self.completion_tokens = 0
        self.began = time.perf_counter()
        self.task = bar.add_task("", total=len(answers.index), completed=self.n_before, rate="")
        self.lines = ProgressLines(self.left) if bar.disable else None

    def write(self, answer: BatchAnswer) -> None:
        """Write an answer and count it."""
        self.answers.write(answer)
        prompt, completion = answer.n_tokens
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.bar.update(self.task, advance=1, rate=f"{self.tokens_per_second:,.0f} tokens/s")
        if self.lines is not None:
            self.lines.advance()

    @property
    def tokens_per_second(self) -> float:
        """Of prompts and completions together."""
        return (self.prompt_tokens + self.completion_tokens) / (time.perf_counter() - self.began)

    def summary(self) -> str:
        """What was done, in a line."""
        n, failed = len(self.answers.index), self.answers.n_failed
        before = f" ({self.n_before:,} before)" if self.n_before else ""
        seconds = time.perf_counter() - self.began
        return (
            f"{n - failed:,} ok, {failed:,} failed{before}; {self.prompt_tokens:,} prompt and "
            f"{counted(self.completion_tokens, 'completion token')} in {seconds:.1f} s, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


@contextmanager
def show_progress(answers: AnswerFile) -> Iterator[BatchProgress]:
    """A bar on stderr, if that is a terminal: how many are answered, tokens per second, the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield BatchProgress(answers, bar)
