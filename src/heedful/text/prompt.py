"""Prompts as token ids beyond plain encoding: special tokens around them, truncation, fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from heedful.text.chat import Messages
from heedful.text.limits import characters_for
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown

# The special tokens around prefix, suffix and middle (Bavarian et al. 2022, "PSM"), and one that ends the middle: of
# StarCoder, SantaCoder, Qwen, DeepSeek, CodeLlama, Codestral.
FILL_IN_THE_MIDDLE = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
)


# What a template gets from elsewhere, or what is no variable of a template.
RESERVED = ("messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")


class PromptOptions(TypedDict, total=False):
    """How a prompt becomes token ids; what is not given is the default."""

    chat: bool  # put the prompt into the model's chat template
    allow_special: bool  # without chat: special tokens written in the prompt are those tokens, not text (default False)
    add_special_tokens: bool  # those around a text, as <s>; default: True without chat, whose template writes them
    truncate_prompt_tokens: int | None  # at most this many, the last ones; -1: what the context leaves for the prompt
    add_generation_prompt: bool  # with chat: begin the model's turn (default True)
    continue_final_message: bool  # with chat: the last message stays open, and the model continues it
    tools: Sequence[Mapping[str, Any]] | None  # with chat: functions that the model may call, as OpenAI's API has them
    chat_template_kwargs: Mapping[str, Any]  # with chat: variables of the template, as {"enable_thinking": False}


def tokenize_prompt(tokenizer: Tokenizer, prompt: str | Messages, options: PromptOptions) -> list[int]:
    """The token ids of a text, or with `chat` of a conversation."""
    chat, n = options.get("chat", False), options.get("truncate_prompt_tokens")
    most = None if n is None else characters_for(tokenizer, n)  # of a longer text the beginning is not tokenized
    add_special = options.get("add_special_tokens", not chat)
    if not chat:
        alone = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
        if wrong := [name for name in alone if options.get(name)]:
            raise ValueError(f"{', '.join(wrong)}: for conversations; give chat=True")
        if not isinstance(prompt, str):
            raise ValueError("a conversation needs chat=True")
        warn_if_unknown(tokenizer, [prompt])
        text, allow_special = prompt if most is None else prompt[-most:], options.get("allow_special", False)
        ids = tokenizer.encode(text, add_special=add_special, allow_special=allow_special)
    else:
        if options.get("allow_special"):
            raise ValueError("allow_special: in a conversation special tokens come from its template alone")
        ids = _tokenize_chat(tokenizer, prompt, options, most)
        before, behind = special_affixes(tokenizer) if add_special else ([], [])
        ids = [*before, *ids, *behind]
    return ids if n is None else truncate_prompt(tokenizer, ids, n)


def _tokenize_chat(tokenizer: Tokenizer, prompt: str | Messages, options: PromptOptions, most: int | None) -> list[int]:
    """The token ids of a conversation, or of its last `most` characters."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    warn_if_unknown(tokenizer, (turn["content"] for turn in turns if isinstance(turn.get("content"), str)))
    variables = dict(options.get("chat_template_kwargs") or {})
    if wrong := [name for name in variables if name in RESERVED or not name.isidentifier()]:
        raise ValueError(f"chat_template_kwargs has {wrong[0]!r}, which is not a variable for a template")
    if tools := options.get("tools"):
        variables["tools"] = tools
    continues = options.get("continue_final_message", False)
    begins = options.get("add_generation_prompt", not continues)
    if continues and begins:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other: leave one out")
    rendered = tokenizer.render_messages(turns, begins, continues, **variables)
    return [id for id, _, _ in tokenizer.encode_rendered(rendered if most is None else rendered.tail(most))[0]]


def special_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that `encode(..., add_special=True)` puts before a text, and those behind it."""
    plain, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special=True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def truncate_prompt(tokenizer: Tokenizer, ids: Sequence[int], n: int) -> list[int]:
    """At most n tokens: the last ones of the text, within the special tokens around it. ValueError if n is less than
    those take."""
    ids = list(ids)
    if len(ids) <= n:
        return ids
    before, behind = special_affixes(tokenizer)
    before = before if ids[: len(before)] == before else []
    behind = behind if behind and ids[-len(behind) :] == behind else []
    left = n - len(before) - len(behind)
    if left < 1:
        raise ValueError(f"{n} tokens have no room for a text: this model's special tokens take {n - left} of them")
    return [*before, *ids[len(ids) - len(behind) - left : len(ids) - len(behind)], *behind]


def encode_fill_in_the_middle(tokenizer: Tokenizer, prefix: str, suffix: str) -> tuple[list[int], int | None]:
    """The prompt after which a model generates what stands between prefix and suffix, and the token that ends it.

    ValueError for a tokenizer without the special tokens of fill-in-the-middle.
    """
    for *names, end in FILL_IN_THE_MIDDLE:
        ids = [tokenizer.id(name) for name in names]
        if None not in ids:
            before, behind, middle = (i for i in ids if i is not None)
            first, _ = special_affixes(tokenizer)
            text = [before, *tokenizer.encode(prefix), behind, *tokenizer.encode(suffix), middle]
            return [*first, *text], tokenizer.id(end)
    raise ValueError("this model was not trained to fill in the middle: its tokenizer has no token for a suffix")
