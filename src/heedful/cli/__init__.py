"""The command line: `heedful COMMAND ...`. Each command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from heedful import __version__
from heedful.cli import generate as converse
from heedful.cli import show

Command = Callable[[argparse.Namespace], int]
KINDS = ["float32", "bfloat16", "float16", "int8", "int4"]  # of weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    options = parser().parse_args(arguments)
    run: Command = options.run
    try:
        return run(options)
    except (ValueError, FileNotFoundError) as problem:
        print(f"heedful: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="heedful",
        description="The whole Transformer family: build, train, generate, look inside.",
        epilog="heedful COMMAND --help says more about each.",
    )
    top.add_argument("--version", action="version", version=f"heedful {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Command, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command

    model = "a model that ships with heedful, a folder, a .gguf file or a hub id (org/name)"

    c = add("models", models, "list the models that ship, the families and every published size")
    c.add_argument("family", nargs="?", help="only this family")

    c = add("info", info, "what a model is: architecture, parameters, memory, context")
    c.add_argument("name", help=f"{model}; or the name of a published size")

    c = add("generate", converse.run, "continue a prompt; without one, a loop that asks for prompts")
    c.add_argument("model", help=model)
    c.add_argument("prompt", nargs="?", help="the text to continue, or to translate by an encoder-decoder")
    c.add_argument("--quantize", choices=KINDS, help="the weights in this type (default: as they are stored)")
    converse.add_options(c)

    _add_training(add)
    _add_serving(add)

    show.add_show(
        add("show", show.show, "look inside a model: attention, layers, positions; a page or a picture"),
        model,
    )
    show.add_fill(add("fill", show.fill, "what a model puts into a blank, and what that goes with"), model)
    show.add_probe(add("probe", show.probe, "which layers of a model know best: words tagged from each"), model)

    c = add("export", export, "write a model as a folder in the hub's layout")
    c.add_argument("model", help=model)
    c.add_argument("folder", type=Path, help="where to; must not exist yet")
    c.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="convert the weights")

    c = add("tokenize", tokenize, "show the tokens of a text")
    c.add_argument("model", help=f"{model}; or a folder with a tokenizer alone")
    c.add_argument("text")

    c = add("merges", merges, "byte-pair encoding step by step: every merge and the text after it")
    c.add_argument("text", help="for example aaabdaaabac")

    c = add("train-tokenizer", train_tokenizer, "train a tokenizer on text files")
    c.add_argument("files", nargs="+", type=Path)
    c.add_argument("--kind", choices=["bpe", "wordpiece", "unigram", "words", "characters"], default="bpe")
    c.add_argument("--vocab-size", type=int, default=8000, metavar="N", help="default 8000")
    c.add_argument("--out", type=Path, required=True, help="the folder to write")
    return top


def _add_training(add: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    what = "a text file, a folder of text, a recipe that ships (--list) or a recipe's .toml file"
    changes: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    c = add("train", train, "train a model: from a text file, a folder or a recipe; or go on with a run")
    c.add_argument("what", nargs="?", help=what)
    c.add_argument("--set", **changes, help="change one setting of the recipe, as train.steps=200; repeatable")
    c.add_argument("--out", type=Path, metavar="FOLDER", help="the run's folder (default: runs/NAME-1 and so on)")
    c.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run, as if it had never stopped")
    c.add_argument("--init-from", metavar="MODEL", help="begin from the weights of a model instead of fresh ones")
    c.add_argument("--list", action="store_true", help="list the recipes that ship, with their results and times")
    c.add_argument("--quiet", action="store_true", help="no progress, only errors")

    c = add("estimate", estimate, "what a training would cost: parameters, memory, FLOPs, time on this machine")
    c.add_argument("what", help=what)
    c.add_argument("--set", **changes, help="change one setting of the recipe; repeatable")


def _add_serving(add: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    c = add("serve", serve, "the playground's page, and OpenAI's HTTP API: completions, chats, embeddings")
    c.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="names that ship, folders, runs, .gguf files or hub ids; NAME=PATH gives one another name "
        "(default: all that ship). The first is loaded now, the others when asked for",
    )

    def number(name: str, kind: Callable[[str], Any], default: Any, metavar: str, about: str) -> None:
        about += "" if default is None else f" (default {default})"
        c.add_argument(name, type=kind, default=default, metavar=metavar, help=about)

    c.add_argument("--host", default="127.0.0.1", help="the address (default 127.0.0.1, this machine only)")
    number("--port", int, 8000, "N", "the port; 0 picks a free one")
    c.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="clients must send this key; repeatable. HEEDFUL_API_KEY or --api-key-file are better: other users of "
        "this machine can see arguments",
    )  # fmt: skip
    c.add_argument("--api-key-file", type=Path, metavar="FILE", help="read the keys from a file, one per line")
    c.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin call the server, as https://example.org; repeatable",
    )  # fmt: skip
    c.add_argument("--device", help="where models run (default: the CPU)")
    c.add_argument("--quantize", choices=KINDS, help="the weights in this type (default: as they are stored)")
    number("--memory", float, None, "GB", "what loaded models may take together; idle ones make room")
    number("--max-rows", int, 64, "N", "answers written at once by a model")
    number("--queue", int, 256, "N", "requests that may wait for a model; beyond that the answer is 429")
    number("--cache-tokens", int, None, "N", "tokens that a model's answers may remember together")
    number("--chunk", int, 256, "N", "tokens of new prompts read between two tokens of running answers")
    number("--max-tokens-per-request", int, 65_536, "N", "prompts x answers x max_tokens that one may ask for")
    number("--max-body", int, 8 * 2**20, "BYTES", "the largest request")
    number("--drain", float, 30.0, "SECONDS", "running requests may take so long when the server is stopped")
    c.add_argument(
        "--runs", default="runs", metavar="FOLDER", help="the page shows the trainings in it (default: runs)"
    )
    c.add_argument("--lazy", action="store_true", help="load the first model, too, when it is asked for")
    c.add_argument("--verbose", action="store_true", help="a line per request, on stderr")
    c.add_argument("--open", action="store_true", help="open the playground in the browser")


def models(options: argparse.Namespace) -> int:
    from heedful.models.registry import FAMILIES, sizes
    from heedful.zoo import cards

    if options.family and options.family not in FAMILIES:
        raise ValueError(f"no family is called {options.family!r}: {', '.join(FAMILIES)} are")
    if not options.family and cards():
        print("Ship with heedful, load by name:")
        for name, about in cards().items():
            print(f"  {name:<22} {about}")
        print()
    for name, family in FAMILIES.items():
        if options.family in (None, name):
            print(f"{name}: {family.about}")
            for size in sizes().values():
                if size.family == name:
                    print(f"  {size.name:<22} {count(size.parameters):>8} parameters")
    if not options.family:
        print("\nheedful info NAME says more; heedful.create(NAME) in Python makes a new one of that size.")
    return 0


def info(options: argparse.Namespace) -> int:
    from heedful.weights.describe import describe

    print(describe(options.name))
    return 0


def train(options: argparse.Namespace) -> int:
    from heedful.train.recipe import parse_changes, read, shipped

    if options.list:
        for name, path in shipped().items():
            recipe = read(path)
            print(f"{name:<24} {recipe.get('about', '')}")
            print(f"{'':<24} {recipe.get('expected', '')}")
        return 0
    changes = parse_changes(options.set)
    if options.resume is not None:
        if options.what or options.init_from or options.out:
            raise ValueError("--resume goes on with a run as it is: give it no data, recipe, --init-from or --out")
        from heedful.recipes.launch import resume

        resume(options.resume, changes, quiet=options.quiet)
        return 0
    if options.what is None:
        raise ValueError("what to train on? Give a text file, a folder or a recipe (`heedful train --list`)")
    from heedful.recipes.launch import train

    train(options.what, changes, init_from=options.init_from, folder=options.out, quiet=options.quiet)
    return 0


def estimate(options: argparse.Namespace) -> int:
    from heedful.recipes.estimate import describe
    from heedful.recipes.launch import resolve
    from heedful.train.recipe import Recipe, merged, parse_changes

    _, recipe = resolve(options.what)
    print(describe(Recipe.from_dict(merged(recipe, parse_changes(options.set)))))
    return 0


def serve(options: argparse.Namespace) -> int:
    keys, source = _api_keys(options)
    from heedful.serve.options import Options

    given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("run", "api_key", "api_key_file", "allow_origin")
    }
    given["models"] = tuple(options.models)
    settings = Options(**given, api_keys=keys, key_source=source, allow_origins=tuple(options.allow_origin))
    settings.check_public()
    # Threads of a model that wait for each other give way soon, since the event loop wants a core as well; but not at
    # once, as OpenMP lets them where it counts more threads than cores: those of the thread that loaded a model, and of
    # other models. On two cores that took 20 % of a fast model's tokens. Read when PyTorch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from heedful.serve.server import serve

    return serve(settings)


def _api_keys(options: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """The keys, and where they came from: the options, else the environment."""
    keys, sources = list(options.api_key), ["--api-key"] if options.api_key else []
    if options.api_key_file is not None:
        lines = options.api_key_file.read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"{options.api_key_file} has no key in it: write one per line")
        keys, sources = keys + found, [*sources, str(options.api_key_file)]
    if not keys and "HEEDFUL_API_KEY" in os.environ:
        keys, sources = [os.environ["HEEDFUL_API_KEY"]], ["HEEDFUL_API_KEY"]
    return tuple(keys), " and ".join(sources)


def export(options: argparse.Namespace) -> int:
    import torch

    import heedful
    from heedful.weights.save import save

    if options.folder.exists():
        raise ValueError(f"{options.folder} exists already: choose another name or remove it")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    loaded = heedful.load(options.model, dtype=dtype)
    save(loaded.model, options.folder, tokenizer=loaded.tokenizer)
    print(f"{loaded.name} written to {options.folder}")
    return 0


def tokenize(options: argparse.Namespace) -> int:
    from heedful.weights.describe import tokenizer_of

    tokenizer = tokenizer_of(options.model)
    for token, start, end in tokenizer.encode_with_offsets(options.text):
        print(f"{token:>7}  {tokenizer.token(token)!r:<24} {options.text[start:end]!r}")
    return 0


def merges(options: argparse.Namespace) -> int:
    from heedful.text import trace_merges

    print(trace_merges(options.text))
    return 0


def train_tokenizer(options: argparse.Namespace) -> int:
    from heedful import text

    if options.out.exists():
        raise ValueError(f"{options.out} exists already: choose another name or remove it")
    texts = [path.read_text(encoding="utf-8") for path in options.files]
    if options.kind in ("words", "characters"):
        tokenizer = getattr(text, options.kind)(texts)
    else:
        tokenizer = getattr(text, f"train_{options.kind}")(texts, options.vocab_size)
    tokenizer.save(options.out)
    print(f"{len(tokenizer)} tokens written to {options.out}")
    return 0


def count(n: int) -> str:
    """124439808 -> 124M"""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return str(n)


if __name__ == "__main__":
    sys.exit(main())
