"""OpenAI's batch files: requests as JSON lines, and the answers to them, which are appended as they come.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "To be", "max_tokens": 9}}
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": "req_…", "body": {…}},
     "error": null}

The id of an answer is a hash of its request's custom_id and one of its line. By it a batch is resumed, and answers to
other requests are found out. Requests are read as they are needed: in memory there are 16 bytes for each, and a bit for
whether it is answered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from heedful.serve.errors import abbreviate
from heedful.text.parse import parse_json

try:
    import fcntl
except ImportError:  # Windows: answers are not locked there
    fcntl = None  # type: ignore[assignment]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE = 16 * 2**20  # bytes of a request
CHUNK = 2**16  # bytes of a longer line that are skipped at once
ID = "batch_req_"
BEGIN = f'{{"id": "{ID}'.encode()  # of every answer


@dataclass(frozen=True)
class BatchRequest:
    """A line of the requests."""

    number: int  # of the line, from 1
    id: str  # of its answer
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None  # why it cannot be asked

    @property
    def hashes(self) -> tuple[int, int]:
        """Of its custom_id (of its number, if it has none) and of its line."""
        return _hashes(self.id)


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to a request."""

    request: BatchRequest
    status: int
    request_id: str
    body: Any

    @property
    def line(self) -> bytes:
        """As OpenAI writes it, in ASCII."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        whole = {"id": self.request.id, "custom_id": self.request.custom_id, "response": response, "error": None}
        return json.dumps(whole).encode("ascii") + b"\n"

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Tokens of the prompt and of the completion."""
        usage = self.body.get("usage") or {}
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return prompt or usage.get("input_tokens", 0), completion or usage.get("output_tokens", 0)


# --- requests ---------------------------------------------------------------------------------------------------------


def read_requests(file: IO[bytes]) -> Iterator[BatchRequest]:
    """The requests from the first line on; blank lines are none."""
    file.seek(0)
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        rest = line
        while rest and not rest.endswith(b"\n"):  # it is too long, or the last
            rest = file.readline(CHUNK)
        if line.strip():
            yield parse_request(number, line.strip())


def parse_request(number: int, line: bytes) -> BatchRequest:
    """The request of a line; one with a `problem` where the line is none."""
    custom_id, problem = None, None
    found: dict[str, Any] = {}
    try:
        if len(line) > MAX_LINE:
            raise ValueError(f"it has more than {MAX_LINE:,} bytes")
        found = _parse(line)
        if not isinstance(found.get("custom_id"), str):
            raise ValueError("it needs a custom_id, which is a string")
        custom_id = found["custom_id"]
        _check(found)
    except ValueError as error:
        problem = f"line {number} of the batch is no request: {error}"
    key = f"#{number}" if custom_id is None else f'"{custom_id}'
    id = ID + _digest(key.encode("utf-8", "surrogatepass")) + _digest(line)
    if problem is not None:
        return BatchRequest(number, id, custom_id, problem=problem)
    return BatchRequest(number, id, custom_id, found["url"], json.dumps(found["body"]).encode("ascii"))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = parse_json(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is {abbreviate(found)}, not a JSON object")
    return found


def _check(found: dict[str, Any]) -> None:
    """ValueError for what is wrong with a request beside its body, which its endpoint checks."""
    if found.get("method") != "POST":
        raise ValueError(f"its method is {abbreviate(found.get('method'))}: it must be POST")
    if found.get("url") not in URLS:
        raise ValueError(f"its url is {abbreviate(found.get('url'))}: it must be one of {', '.join(URLS)}")
    body = found.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"its body is {abbreviate(body)}, not a JSON object")
    if body.get("stream"):
        raise ValueError("its body asks for a stream, and there are none in a batch: leave `stream` out")


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def _hashes(id: str) -> tuple[int, int]:
    digits = id.removeprefix(ID)
    return int(digits[:16], 16), int(digits[16:], 16)


class RequestIndex:
    """Which requests a file has, and which of them are answered."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        kinds = np.dtype([("custom_id", np.uint64), ("line", np.uint64)])
        self.hashes = np.fromiter((request.hashes for request in read_requests(file)), kinds)
        self.order = np.argsort(self.hashes["custom_id"], kind="stable")
        self.sorted = self.hashes["custom_id"][self.order]
        self.answered = np.zeros(len(self.hashes), bool)
        if (self.sorted[1:] == self.sorted[:-1]).any():
            self._reject_duplicates()

    def __len__(self) -> int:
        return len(self.hashes)

    def _reject_duplicates(self) -> None:
        again = np.flatnonzero(self.sorted[1:] == self.sorted[:-1])
        places = set(self.order[again[:3]]) | set(self.order[again[:3] + 1])
        found = [request for i, request in enumerate(read_requests(self.file)) if i in places]
        lines = ", ".join(f"line {request.number} ({abbreviate(request.custom_id)})" for request in found)
        raise ValueError(f"requests with the same custom_id: {lines}. Give each its own: answers are told apart by it")

    def mark(self, hashes: tuple[int, int]) -> None:
        """Note that a request is answered. ValueError unless they are the hashes of one without an answer."""
        custom_id, line = hashes
        place = int(np.searchsorted(self.sorted, np.uint64(custom_id)))
        if place == len(self) or self.sorted[place] != custom_id:
            raise ValueError("it answers a request that the batch does not have")
        request = self.order[place]
        if self.hashes["line"][request] != line:
            raise ValueError("its request has changed since")
        if self.answered[request]:
            raise ValueError("its request is answered twice")
        self.answered[request] = True

    def unanswered(self) -> Iterator[BatchRequest]:
        """The requests without an answer at the beginning."""
        before = self.answered.copy()
        for i, request in enumerate(read_requests(self.file)):
            if i >= len(self) or request.hashes != tuple(self.hashes[i].tolist()):
                raise ValueError(f"line {request.number} of the requests has changed: start the batch again")
            if not before[i]:
                yield request


# --- answers ----------------------------------------------------------------------------------------------------------


class AnswerFile:
    """The answers so far, and those to come; one process at a time writes them. Without a path: standard output."""

    def __init__(self, path: Path | None, index: RequestIndex) -> None:
        self.index = index
        self.n_failed = 0
        if path is None:
            self._file: IO[bytes] = sys.stdout.buffer
            return
        self._file = path.open("a+b")
        try:
            _lock(self._file, path)
            self._file.truncate(self._read(path))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer."""
        self.index.mark(answer.request.hashes)
        self.n_failed += answer.status != 200
        self._file.write(answer.line)
        self._file.flush()

    def _read(self, path: Path) -> int:
        """Mark what is answered; the bytes without a last line that a killed process has not written to its end."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and (line.startswith(BEGIN) or BEGIN.startswith(line)):
                break
            try:
                self._read_answer(line)
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} does not belong to this batch: {error}. Give another file for the "
                    "answers, or the requests that these belong to"
                ) from None
            end += len(line)
        return end

    def _read_answer(self, line: bytes) -> None:
        try:
            found = parse_json(line)
            hashes, status = _hashes(found["id"]), found["response"]["status_code"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError("it is no answer of a batch") from None
        self.index.mark(hashes)
        self.n_failed += status != 200


def _lock(file: IO[bytes], path: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes answers to {path}: wait for it, or stop it") from None
