"""LangChain's OpenAI classes against a real server."""

from __future__ import annotations

from typing import Any

import pytest

import heedful
from heedful.kernels.accelerate import accelerate_as_stored

pytest.importorskip("langchain_openai", reason="LangChain is not installed: pip install langchain-openai")

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import PromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError

PROMPT = "the old dog"


@pytest.fixture(scope="module")
def where(server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "unused", "max_retries": 0}


def test_a_completion(where, folder):
    llm = OpenAI(model="small", temperature=0, max_tokens=9, **where)
    expected = heedful.load(folder).generate([PROMPT, "a bird"], temperature=0, max_tokens=9)
    assert llm.invoke(PROMPT) == expected[0]
    assert llm.batch([PROMPT, "a bird"]) == expected
    generations = llm.generate([PROMPT, "a bird"])  # one request with both prompts
    assert [answers[0].text for answers in generations.generations] == expected
    assert generations.llm_output["token_usage"]["completion_tokens"] > 0
    assert "".join(llm.stream(PROMPT)) == expected[0]


def test_a_chain_that_stops(where):
    llm = OpenAI(model="shakespeare", temperature=0, max_tokens=60, **where)
    whole = llm.invoke("ROMEO:\n")
    chain = PromptTemplate.from_template("{who}:\n") | llm.bind(stop=[whole[20:24]])
    assert chain.invoke({"who": "ROMEO"}) == whole[: whole.index(whole[20:24])]


def test_several_answers(where):
    llm = OpenAI(model="small", temperature=1, max_tokens=4, n=2, best_of=4, seed=1, **where)
    (answers,) = llm.generate([PROMPT]).generations
    assert len(answers) == 2


def test_a_chat(where, folder):
    llm = ChatOpenAI(model="small", temperature=0, max_completion_tokens=9, **where)
    turns = [SystemMessage("Be brief."), HumanMessage("Where is the cat?")]
    answer = llm.invoke(turns)
    spoken = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the cat?"}]
    expected = heedful.load(folder).complete(spoken, chat=True, temperature=0, max_tokens=9)
    assert answer.content == expected[0].choices[0].text
    assert answer.usage_metadata["output_tokens"] == 9 and answer.response_metadata["finish_reason"] == "length"
    assert "".join(piece.content for piece in llm.stream(turns)) == answer.content


def test_the_responses_api_says_the_same(where):
    settings = dict(model="small", temperature=0, max_completion_tokens=9, **where)
    turns = [SystemMessage("Be brief."), HumanMessage("Where is the cat?")]
    answer = ChatOpenAI(use_responses_api=True, **settings).invoke(turns)
    assert answer.text == ChatOpenAI(**settings).invoke(turns).text and answer.usage_metadata["output_tokens"] == 9
    assert "".join(piece.text for piece in ChatOpenAI(use_responses_api=True, **settings).stream(turns)) == answer.text


def test_embeddings(where):
    """As heedful's own documentation says: the texts themselves are sent."""
    vectors = OpenAIEmbeddings(model="bert-books", check_embedding_ctx_length=False, **where)
    texts = ["The whale rose.", "a cat"]
    loaded = heedful.load("bert-books")
    accelerate_as_stored(loaded.model)  # as it is served
    expected = loaded.embed(texts).tolist()
    assert vectors.embed_documents(texts) == [pytest.approx(vector, abs=1e-5) for vector in expected]
    assert vectors.embed_query("a cat") == pytest.approx(expected[1], abs=1e-5)


class OtherTokens:
    """Stands for tiktoken's cl100k_base, which would be downloaded: its ids mean nothing to our model."""

    def encode_ordinary(self, text: str) -> list[int]:
        return [79_000 + len(word) for word in text.split()]

    encode = encode_ordinary


def test_embeddings_of_another_tokenizer_are_refused_with_the_way_out(where, monkeypatch):
    """LangChain's default cuts texts with OpenAI's tokenizer and sends its ids."""
    import tiktoken

    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: OtherTokens())
    with pytest.raises(BadRequestError, match="check_embedding_ctx_length=False"):
        OpenAIEmbeddings(model="bert-books", **where).embed_documents(["The whale rose.", "a cat"])
