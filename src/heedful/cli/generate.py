"""`heedful generate`: the completion of a prompt, or an interactive loop (REPL) that reads prompts and commands.

The options are those of `Loaded.generate` (heedful/generate/options.py), under the same names on the command line
(--top-p 0.9) and in the loop (/set top_p 0.9).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.arguments import (
    MODEL,
    accelerate_if_plain,
    add_context_length,
    add_device,
    add_kv_cache,
    add_quantize,
    add_tensor_parallel,
    torchrun_processes,
)
from heedful.cli.inputs import read_whole
from heedful.models.config import did_you_mean

if TYPE_CHECKING:
    from heedful.generate.request import Result
    from heedful.loaded import Loaded


def parse_logit_bias(text: str) -> dict[int, float]:
    """ "50256=-100,11=5" -> {50256: -100.0, 11: 5.0}"""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {int(token): float(bias) for token, _, bias in pairs}


def parse_token_ids(text: str) -> list[int]:
    """ "50256,11" -> [50256, 11]"""
    return [int(token) for token in text.split(",")]


def read_text(path: str) -> str:
    """The text of a file."""
    return read_whole(Path(path))


def parse_early_stopping(text: str) -> bool | str:
    """ "true" -> True, "false" -> False, and "never" as it is"""
    known: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in known:
        raise ValueError(f"early_stopping is {text!r}: it must be {', '.join(known)}")
    return known[text]


# What an answer must match: one of these.
GRAMMARS: dict[str, tuple[Callable[[str], Any], str]] = {
    "schema": (read_text, "a file with a JSON schema: the answer is JSON that it allows"),
    "regex": (str, "a regular expression that matches all of the answer"),
    "grammar": (read_text, "a file with a context-free grammar of the answer, in the notation of Lark or GBNF"),
}
# Name: how its text is parsed, help. An option that is not given has the default of the request, except where said.
OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "at most this many new tokens (default: the model's own, else 200; in a chat 2048)"),
    "min_tokens": (int, "at least this many: until then nothing ends the answer"),
    "temperature": (float, "0 is greedy (default: the model's own, else 0.8; an encoder-decoder searches)"),
    "top_k": (int, "choose among the K most likely"),
    "top_p": (float, "choose within this mass of probability"),
    "min_p": (float, "at least this share of the likeliest one's probability"),
    "typical_p": (float, "choose within this mass of the typical"),
    "repetition_penalty": (float, "above 1: what was said or asked becomes less likely"),
    "frequency_penalty": (float, "-2 to 2, per time a token was said"),
    "presence_penalty": (float, "-2 to 2, once if a token was said"),
    "no_repeat_ngram_size": (int, "no N tokens in a row twice, those of the prompt included; with beams too"),
    "logit_bias": (parse_logit_bias, "added to tokens' logits: ID=BIAS,ID=BIAS"),
    "stop_token_ids": (parse_token_ids, "end the answer before these tokens too: ID,ID"),
    "truncate_prompt_tokens": (int, "keep the last N tokens of the prompt; -1: as many as the context has room for"),
    "chat_template_kwargs": (json.loads, 'with --chat: variables of the template as JSON, {"enable_thinking": false}'),
    "seed": (int, "the same seed gives the same text"),
    "n": (int, "how many answers"),
    "best_of": (int, "choose them from this many, by mean log-probability"),
    "logprobs": (int, "log-probability of each token, and this many alternatives"),
    "beams": (int, "search with this many beams, instead of drawing by chance (default of an encoder-decoder: 4)"),
    "length_penalty": (float, "with beams: more favours longer answers (default 1)"),
    "early_stopping": (parse_early_stopping, "with beams: when to stop looking: true, false (default) or never"),
    "beam_groups": (int, "with beams: groups that each look for something else"),
    "diversity": (float, "with groups: what a token costs that the groups before have chosen"),
    **GRAMMARS,
    "draft": (str, "guess tokens ahead, for speed: lookup (copy from the prompt), or a smaller model"),
}
FLAGS = {
    "ignore_eos": "go on where the model ends its text, up to --max-tokens",
    "include_stop_str_in_output": "what ends the answer is part of it",
    "allow_special": "special tokens written in the prompt, as <extra_id_0>, are those tokens, not text",
}
TEMPERATURE = 0.8  # where the model's files name none
NOT_STREAMED = ("n", "best_of", "logprobs", "echo")  # known when the completion is finished
HELP = (
    "/set NAME VALUE   /set NAME (its default)   /settings   /reset (forget the conversation)   /quit; "
    "anything else is a prompt"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the prompt, and every option of generation."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("prompt", nargs="?", help="the text to continue, or to translate by an encoder-decoder")
    add_device(parser)
    add_quantize(parser)
    add_kv_cache(parser)
    add_context_length(parser)
    add_tensor_parallel(parser)
    for name, (parse, about) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        metavar = "FILE" if parse is read_text else name.rpartition("_")[2].upper()
        parser.add_argument(flag, type=parse, metavar=metavar, help=about)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this; may be repeated")
    for name, about in FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), action="store_true", help=about)
    parser.add_argument("--echo", action="store_true", help="with --json: the prompt is part of the answer")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print everything there is to know of the answers")


def run(options: argparse.Namespace) -> int:
    """Load the model; print the completion, or start the loop."""
    if not options.tensor_parallel:
        return generate(options)
    if options.prompt is None:
        raise ValueError("with --tensor-parallel there is no loop that asks for prompts: give one after the model")
    with torchrun_processes(options.device):
        return generate(options)


def generate(options: argparse.Namespace) -> int:
    """`run`, in one process or in each of several that have a part of the model."""
    import heedful

    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    given |= {name: True for name in ("chat", "echo", *FLAGS) if getattr(options, name)}
    given |= {"stop": tuple(options.stop)} if options.stop else {}
    names = ("device", "quantize", "kv_cache", "context_length", "tensor_parallel")
    how = {name: getattr(options, name) for name in names}
    loaded = heedful.load(options.model, **how)
    if not options.tensor_parallel:
        accelerate_if_plain(loaded)
    given |= {"draft": load_draft(given["draft"], loaded)} if "draft" in given else {}
    if options.prompt is None:
        if sys.stdin is None:
            raise ValueError("there is no prompt, and no input to read prompts from: give one after the model")
        return Repl(loaded, given, options.json).run()
    print_completion(loaded, options.prompt, given, as_json=options.json)
    return 0


def load_draft(name: str, loaded: Loaded) -> str | Loaded:
    """ "lookup" as it is (prompt lookup), or the draft model of this name, packed and with a KV cache as the model it
    drafts for."""
    import heedful
    from heedful.kernels.accelerate import packed_precision

    if name == "lookup":
        return name
    model = loaded.model
    return heedful.load(name, device=model.device, quantize=packed_precision(model), kv_cache=model.kv_cache)


def tell_special_tokens(loaded: Loaded, prompt: Any, given: dict[str, Any]) -> None:
    """Say on stderr that a special token in the prompt is read as text, unless that was decided."""
    if isinstance(prompt, str) and loaded.tokenizer is not None and not (given.get("chat") or "allow_special" in given):
        if names := [name for name in loaded.tokenizer.special_tokens if name in prompt]:
            print(f"heedful: {names[0]} is read as text; as a special token with --allow-special", file=sys.stderr)


def with_temperature(loaded: Loaded, given: dict[str, Any]) -> dict[str, Any]:
    """The options given, with this command's temperature if neither they nor the model's defaults have one."""
    options = loaded.generation_options(**given)
    has_one = "temperature" in options or options.get("beams", 1) > 1
    return given if has_one else {**given, "temperature": TEMPERATURE}


def print_completion(loaded: Loaded, prompt: Any, given: dict[str, Any], *, as_json: bool = False) -> str:
    """Print the completion of a prompt, streamed where possible, and return its text."""
    tell_special_tokens(loaded, prompt, given)
    given = with_temperature(loaded, given)
    if as_json or any(name in given for name in NOT_STREAMED):
        (result,) = loaded.complete(prompt, **given)
        if as_json:
            print(json.dumps(result_as_json(result, loaded), ensure_ascii=False, indent=2))
        else:
            print_choices(result, loaded)
        return result.choices[0].text
    if loaded.generation_options(**given).get("beams", 1) > 1:
        pieces = iter([loaded.complete(prompt, **given)[0].choices[0].text])
    else:
        pieces = loaded.stream(prompt, **given)
    if loaded.continues_prompt and not given.get("chat"):
        print(prompt, end="", flush=True)
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def print_choices(result: Result, loaded: Loaded) -> None:
    """Print the text of every choice; with logprobs, then a line for each of its tokens and the alternatives."""
    for choice, plain in zip(result.choices, result_as_json(result, loaded)["choices"], strict=True):
        print(choice.text if choice.index == 0 else f"\n{choice.text}")
        for score in plain["scores"] or []:
            others = "  ".join(f"{json.dumps(t['text'], ensure_ascii=False)} {t['logprob']:.3f}" for t in score["top"])
            piece = json.dumps(score["text"], ensure_ascii=False)
            print(f"{score['logprob']:9.3f}  {piece:<16}{others}".rstrip())


def result_as_json(result: Result, loaded: Loaded) -> dict[str, Any]:
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


class Repl:
    """An interactive loop: reads prompts and commands until Ctrl-D; in a chat the model sees the whole conversation."""

    def __init__(self, loaded: Loaded, given: dict[str, Any], as_json: bool) -> None:
        self.loaded, self.given, self.as_json = loaded, given, as_json
        self.messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Read lines until /quit or the end of the input."""
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
        """Complete a prompt; with --chat, as the next turn of the conversation."""
        if not self.given.get("chat"):
            print_completion(self.loaded, line, self.given, as_json=self.as_json)
            return
        messages = [*self.messages, {"role": "user", "content": line}]
        text = print_completion(self.loaded, messages, self.given, as_json=self.as_json)
        self.messages = [*messages, {"role": "assistant", "content": text}]

    def command(self, line: str) -> None:
        """/set, /settings or /reset; anything else prints the help."""
        words = line.split(maxsplit=2)
        if words[0] == "/settings":
            options = self.loaded.generation_options(**with_temperature(self.loaded, self.given))
            known = {"max_tokens": 200} | options
            print("\n".join(f"{name} = {value}" for name, value in sorted(known.items())))
        elif words[0] == "/reset":
            self.messages = []
        elif words[0] == "/set" and len(words) == 3 and words[1] in OPTIONS:
            value = OPTIONS[words[1]][0](words[2])
            self.given[words[1]] = load_draft(value, self.loaded) if words[1] == "draft" else value
        elif words[0] == "/set" and len(words) == 2 and words[1] in OPTIONS:
            self.given.pop(words[1], None)
        elif words[0] == "/set":
            hint = did_you_mean(words[1], OPTIONS) if words[1:] else ""
            print(f"/set NAME VALUE, where NAME is one of {', '.join(OPTIONS)}{hint}")
        else:
            print(HELP)
