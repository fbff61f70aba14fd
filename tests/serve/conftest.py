"""Small models, and one real server for all tests of a process; nothing here reaches the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "LANGSMITH_TRACING": "false"}

from support.serving import KEY, Server, saved


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A small GPT-2 with a chat template."""
    return saved(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def server(folder) -> Iterator[Server]:
    """`small` has a chat template; `shakespeare` and `tiny` write characters; `bert-books` only embeds."""
    with Server(folder, "shakespeare", "tiny", "bert-books", "--queue", "300", "--max-rows", "16") as found:
        yield found


@pytest.fixture(scope="session")
def locked() -> Iterator[Server]:
    """A server with a key, which others could reach."""
    with Server("tiny", "bert-books", "--host", "0.0.0.0", key=KEY) as found:
        yield found


@pytest.fixture
def idle(server) -> Iterator[Server]:
    """The server, with nothing left of other tests before, and of this one after."""
    server.wait_until_idle()
    yield server
    server.wait_until_idle()
