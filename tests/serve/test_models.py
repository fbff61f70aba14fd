"""/v1/models: what is served, as clients ask for it."""

from __future__ import annotations

import pytest

from support.application import sync_client

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
