"""`heedful chat`: a conversation with a model, or one answer and exit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.arguments import MODEL, add_context_length, add_device, add_kv_cache, add_quantize
from heedful.cli.generate import GRAMMARS
from heedful.cli.inputs import is_piped, read_whole
from heedful.cli.results import add_json, print_json
from heedful.text.plural import counted

if TYPE_CHECKING:
    from heedful.loaded import Loaded

OPTIONS = ("temperature", "top_p", "max_tokens", "seed", *GRAMMARS)
HELP = "/reset forgets the conversation   /system TEXT   /save FILE (JSON lines)   /exit; anything else is a message"
ROOM = 256  # tokens at least for an answer, in a context that has them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The message, the model, how to answer."""
    parser.add_argument(
        "message", nargs="*", help="a message, answered once; - or a pipe: from standard input. Without: a conversation"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="a text file that follows the message")
    parser.add_argument("--model", help=f"{MODEL}; with a chat template (default: the first that is here)")
    parser.add_argument("--system", metavar="TEXT", help="how to answer, as the system's message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own, else 0.8)")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose within this mass of probability")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the model's, else 2048)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    for name, (parse, about) in GRAMMARS.items():
        parser.add_argument(f"--{name}", type=parse, metavar="REGEX" if name == "regex" else "FILE", help=about)
    add_device(parser)
    add_quantize(parser)
    add_kv_cache(parser)
    add_context_length(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Answer the message given, or start a conversation."""
    import heedful
    from heedful.cli.arguments import accelerate_if_plain

    message = given_message(options)
    how = {name: getattr(options, name) for name in ("device", "quantize", "kv_cache", "context_length")}
    loaded = heedful.load(options.model or default_chat_model(), **how)
    accelerate_if_plain(loaded)
    if loaded.tokenizer is None or loaded.tokenizer.chat_template is None:
        raise ValueError(
            f"{loaded.name} has no chat template: take a chat (instruct) model, as `heedful pull "
            f"smollm2-135m-instruct` fetches one; `heedful generate {loaded.name}` continues plain text"
        )
    given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    conversation = Conversation(loaded, options.system, given)
    if message is None:
        return converse(conversation)
    pieces = conversation.answer(message)
    if options.json:
        print_json({"input": message, "answer": "".join(pieces), "model": loaded.name})
        return 0
    print_pieces(pieces)
    return 0


def given_message(options: argparse.Namespace) -> str | None:
    """The message given by arguments, file or pipe; None: there will be a conversation."""
    words = [word for word in options.message if word != "-"]
    parts = [" ".join(words)] if words else []
    if options.file is not None:
        parts.append(read_whole(options.file))
    if "-" in options.message or (not parts and is_piped()):
        parts.append(sys.stdin.read().strip())
    if parts and not any(part.strip() for part in parts):
        raise ValueError("the message is empty: give a text, or none for a conversation")
    if not parts and sys.stdin is None:
        raise ValueError("there is no message, and no input to read messages from: heedful chat MESSAGE")
    return "\n\n".join(parts) if parts else None


def default_chat_model() -> str:
    """The first model with a chat template among those that were pulled, then among those that ship."""
    from heedful.weights.catalog import pulled_models
    from heedful.weights.describe import load_tokenizer
    from heedful.weights.resolve import shipped_models

    for name, path in (pulled_models() | shipped_models()).items():
        try:
            if load_tokenizer(str(path)).chat_template is not None:
                return name
        except ValueError:  # it reads numbers or images
            continue
    raise ValueError(
        "no model with a chat template is here: `heedful pull smollm2-135m-instruct` fetches one, or give --model"
    )


class Conversation:
    """The messages so far, and the model that answers."""

    def __init__(self, loaded: Loaded, system: str | None, given: dict[str, Any]) -> None:
        from heedful.cli.generate import with_temperature

        self.loaded, self.system = loaded, system
        self.given = with_temperature(loaded, {**given, "chat": True})
        self.messages: list[dict[str, str]] = []

    def all_messages(self) -> list[dict[str, str]]:
        """The messages with the system's before them."""
        return ([] if self.system is None else [{"role": "system", "content": self.system}]) + self.messages

    def answer(self, message: str) -> Iterator[str]:
        """The pieces of an answer; what was generated of it becomes part of the conversation, whole or not."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": message})
        text = ""
        try:
            self.forget()
            for piece in self.loaded.chat(self.all_messages(), stream=True, **self.given):
                text += piece
                yield piece
        except ValueError:
            del self.messages[before:]
            raise
        finally:
            if self.messages[-1:] == [{"role": "user", "content": message}]:
                self.messages.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        """Drop the oldest messages if the context has no room for them and an answer."""
        most, n = self.loaded.model.context_length, 0
        while most is not None and len(self.messages) > 2 and not self._fits(most - min(ROOM, most // 4)):
            del self.messages[:2]
            n += 2
        if n:
            print(f"heedful: the oldest {n} messages are forgotten: the context has no room for them", file=sys.stderr)

    def _fits(self, most: int) -> bool:
        try:
            return len(self.loaded.encode_prompt(self.all_messages(), chat=True)[0]) <= most
        except ValueError:
            return False


def print_pieces(pieces: Iterator[str]) -> None:
    """Print an answer as it comes."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def converse(conversation: Conversation) -> int:
    """Read messages and commands until /exit or the end of the input; Ctrl-C stops an answer."""
    try:
        import readline  # noqa: F401  (arrows recall earlier lines wherever Python has it)
    except ImportError:
        pass
    print(f"{conversation.loaded.name}: type a message and press Enter; Ctrl-C stops an answer. {HELP}")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n[/exit or Ctrl-D ends the conversation]")
            continue
        if line in ("/exit", "/quit"):
            return 0
        if not line:
            continue
        pieces = conversation.answer(line)
        try:
            command(conversation, line) if line.startswith("/") else print_pieces(pieces)
        except KeyboardInterrupt:
            pieces.close()  # type: ignore[attr-defined]
            print("\n[stopped]")
        except (ValueError, OSError) as problem:
            print(f"[{problem}]")


def command(conversation: Conversation, line: str) -> None:
    """/reset, /system or /save; anything else prints the help."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/reset":
        conversation.messages = []
        print("[a new conversation]")
    elif name == "/system":
        conversation.system = rest or None
        print(f"[system: {rest}]" if rest else "[no system message]")
    elif name == "/save" and rest:
        save_conversation(conversation.all_messages(), Path(rest).expanduser())
        print(f"[{rest}: {counted(len(conversation.all_messages()), 'message')}]")
    else:
        print(HELP)


def save_conversation(messages: list[dict[str, str]], path: Path) -> None:
    """Write a conversation as a line of JSON, as `heedful train MODEL chats.jsonl` reads it; never over a file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise ValueError(f"{path} exists: choose another name") from None
