"""`heedful generate`: one answer to a prompt, or a loop that asks for prompts and can be told how to answer.

The settings are those of a request (heedful/generate/request.py), under the same names on the command line
(--top-p 0.9) and in the loop (/set top_p 0.9).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from heedful.generate.request import Result
    from heedful.kernels.packed import Kind
    from heedful.loaded import Loaded


def biases(text: str) -> dict[int, float]:
    """ "50256=-100,11=5" -> {50256: -100.0, 11: 5.0}"""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {int(token): float(bias) for token, _, bias in pairs}


def stopping(text: str) -> bool | str:
    """ "true" -> True, and "never" as it is"""
    known: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in known:
        raise ValueError(f"early_stopping is {text!r}: it must be {', '.join(known)}")
    return known[text]


# Name, how its text is read, what it does. What is not given is the request's own default, except where said.
SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "at most this many new tokens (default 200)"),
    "temperature": (float, "0 is greedy (default 0.8)"),
    "top_k": (int, "choose among the K most likely"),
    "top_p": (float, "choose within this mass of probability"),
    "min_p": (float, "at least this share of the likeliest one's probability"),
    "typical_p": (float, "choose within this mass of the typical"),
    "repetition_penalty": (float, "above 1: what was said or asked becomes less likely"),
    "frequency_penalty": (float, "-2 to 2, per time a token was said"),
    "presence_penalty": (float, "-2 to 2, once if a token was said"),
    "logit_bias": (biases, "added to tokens' logits: ID=BIAS,ID=BIAS"),
    "seed": (int, "the same seed gives the same text"),
    "n": (int, "how many answers"),
    "best_of": (int, "choose them from this many, by mean log-probability"),
    "logprobs": (int, "with --json: log-probabilities, and this many alternatives"),
    "beams": (int, "search with this many beams, instead of drawing by chance"),
    "length_penalty": (float, "with beams: more favours longer answers (default 1)"),
    "early_stopping": (stopping, "with beams: when to stop looking: true, false (default) or never"),
    "beam_groups": (int, "with beams: groups that each look for something else"),
    "diversity": (float, "with groups: what a token costs that the groups before have chosen"),
    "draft": (str, "guess tokens ahead, for speed: lookup (copy from the prompt), or a smaller model"),
}
SEVERAL = ("n", "best_of", "logprobs", "echo")  # answered whole, not as they are written
HELP = (
    "/set NAME VALUE   /set NAME (its default)   /settings   /reset (forget the conversation)   /quit; "
    "anything else is a prompt"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, (kind, about) in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=name.rpartition("_")[2].upper(), help=about)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this; may be repeated")
    parser.add_argument("--echo", action="store_true", help="with --json: the prompt is part of the answer")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print everything there is to know of the answers")


def run(options: argparse.Namespace) -> int:
    import heedful
    from heedful.kernels.pack import pack_as_stored

    settings = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    settings |= {name: True for name in ("chat", "echo") if getattr(options, name)}
    settings |= {"stop": tuple(options.stop)} if options.stop else {}
    loaded = heedful.load(options.model, quantize=options.quantize)
    if loaded.model.packed is None:
        pack_as_stored(loaded.model)
    settings |= {"draft": drafter(settings["draft"], loaded)} if "draft" in settings else {}
    if options.prompt is None:
        return Loop(loaded, settings, options.json).run()
    answer(loaded, options.prompt, settings, as_json=options.json)
    return 0


def drafter(name: str, loaded: Loaded) -> str | Loaded:
    """Prompt lookup, or the model of this name, packed as the one that it drafts for."""
    import heedful

    return name if name == "lookup" else heedful.load(name, quantize=cast("Kind | None", loaded.model.packed))


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """What was given, over the defaults here; a beam search takes no temperature."""
    chance = {} if settings.get("beams", 1) > 1 else {"temperature": 0.8}
    return {"max_tokens": 200} | chance | settings


def answer(loaded: Loaded, prompt: Any, settings: dict[str, Any], *, as_json: bool = False) -> str:
    """Print the answer, as it is written where there is one; its text comes back."""
    settings = with_defaults(settings)
    if as_json or any(name in settings for name in SEVERAL):
        (result,) = loaded.complete(prompt, **settings)
        if as_json:
            print(json.dumps(describe(result, loaded), ensure_ascii=False, indent=2))
        else:
            print("\n\n".join(choice.text for choice in result.choices))
        return result.choices[0].text
    if settings.get("beams", 1) > 1:  # known at its end alone
        said = iter([loaded.complete(prompt, **settings)[0].choices[0].text])
    else:
        said = loaded.stream(prompt, **settings)
    if loaded.continues and not settings.get("chat"):
        print(prompt, end="", flush=True)
    pieces = []
    for piece in said:
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


def describe(result: Result, loaded: Loaded) -> dict[str, Any]:
    """A result as plain data, with the text of every scored token."""
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.target.decode
    plain = dataclasses.asdict(result)
    groups = [choice["scores"] for choice in plain["choices"]] + [plain["prompt_scores"]]
    for scores in groups:
        for score in scores or []:
            if score is not None:
                score["text"] = text([score["token"]], skip_special=False)
                score["top"] = [
                    {"token": t, "text": text([t], skip_special=False), "logprob": p} for t, p in score["top"]
                ]
    return plain


class Loop:
    """Asks for prompts until Ctrl-D; in a chat the model sees the whole conversation."""

    def __init__(self, loaded: Loaded, settings: dict[str, Any], as_json: bool) -> None:
        self.loaded, self.settings, self.as_json = loaded, settings, as_json
        self.messages: list[dict[str, str]] = []

    def run(self) -> int:
        try:
            import readline  # noqa: F401  (arrows recall earlier lines wherever Python has it)
        except ImportError:
            pass
        print(f"{self.loaded}\nType a text and press Enter. {HELP}")
        while True:
            try:
                line = input("\n> ")
            except EOFError:
                print()
                return 0
            if line.strip() == "/quit":
                return 0
            try:
                self.command(line) if line.startswith("/") else self.prompt(line)
            except (KeyboardInterrupt, ValueError, FileNotFoundError) as problem:
                print(f"\n[{problem or 'stopped'}]")

    def prompt(self, line: str) -> None:
        if not self.settings.get("chat"):
            answer(self.loaded, line, self.settings, as_json=self.as_json)
            return
        asked = [*self.messages, {"role": "user", "content": line}]
        said = answer(self.loaded, asked, self.settings, as_json=self.as_json)
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def command(self, line: str) -> None:
        words = line.split(maxsplit=2)
        if words[0] == "/settings":
            print("\n".join(f"{name} = {value}" for name, value in sorted(with_defaults(self.settings).items())))
        elif words[0] == "/reset":
            self.messages = []
        elif words[0] == "/set" and len(words) == 3 and words[1] in SETTINGS:
            value = SETTINGS[words[1]][0](words[2])
            self.settings[words[1]] = drafter(value, self.loaded) if words[1] == "draft" else value
        elif words[0] == "/set" and len(words) == 2 and words[1] in SETTINGS:
            self.settings.pop(words[1], None)
        elif words[0] == "/set":
            print(f"/set NAME VALUE, where NAME is one of {', '.join(SETTINGS)}")
        else:
            print(HELP)
