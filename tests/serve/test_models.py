"""/v1/models: what is served, as clients ask for it."""

from __future__ import annotations

import pytest

from heedful.text import Tokenizer
from heedful.weights.save import save
from support.application import sync_client
from support.folders import tiny_llama
from support.serving import CHATML, words

SHAPE = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def tiny():
    with sync_client("tiny") as client:
        yield client


@pytest.fixture(scope="module")
def several():
    with sync_client("tiny", "org/poet=shakespeare") as client:
        yield client


def test_the_list_and_each_of_it(several):
    status, reply = several("GET", "/v1/models")
    assert status == 200 and reply["object"] == "list"
    assert [model["id"] for model in reply["data"]] == ["tiny", "org/poet"]
    for model in reply["data"]:
        assert model["object"] == "model" and model["owned_by"] and type(model["created"]) is int
        assert several("GET", f"/v1/models/{model['id']}") == (200, model)


@pytest.mark.parametrize(
    "name",
    [
        "gpt-4", "..", "%2e%2e", "%2e%2e%2ftiny", "../tiny", "/etc/passwd", "%2Fetc%2Fpasswd", "ti%00ny", "tiny/",
        "TINY", "src/heedful/zoo/tiny", "x" * 5000,
    ],
)  # fmt: skip
def test_other_names_are_not_found(name, tiny):
    status, reply = tiny("GET", f"/v1/models/{name}")
    assert status == 404 and set(reply["error"]) == SHAPE and len(str(reply)) < 1000
    if name not in ("..", "../tiny"):  # of which the client makes another path
        assert reply["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("given", [None, 96])
def test_a_rotary_model_tells_its_context_and_keeps_to_it(given, tmp_path):
    tokenizer = words()
    model = tiny_llama(vocab_size=len(tokenizer), max_len=64)
    save(model, tmp_path / "rotary", Tokenizer(tokenizer.backend, roles=tokenizer.roles, chat_template=CHATML))
    longest = given or 64
    with sync_client(str(tmp_path / "rotary"), context_length=given) as client:
        (card,) = client("GET", "/v1/models")[1]["data"]
        assert card["context_length"] == card["max_model_len"] == longest
        assert client("GET", "/api/models")[1]["models"][0]["context"] == longest
        long = {"prompt": [5] * (longest - 3), "max_tokens": 4, "temperature": 0}
        chat = {"messages": [{"role": "user", "content": "the cat " * longest}], "max_tokens": 4}
        for path, body in ("/v1/completions", long), ("/v1/chat/completions", chat):
            status, reply = client("POST", path, json=body)
            assert status == 400 and reply["error"]["code"] == "context_length_exceeded", reply
            assert set(reply["error"]) == SHAPE and f"{longest} tokens" in reply["error"]["message"]
        status, reply = client("POST", "/v1/completions", json=long | {"max_tokens": 3})
        assert status == 200 and reply["usage"]["completion_tokens"] == 3


def test_a_context_that_cannot_be_set_is_refused_at_the_start():
    with (
        pytest.raises(ValueError, match="context length of a gpt cannot be set"),
        sync_client("shakespeare", context_length=4096),
    ):
        pass
