"""`heedful batch`: every body as the server answers the same request, and no request lost or answered twice."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from heedful.cli import main
from heedful.serve.batch import answer_batch
from heedful.serve.batch_files import MAX_LINE, AnswerFile, BatchAnswer, RequestIndex, read_requests
from heedful.serve.options import Options

openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")

TURNS = [{"role": "user", "content": "Where is the cat?"}]
CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSE = "/v1/responses"
OTHER_EACH_TIME = ("id", "created", "created_at", "completed_at")
ASKED = {
    "a chat": (CHAT, {"model": "small", "messages": TURNS, "max_completion_tokens": 9, "temperature": 0}),
    "two prompts": (COMPLETION, {"model": "small", "prompt": ["the old", "a bird"], "max_tokens": 5, "temperature": 0}),
    "a seed": (COMPLETION, {"model": "tiny", "prompt": "To be", "max_tokens": 7, "seed": 3, "n": 2}),
    "vectors": (EMBEDDING, {"model": "bert-books", "input": ["a cat", "The whale"], "encoding_format": "float"}),
    "a response": (RESPONSE, {"model": "small", "input": "Where is it?", "max_output_tokens": 9, "temperature": 0}),
    "nobody": (CHAT, {"model": "nobody", "messages": TURNS}),
    "too hot": (COMPLETION, {"model": "small", "prompt": "x", "temperature": 3}),
    "no chat template": (CHAT, {"model": "tiny", "messages": TURNS}),
}  # fmt: skip
MODELS = ("--model", "tiny", "--model", "bert-books")


def line_of(custom_id: Any, url: str = COMPLETION, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def answers_in(path: Path) -> dict[str | None, dict[str, Any]]:
    """The answers by custom_id; each has OpenAI's fields."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(list(answer) == ["id", "custom_id", "response", "error"] and not answer["error"] for answer in found)
    assert all(list(answer["response"]) == ["status_code", "request_id", "body"] for answer in found)
    assert len({answer["id"] for answer in found}) == len(found)
    return {answer["custom_id"]: answer["response"] for answer in found}


def over_http(client: Any, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the body that openai's client gets for the same."""
    routes = {CHAT: client.chat.completions, COMPLETION: client.completions, EMBEDDING: client.embeddings}
    create = (routes | {RESPONSE: client.responses})[url]
    try:
        return 200, json.loads(create.with_raw_response.create(**body).text)
    except openai.APIStatusError as error:
        return error.status_code, error.response.json()


def test_bodies_are_those_of_the_server(server, folder, tmp_path, capsys):
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(line_of(name, url, **body) for name, (url, body) in ASKED.items()))
    assert main(["batch", str(requests), str(answers), "--model", str(folder), *MODELS]) == 1  # three are errors
    said = capsys.readouterr()
    assert "5 ok, 3 failed" in said.out and "tokens/s" in said.out and not said.err
    found = answers_in(answers)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    for name, (url, body) in ASKED.items():
        status, expected = over_http(client, url, body)
        got = found.pop(name)
        assert got["status_code"] == status and got["request_id"].startswith("req_")
        parts = [[body, *body.get("output", ())] for body in (got["body"], expected)]
        for mine, its in zip(*parts, strict=True):
            for other in OTHER_EACH_TIME:
                assert (mine.pop(other, None) is None) == (its.pop(other, None) is None)
        if status == 404:
            message = got["body"]["error"].pop("message")
            assert expected["error"].pop("message").split(";")[0] == message.split(";")[0]
        assert got["body"] == expected, name
    assert not found


def test_a_line_that_is_no_request_is_answered_and_the_rest_goes_on(tmp_path, capsys):
    lines = [
        "nonsense\n", line_of("fine", prompt="To be", max_tokens=2), "\n", "nonsense\n", "[]\n", line_of(7),
        line_of("url", "/api/train"), '{"custom_id": "get", "method": "GET", "url": "/v1/models"}\n',
        line_of("stream", input="x", stream=1), '{"custom_id": "body", "method": "POST", "url": "/v1/embeddings"}\n',
        line_of("long", prompt="x" * MAX_LINE), "[" * 100_000 + "\n", line_of("last", prompt="x", max_tokens=1),
    ]  # fmt: skip
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode().removesuffix(b"\n") + b"\r\n")
    assert main(["batch", str(requests), str(answers), "--model", "tiny"]) == 1
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    by_id = {a["custom_id"]: a["response"] for a in found}
    assert len(found) == len(lines) - 1 and [a["custom_id"] for a in found].count(None) == 6
    assert {a["custom_id"] for a in found if a["response"]["status_code"] == 200} == {"fine", "last"}
    for custom_id, words in ("url", "/api/train"), ("get", "POST"), ("stream", "stream"), ("body", "JSON object"):
        assert by_id[custom_id]["status_code"] == 400 and words in by_id[custom_id]["body"]["error"]["message"]
    before = answers.read_bytes()
    assert main(["batch", str(requests), str(answers), "--model", "tiny"]) == 1
    assert answers.read_bytes() == before and "(12 before)" in capsys.readouterr().out


