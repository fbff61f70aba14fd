"""`heedful serve`: models over HTTP, with the playground's page."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heedful.cli.arguments import (
    add_context_length,
    add_device,
    add_kv_cache,
    add_quantize,
    add_tensor_parallel,
    torchrun_processes,
)

if TYPE_CHECKING:
    from heedful.serve.options import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, where, for whom, and the limits; the names are those of `heedful.serve.options`."""
    add = parser.add_argument
    add(
        "models", nargs="*", metavar="MODEL",
        help="names that ship, folders, runs, .gguf files or hub ids; NAME=PATH gives one another name "
        "(default: all that ship). The first is loaded now, the others when asked for",
    )  # fmt: skip
    add("--host", default="127.0.0.1", help="the address (default 127.0.0.1, this machine only)")
    _add_number(parser, "--port", int, 8000, "N", "the port; 0 picks a free one")
    add(
        "--api-key", action="append", default=[], metavar="KEY",
        help="clients must send this key; repeatable. HEEDFUL_API_KEY or --api-key-file are better: other users of "
        "this machine can see arguments",
    )  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="read the keys from a file, one per line")
    add(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin call the server, as https://example.org; repeatable",
    )  # fmt: skip
    add_device(parser)
    add_quantize(parser)
    add_kv_cache(parser)
    add_context_length(parser)
    add_tensor_parallel(parser)
    for limit in (
        ("--memory", float, None, "GB", "memory for weights and KV caches of all loaded models; idle ones make room"),
        ("--max-rows", int, 64, "N", "answers written at once by a model"),
        ("--queue", int, 256, "N", "requests of a client that may wait for a model; beyond that the answer is 429"),
        ("--cache-tokens", int, None, "N", "tokens that a model's answers may remember together"),
        ("--chunk", int, 1024, "N", "at most so many tokens of new prompts are read at once"),
        ("--step-time", float, 0.5, "SECONDS", "and for so long; less while answers are written"),
        ("--max-tokens-per-request", int, 65_536, "N", "prompts x answers x max_tokens that one may ask for"),
        ("--max-body", int, 8 * 2**20, "BYTES", "the largest request"),
        ("--max-connections", int, 1000, "N", "connections open at once; beyond that the answer is 429"),
        ("--drain", float, 30.0, "SECONDS", "running requests may take so long when the server is stopped"),
    ):
        _add_number(parser, *limit)
    add("--runs", default="runs", metavar="FOLDER", help="the page shows the trainings in it (default: runs)")
    add(
        "--allow-training", action="store_true",
        help="let the page train models although other machines can reach this server (on this machine alone it may)",
    )  # fmt: skip
    add(
        "--exercises", action=argparse.BooleanOptionalAction, default=None,
        help="run answers to the exercises of lessons, which are Python code from the page that was opened by the "
        "printed address (default: on this machine alone; elsewhere it needs an API key)",
    )  # fmt: skip
    add("--lazy", action="store_true", help="load the first model, too, when it is asked for")
    add("--verbose", action="store_true", help="a line per request, on stderr")
    add("--open", action="store_true", help="open the playground in the browser")


def _add_number(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], default: Any, metavar: str, about: str
) -> None:
    about += "" if default is None else f" (default {default})"
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=about)


def run(options: argparse.Namespace) -> int:
    """Serve until stopped."""
    from heedful.serve.options import Options

    given = dict(vars(options))
    keys, source = _api_keys(given.pop("api_key"), given.pop("api_key_file"))
    given |= {"models": tuple(options.models), "allow_origins": tuple(given.pop("allow_origin"))}
    given["tensor_parallel"] = int(os.environ.get("WORLD_SIZE", "1")) if options.tensor_parallel else 1
    settings = Options(**given, api_keys=keys, key_source=source)
    settings.check_exercises()
    settings.check_public()
    if options.tensor_parallel:
        return serve_together(settings)
    from heedful.serve.server import serve

    return serve(settings)


def serve_together(settings: Options) -> int:
    """Serve one model that the processes of torchrun share: the first has the server, the others follow its engine."""
    from heedful.generate.leader import end_followers, follow
    from heedful.serve.metrics import Metrics
    from heedful.serve.model_manager import ModelManager
    from heedful.serve.server import serve

    if settings.tensor_parallel == 1:
        raise ValueError("--tensor-parallel needs several processes: torchrun --nproc-per-node N -m heedful serve ...")
    with torchrun_processes(settings.device) as processes:
        settings = replace(settings, device=processes.device.type)
        if processes.main:
            code = serve(settings)
            end_followers()
            return code
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_IGN)  # the first process decides when all end
        loaded = ModelManager(settings.models, settings, Metrics()).load_first()
        follow(cast(Any, loaded.model), None if loaded.tokenizer is None else loaded.tokenizer.target)
        return 0


def _api_keys(given: list[str], file: Path | None) -> tuple[tuple[str, ...], str]:
    """The keys, and where they came from: the options, else the environment."""
    keys, sources = list(given), ["--api-key"] if given else []
    if file is not None:
        lines = file.read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"{file} has no key in it: write one per line")
        keys, sources = keys + found, [*sources, str(file)]
    if not keys and "HEEDFUL_API_KEY" in os.environ:
        keys, sources = [os.environ["HEEDFUL_API_KEY"]], ["HEEDFUL_API_KEY"]
    return tuple(keys), " and ".join(sources)
