"""/tokenize, /detokenize and /tokenizer_info: the tokens of a served model."""

from __future__ import annotations

import pytest

import heedful
from support.application import sync_client
from support.serving import words

SHAPE = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def tiny():
    with sync_client("tiny") as client:
        yield client


@pytest.fixture(scope="module")
def several():
    with sync_client("tiny", "org/poet=shakespeare") as client:
        yield client


@pytest.fixture(scope="module")
def small(folder):
    """With a chat template, and an end of texts."""
    with sync_client(str(folder)) as client:
        yield client


def test_tokens_there_and_back(tiny):
    status, reply = tiny("POST", "/tokenize", json={"prompt": "hello"})
    tokenizer = heedful.load("tiny").tokenizer
    assert status == 200 and reply["tokens"] == tokenizer.encode("hello", add_special=True)
    assert (
        reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == heedful.load("tiny").model.context_length
    )
    assert tiny("POST", "/detokenize", json={"tokens": reply["tokens"]}) == (200, {"prompt": "hello"})
    assert tiny("POST", "/tokenize", json={"prompt": "hello" * 2000})[1]["count"] == 10_000


def test_special_tokens_are_found_by_their_names_alone(small):
    """As lm-evaluation-harness asks for the id of the end of a text."""
    tokenizer = words()
    end, name = tokenizer.eos_id, "<|endoftext|>"

    def tokens(text):
        return small("POST", "/tokenize", json={"prompt": text, "add_special_tokens": False})[1]["tokens"]

    info = small("GET", "/tokenizer_info")[1]
    assert info["eos_token"] == info["bos_token"] == name and "im_start" in info["chat_template"]
    assert tokens(name) == [end]
    assert end not in tokens(f"a{name}") + tokens(name + name)
    asked = {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}
    pieces = small("POST", "/tokenize", json=asked)[1]
    assert [tokenizer.token(token) for token in pieces["tokens"]] == pieces["token_strs"]
    assert small("POST", "/detokenize", json={"tokens": [end]})[1] == {"prompt": name}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a" * 1_000_001}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
        ("/detokenize", {"tokens": [0, 10**6]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(path, body, param, tiny):
    status, reply = tiny("POST", path, json=body)
    assert status == 400 and reply["error"]["param"] == param


def test_several_models_need_a_name(several):
    assert several("GET", "/tokenizer_info")[0] == 404
    size = len(heedful.load("tiny").tokenizer)
    assert several("GET", "/tokenizer_info?model=tiny")[1]["vocab_size"] == size


class Session:
    """lm-eval's network: our application in its place."""

    client = None

    def __init__(self):
        self.headers = {}

    def request(self, method, url, json=None, **_):
        return Reply(*self.client(method, url.removeprefix("http://localhost:8000"), json=json))


class Reply:
    def __init__(self, status, found):
        self.status_code, self.json = status, lambda: found

    def raise_for_status(self):
        assert self.status_code == 200


def remote_tokenizer(client, path, monkeypatch):
    utils = pytest.importorskip("lm_eval.utils")
    monkeypatch.setattr(utils.requests, "Session", type("Bound", (Session,), {"client": staticmethod(client)}))
    assert utils.check_remote_tokenizer_support(f"http://localhost:8000{path}")
    return utils.RemoteTokenizer(f"http://localhost:8000{path}")


def test_the_harness_understands_it(small, monkeypatch):
    """lm-eval's own remote tokenizer."""
    tokenizer, remote = words(), remote_tokenizer(small, "/v1/completions", monkeypatch)
    assert remote.encode("the cat") == tokenizer.encode("the cat")
    assert remote.decode(remote.encode("the cat, été")) == "the cat, été"
    assert remote.eos_token_id == remote.eot_token == tokenizer.eos_id
    assert "hello" in remote.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("model, loads", [("tiny", "tiny"), ("org/poet", "shakespeare")])
def test_the_harness_asks_for_one_of_several_models_by_its_address(model, loads, several, monkeypatch):
    path = f"/v1/engines/{model}/completions"
    remote, tokenizer = remote_tokenizer(several, path, monkeypatch), heedful.load(loads).tokenizer
    assert remote.tokenizer_info["vocab_size"] == len(tokenizer)
    assert remote.encode("To be") == tokenizer.encode("To be") and remote.decode(remote.encode("To be")) == "To be"
    status, reply = several("POST", path, json={"model": model, "prompt": "To", "max_tokens": 1})
    assert status == 200 and reply["model"] == model
    assert several("GET", "/v1/engines/other/completions/tokenizer_info")[0] == 404