def test_requests_with_the_same_custom_id_are_refused_before_anything_starts(tmp_path, capsys):
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(line_of("a") + "\n" + line_of("b") + line_of("a", prompt="other"))
    assert main(["batch", str(requests), str(answers)]) == 2 and not answers.exists()
    assert 'line 1 ("a"), line 4 ("a")' in capsys.readouterr().err


# --- killed and started again: the answers are then some first bytes of what would have been written ------------------


def answer_to(request: Any) -> BatchAnswer:
    return BatchAnswer(request, 200, "req_1", {"usage": None})


def test_killed_after_any_byte_nothing_is_lost_or_doubled(tmp_path):
    requests, path = io.BytesIO("".join(line_of(f"é {i}") for i in range(3)).encode()), tmp_path / "answers.jsonl"
    whole = b"".join(answer_to(request).line for request in read_requests(requests))
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        index = RequestIndex(requests)
        with AnswerFile(path, index) as answers:
            left = list(index.unanswered())
            assert len(left) == 3 - whole[:size].count(b"\n")
            for request in left:
                answers.write(answer_to(request))
        assert path.read_bytes() == whole


def test_what_fails_midway_leaves_no_errors_behind(tmp_path):
    """A full disk, say, or Ctrl-C: requests in flight are not answered with the end of the server."""
    requests = io.BytesIO("".join(line_of(str(i), prompt="To be", max_tokens=9) for i in range(30)).encode())
    statuses = []

    def write(answer: BatchAnswer) -> None:
        statuses.append(answer.status)
        if len(statuses) == 5:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        asyncio.run(answer_batch(read_requests(requests), Options(models=("tiny",), max_rows=8), write))
    assert set(statuses) == {200} and 5 <= len(statuses) < 30  # some were answered together with the fifth


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Dear Mary,\nI", "no answer"),
        (b"Dear Mary", "no answer"),
        (b'{"id": "mine", "response": {"status_code": 200}}\n', "no answer"),
        (line_of("0").encode(), "no answer"),
        (answer_to(next(read_requests(io.BytesIO(line_of("9").encode())))).line, "does not have"),
        (answer_to(next(read_requests(io.BytesIO(line_of("1", n=2).encode())))).line, "has changed"),
        (answer_to(next(read_requests(io.BytesIO(line_of("1").encode())))).line * 2, "twice"),
    ],
)
def test_a_file_with_something_else_is_left_alone(tmp_path, content, words):
    index, path = RequestIndex(io.BytesIO((line_of("0") + line_of("1")).encode())), tmp_path / "answers.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"does not belong to this batch: .*{words}"):
        AnswerFile(path, index)
    assert path.read_bytes() == content


def test_one_process_at_a_time(tmp_path):
    index, path = RequestIndex(io.BytesIO(b"")), tmp_path / "answers.jsonl"
    with AnswerFile(path, index), pytest.raises(ValueError, match="another process"):
        AnswerFile(path, index)
    AnswerFile(path, index).__exit__()


def test_requests_are_read_as_they_are_needed(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(line_of(i, prompt="x" * 100_000) for i in map(str, range(100))))  # 10 MB
    with path.open("rb") as file:
        tracemalloc.start()
        n = sum(1 for _ in RequestIndex(file).unanswered())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert n == 100 and peak < 2**20


def test_pipes(tmp_path, monkeypatch, capsysbinary):
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Pipe(line_of("a", prompt="To be", max_tokens=2).encode())))
    assert main(["batch", "-", "-", "--model", "tiny"]) == 0
    said = capsysbinary.readouterr()
    assert json.loads(said.out)["response"]["body"]["usage"]["completion_tokens"] == 2 and b"1 ok, 0 failed" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "2"], "--ray"),
        (["--ray", "--replicas", "-1"], "1 or more"),
        (["--max-rows", "0"], "max_rows"),
        (["--model", "nobody"], "nobody"),
        (["--ray"], "heedful[ray]"),
    ],
)
def test_a_mistake_is_one_line_that_helps(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    (tmp_path / "requests.jsonl").write_text(line_of("a"))
    assert main(["batch", str(tmp_path / "requests.jsonl"), str(tmp_path / "answers.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heedful: ") and error.count("\n") == 1 and words in error
