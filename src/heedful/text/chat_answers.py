"""Which tokens of a conversation the assistant wrote: what a chat model is trained to generate.

A template that marks them by `{% generation %} ... {% endgeneration %}` is taken at its word, as by transformers'
`apply_chat_template(return_assistant_tokens_mask=True)`. For all others an answer is what rendering it adds to the
prompt for it, `messages[:i]` with the generation prompt, up to and including the special token that ends the turn: the
model generates that token, and neither the line break behind it nor the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from heedful.text.chat import Messages, Rendered, render_chats
from heedful.text.tokenizer import Tokenizer

# Renders messages, with or without the begin of the assistant's turn behind them.
Render = Callable[[Messages, bool], Rendered]
ASSISTANT = ("assistant", "model")


def tokenize_answers(tokenizer: Tokenizer, messages: Messages, /, **variables: Any) -> tuple[list[int], list[bool]]:
    """The ids of a whole conversation, and for each whether the assistant wrote it: what a chat model learns.

    A message with `"weight": 0` is not learned, as in OpenAI's fine-tuning files. `variables` go to the template.
    """

    def render(turns: Messages, begins: bool) -> Rendered:
        return tokenizer.render_messages(turns, begins, **variables)

    rendered, spans = _render_answers(render, messages, tokenizer.special_tokens)
    return _mark_learned(tokenizer.encode_rendered(rendered)[0], spans)


def tokenize_many_answers(
    tokenizer: Tokenizer, chats: Sequence[tuple[Messages, Mapping[str, Any]]]
) -> list[tuple[list[int], list[bool]]]:
    """`tokenize_answers` of many conversations, each with its variables, in a fraction of the time: all that they need
    of the template is rendered in one go."""
    wanted: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # by whether the assistant's turn begins behind
    for number, (messages, _) in enumerate(chats):
        wanted[False].append((number, len(messages)))
        if "endgeneration" in (tokenizer.chat_template or ""):
            continue
        for i, message in enumerate(messages):
            if is_answer(message):
                wanted[False] += [(number, i + 1)] if i + 1 < len(messages) else []
                wanted[True] += [(number, i)] if i else []
    rendered: dict[tuple[int, int, bool], Rendered] = {}
    for begins, places in wanted.items():
        given = [([_without_weight(m) for m in chats[number][0][:n]], chats[number][1]) for number, n in places]
        found = render_many(tokenizer, given, begins) if given else []
        rendered |= {(number, n, begins): r for (number, n), r in zip(places, found, strict=True)}
    special = tokenizer.special_tokens
    answers = []
    for number, (messages, _) in enumerate(chats):

        def render(turns: Messages, begins: bool, number: int = number) -> Rendered:
            return rendered[number, len(turns), begins]

        answers.append(_render_answers(render, messages, special))
    tokens = tokenizer.encode_rendered(*(whole for whole, _ in answers))
    return [_mark_learned(found, spans) for found, (_, spans) in zip(tokens, answers, strict=True)]


def render_many(
    tokenizer: Tokenizer, chats: Sequence[tuple[Messages, Mapping[str, Any]]], begins: bool
) -> list[Rendered]:
    """Conversations, each with its variables, by the tokenizer's chat template; `begins`: with the begin of the
    assistant's turn behind them."""
    assert tokenizer.chat_template is not None
    given = [(messages, {"tools": None, "documents": None, **variables}) for messages, variables in chats]
    names: dict[str, Any] = {f"{role}_token": name for role, name in tokenizer.roles.items()}
    return render_chats(tokenizer.chat_template, given, tokenizer.special_tokens, add_generation_prompt=begins, **names)


def _mark_learned(
    tokens: Sequence[tuple[int, int, int]], spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """The ids of tokens, and whether each overlaps one of the spans."""
    learned = [False] * len(tokens)
    for first, last in spans:
        for place, (_, start, end) in enumerate(tokens):
            if start < last and first < end:
                learned[place] = True
    return [index for index, _, _ in tokens], learned


def _without_weight(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The special token with which a tokenizer's chat template ends an answer; None if it has no such token."""
    template = tokenizer.chat_template
    if template is None:
        return None
    if _found.get(tokenizer, ("", None))[0] != template:
        _found[tokenizer] = template, _find_end_of_turn(tokenizer)
    return _found[tokenizer][1]


_found: WeakKeyDictionary[Tokenizer, tuple[str, int | None]] = WeakKeyDictionary()  # each with its template


def _find_end_of_turn(tokenizer: Tokenizer) -> int | None:
    with suppress(ValueError):  # a template that refuses this conversation
        talk = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        ids, learned = tokenize_answers(tokenizer, talk)
        last = next((index for index, own in zip(ids[::-1], learned[::-1], strict=True) if own), None)
        return last if last in tokenizer.special_tokens.values() else None
    return None


def _render_answers(
    render: Render, messages: Messages, special: Iterable[str]
) -> tuple[Rendered, list[tuple[int, int]]]:
    """A rendered conversation and the spans of its text that are learned."""
    weights = [message.get("weight", 1) for message in messages if is_answer(message)]
    if not weights:
        raise ValueError("the conversation has no message of the assistant to learn from")
    turns = [_without_weight(message) for message in messages]
    whole = render(turns, False)
    if not whole.generated:
        learned = [i for i, message in enumerate(messages) if is_answer(message) and message.get("weight", 1)]
        return whole, [_added_span(render, turns, i, whole, list(special)) for i in learned]
    if all(weights):
        return whole, list(whole.generated)
    if len(whole.generated) != len(weights):
        raise ValueError(
            f"the template marks {len(whole.generated)} parts of {len(weights)} answers: none can be left out"
        )
    return whole, [span for span, weight in zip(whole.generated, weights, strict=True) if weight]


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is the assistant's."""
    return message.get("role") in ASSISTANT


def _added_span(render: Render, messages: Messages, i: int, whole: Rendered, special: list[str]) -> tuple[int, int]:
    """What message i adds to the prompt for it."""
    prompt = render(messages[:i], True).text if i else ""
    until = render(messages[: i + 1], False) if i + 1 < len(messages) else whole
    if not (until.text.startswith(prompt) and whole.text.startswith(until.text)):
        raise RewritingTemplateError(
            f"the chat template writes message {i} or those before it otherwise when more follow, so its tokens cannot "
            "be told from the prompt's"
        )
    found = [(at, at + len(name)) for name in special if (at := until.text.rfind(name, len(prompt))) >= 0]
    ends = [end for start, end in found if not until.user_made(start, end)]
    return len(prompt), max(ends, default=len(until.text))


class RewritingTemplateError(ValueError):
    """A template that writes earlier messages otherwise when more follow, as those that leave out past reasoning."""
