"""What a model is warned of reaches the client: each time, for its own text, in every route that reads one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from heedful.text.warn import collect_warnings, warn
from support.folders import tiny_translator
from support.playground import asked
from support.serving import ThreadServer, serving

RUSSIAN, ENGLISH = "Привет, мир! Как дела?", "What a fine day it was."
LONG = "good film " * 400
NO_TOKENS, IS_CUT = "vocabulary has no tokens", "is cut"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[ThreadServer]:
    translator = tmp_path_factory.mktemp("warnings") / "tiny-translator"
    tiny_translator().save(translator)
    with serving(translator, "sentiment", "reader", "entities", "bert-books", "shakespeare") as found:
        yield found


@pytest.fixture(scope="module")
def client(page: ThreadServer) -> OpenAI:
    return OpenAI(base_url=f"{page.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("path", "model", "field", "rest"),
    [
        ("translate", "tiny-translator", "text", {"beams": 1}),
        ("classify", "sentiment", "text", {}),
        ("tag", "entities", "text", {}),
        ("answer", "reader", "question", {"passage": "Anna lives in Berlin."}),
        ("fill", "bert-books", "template", {"n": 3}),
    ],
)
def test_a_script_without_tokens(page, path, model, field, rest):
    for text, expected in ((RUSSIAN, 1), (ENGLISH, 0), (RUSSIAN, 1)):  # the last may be cached
        text = f"{text} _" if path == "fill" else text
        told = asked(page, path, model=model, **{field: text}, **rest)["warnings"]
        assert [NO_TOKENS in line for line in told] == [True] * expected


def test_a_text_or_a_question_that_is_cut(page):
    (told,) = asked(page, "classify", model="sentiment", text=LONG)["warnings"]
    assert "tokens, and this model reads" in told and IS_CUT in told
    told = asked(page, "answer", model="reader", question="why " * 600, passage="Anna lives in Berlin.")["warnings"]
    assert len(told) == 1 and "cut" in told[0]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_reads_completions_with_warnings(client, stream):
    for prompt in (RUSSIAN, ENGLISH):
        found = client.completions.create(model="shakespeare", prompt=prompt, max_tokens=3, n=2, stream=stream)
        parts = list(found) if stream else [found]
        told = [(part.model_extra or {}).get("warnings") for part in parts]
        assert NO_TOKENS in told[0][0] if prompt == RUSSIAN else not any(told)
        firsts = {choice.index: i for i, part in reversed(list(enumerate(parts))) for choice in part.choices}
        assert all(i in firsts.values() for i, its in enumerate(told) if its)  # in the first chunk of a choice alone


def test_embeddings(client, page):
    found = client.embeddings.create(model="bert-books", input=[ENGLISH, RUSSIAN])
    assert [NO_TOKENS in line for line in found.model_extra["warnings"]] == [True]
    assert "warnings" not in client.embeddings.create(model="bert-books", input=ENGLISH).model_extra


def test_threads_do_not_hear_each_others_warnings():
    def one(i: int) -> list[str]:
        with collect_warnings() as told:
            for _ in range(100):
                warn(f"text {i}", UserWarning)
        return told

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(20))) == [[f"text {i}"] for i in range(20)]
    with pytest.warns(UserWarning, match="outside"):
        warn("outside", UserWarning)
