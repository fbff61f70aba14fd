"""Ray: a batch on two workers of which one is killed, and two replicas behind Ray Serve."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.serve.batch import answer_batch
from heedful.serve.batch_files import BatchAnswer, RequestIndex
from heedful.serve.options import Options
from support.documents import fenced
from support.serving import KEY, Client

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'heedful[ray]'")
openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")
psutil = pytest.importorskip("psutil", reason="psutil is not installed: pip install psutil")

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own
TURNS = [{"role": "user", "content": "Where is the cat?"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One of this machine's, with its files in a short path: the names of its sockets are limited."""
    folder, before = tempfile.mkdtemp(prefix="ray", dir="/tmp"), set(psutil.Process().children(recursive=True))
    ray.init(
        "local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, _temp_dir=folder,
    )  # fmt: skip
    yield
    ray.shutdown()
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 30)
    shutil.rmtree(folder, ignore_errors=True)
    assert not alive


def replicas() -> list[Any]:
    """The processes of the batch's actors."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.is_running() and "Replica" in " ".join(process.cmdline())]


def test_a_worker_is_killed_and_nothing_is_lost_or_doubled(cluster):
    from heedful.serve.ray_batch import answer_batch_on_ray, started_replicas

    body = {"model": "tiny", "prompt": "To be", "max_tokens": 20, "temperature": 0}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(120)]
    index = RequestIndex(io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode()))
    options = Options(models=("tiny",), max_rows=8)
    answers = list[BatchAnswer]()

    def write(answer: BatchAnswer) -> None:
        answers.append(answer)
        if len(answers) == 20:
            os.kill(replicas()[0].pid, signal.SIGKILL)

    with started_replicas(options, 2) as actors:
        asyncio.run(answer_batch_on_ray(index.unanswered(), len(index), actors, write, max_rows=8))
    assert Counter(answer.request.custom_id for answer in answers) == {str(i): 1 for i in range(120)}
    here = list[BatchAnswer]()
    asyncio.run(answer_batch(iter([answers[0].request]), options, here.append))
    assert {answer.body["choices"][0]["text"] for answer in answers} == {here[0].body["choices"][0]["text"]}


def test_two_replicas_behind_ray_serve(cluster, folder, monkeypatch):
    from ray import serve

    from heedful.serve.ray_app import build, deployment, replica_options

    with pytest.raises(ValueError, match="no option modles"):
        build({"modles": ["tiny"]})
    monkeypatch.delenv("HEEDFUL_API_KEY", raising=False)
    with pytest.raises(ValueError, match="HEEDFUL_API_KEY"):
        build({"models": ["tiny"]})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port}, logging_config={"log_level": "ERROR"})
    try:
        options = replica_options({"models": [str(folder)], "host": "127.0.0.1"})
        serve.run(deployment(options).options(num_replicas=2).bind())
        asks_both_replicas(Client(f"http://127.0.0.1:{port}"), folder)
    finally:
        serve.shutdown()


def test_the_documented_configuration_is_one():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from heedful.serve.ray_app import deployment, replica_options

    (block,) = [block for block in fenced("docs/batches.md") if block.language == "yaml"]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(block.code)).applications
    options = replica_options({**application.args, "api_keys": [KEY]})
    assert [found.name for found in application.deployments] == [deployment(options).name]
    assert options.models == ("shakespeare", "bert-books") and options.api_keys == (KEY,)


def asks_both_replicas(http: Client, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{http.url}/v1", api_key="unused", max_retries=0)
    settings: dict[str, Any] = {"model": "small", "prompt": "the old dog", "max_tokens": 12, "temperature": 0}
    (expected,) = heedful.load(folder).complete("the old dog", max_tokens=12, temperature=0)
    assert client.completions.create(**settings).choices[0].text == expected.choices[0].text
    assert client.chat.completions.create(model="small", messages=TURNS, max_completion_tokens=3, temperature=0)

    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="nobody", prompt="x")
    assert found.value.code == "model_not_found" and found.value.request_id
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: list(client.completions.create(**settings, stream=True)), range(24)))
    assert {"".join(chunk.choices[0].text for chunk in chunks) for chunks in streams} == {expected.choices[0].text}
    assert all(len(chunks) > 5 for chunks in streams)  # in pieces
    counts = set[float]()  # of each replica; their sum is odd

    def both_have_answered() -> bool:
        counts.add(http.count("heedful_generated_tokens_total"))
        return sum(counts) == 25 * 12 + 3 and 0 not in counts

    http.wait_for(both_have_answered, "both replicas")
    stream = client.completions.create(**settings | {"max_tokens": 1000}, stream=True)
    next(stream)
    stream.close()
    http.wait_for(lambda: http.count("heedful_cancelled_requests_total") == 1, "the request to be cancelled")
