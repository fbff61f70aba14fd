"""POST /v1/embeddings: the same vectors as `Loaded.embed`, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading

import pytest
import torch

import heedful
from heedful.kernels.accelerate import accelerate_as_stored, packed_precision
from heedful.serve import embedding_batches
from heedful.tasks.embed import Pooling, embed_token_ids
from heedful.text import train_wordpiece, words
from heedful.weights.save import save
from support.application import async_client, sync_client
from support.playground import same
from support.tiny import tiny

TEXTS = ["The cat sat.", "a", "A much longer sentence, about nothing at all.", "été", "The cat sat."]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small BERT for 64 tokens, with weights that are large enough to tell texts apart."""
    tokenizer = train_wordpiece(["the cat sat on the mat and the dog did not", *TEXTS] * 5, 100)
    folder = tmp_path_factory.mktemp("models") / "reader"
    save(tiny("bert", d_model=128, vocab_size=100).eval(), folder, tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def model(place):
    """As it is served: packed."""
    loaded = heedful.load(place)
    accelerate_as_stored(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def bert(place):
    with sync_client(place) as client:
        yield client


@pytest.fixture(scope="module")
def embed(bert, place):
    """The status and the JSON of one request to the BERT, or to others for which a server is made."""

    def embed(*names, pooling=None, **body):
        if not names and pooling is None:
            return bert("POST", "/v1/embeddings", json=body)
        with sync_client(*(names or [place]), pooling=pooling) as other:
            return other("POST", "/v1/embeddings", json=body)

    return embed


def vectors(reply) -> torch.Tensor:
    assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    return torch.tensor([item["embedding"] for item in reply["data"]])


def test_the_vectors_are_those_of_embed(embed, model):
    status, reply = embed(input=TEXTS, model="reader")
    assert status == 200 and reply["object"] == "list" and reply["model"] == "reader"
    assert {item["object"] for item in reply["data"]} == {"embedding"}
    assert torch.equal(vectors(reply), model.embed(TEXTS))
    n = sum(len(model.tokenizer.encode(text, add_special=True)) for text in TEXTS)
    assert reply["usage"] == {"prompt_tokens": n, "total_tokens": n}


def test_a_text_several_its_ids_and_several_ids(embed, model):
    ids = [model.tokenizer.encode(text, add_special=True) for text in TEXTS]
    expected = model.embed(TEXTS)
    alone = model.embed(TEXTS[2])
    assert torch.equal(vectors(embed(input=TEXTS[2])[1])[0], alone)
    assert torch.equal(vectors(embed(input=ids[2])[1])[0], alone)
    assert torch.equal(vectors(embed(input=ids)[1]), expected)


def test_base64_is_little_endian_float32(embed, model):
    status, reply = embed(input=TEXTS, encoding_format="base64")
    assert status == 200
    for item, expected in zip(reply["data"], model.embed(TEXTS), strict=True):
        raw = base64.b64decode(item["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == expected.tolist()


def test_fewer_dimensions_are_cut_and_scaled_again(embed, model):
    whole = model.embed(TEXTS)
    _, reply = embed(input=TEXTS, dimensions=5)
    assert torch.allclose(vectors(reply), torch.nn.functional.normalize(whole[:, :5]), atol=1e-6)
    assert torch.equal(vectors(embed(input=TEXTS, dimensions=whole.shape[1])[1]), whole)
    status, reply = embed(input=TEXTS, dimensions=whole.shape[1] + 1)
    assert status == 400 and reply["error"]["param"] == "dimensions" and "have 128" in reply["error"]["message"]


def test_a_decoder_embeds_too(embed):
    status, reply = embed("shakespeare", input=["To be", "or not"])
    loaded = heedful.load("shakespeare")
    accelerate_as_stored(loaded.model)  # as it is served
    assert status == 200 and torch.equal(vectors(reply), loaded.embed(["To be", "or not"]))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "at 1"),
        ({"input": [[]]}, "input.0", ""),
        ({"input": ["a"] * 2049}, "input", "2049"),
        ({"input": [[1]] * 2049}, "input", "2049"),
        ({"input": ["a", 1]}, "input.1", ""),
        ({"input": [[1], "a"]}, "input.1", ""),
        ({"input": {"a": 1}}, "input", ""),
        ({}, "input", "missing"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        (
            {"input": [1, 2, 100, 99999]},
            "input",
            "token 100 (at 2 of text 0): the vocabulary",
        ),
        ({"input": [[1], [-1]]}, "input.1.0", ""),
        ({"input": [[1], [5, 100256]]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [7] * 65}, "input", "65 tokens, and reader reads at most 64"),
        ({"input": [7] * 65}, "input", "check_embedding_ctx_length=False"),
        ({"input": ["a cat", "cat " * 70]}, "input", "text 1 has 72 tokens, and reader reads at most 64"),
    ],
)
def test_what_cannot_be_embedded_is_refused(embed, body, param, words):
    status, reply = embed(**body)
    error = reply["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"]


def test_word_vectors_are_served(embed, tmp_path):
    tokenizer = words(["the cat sat on the mat"])
    model = tiny("cbow", vocab_size=len(tokenizer))
    save(model, tmp_path / "cbow", tokenizer)
    status, reply = embed(str(tmp_path / "cbow"), input=["cat", "the mat"])
    assert status == 200
    cat, text = (torch.tensor(item["embedding"]) for item in reply["data"])
    vectors = model.vectors[tokenizer.encode("cat the mat")]
    assert torch.equal(cat, vectors[0]) and torch.allclose(text, vectors[1:].mean(dim=0))


def test_a_model_that_cannot_says_what_it_can(embed, tmp_path):
    heedful.load("reversal").save(tmp_path / "reversal")
    status, reply = embed(str(tmp_path / "reversal"), input="a")
    assert status == 400 and "cannot embed; it can: generate, stream, translate" in reply["error"]["message"]
    status, reply = embed("tiny", "shakespeare", input="a", model="gpt-4")
    assert status == 404 and reply["error"]["code"] == "model_not_found"
    pooling = Pooling("max")
    status, reply = embed(input="a", pooling=pooling)
    assert status == 400 and "'max' is no way to pool" in reply["error"]["message"]


def test_where_the_models_files_cut_texts_are_cut_and_ids_are_not(embed, place, model):
    pooling = Pooling("mean", normalize=True, truncate=True, max_tokens=10)
    long = "the cat sat on the mat and the dog did not " * 30
    status, reply = embed(input=[long, "a"], pooling=pooling)
    loaded = heedful.load(place)
    accelerate_as_stored(loaded.model)
    loaded.pooling = pooling
    assert status == 200 and torch.equal(vectors(reply), loaded.embed([long, "a"], max_tokens=10))
    assert "the end of 1 of 2 is cut" in reply["warnings"][0]
    assert reply["usage"]["prompt_tokens"] == 10 + len(model.tokenizer.encode("a", add_special=True))
    status, reply = embed(input=[5] * 11, pooling=pooling)
    assert status == 400 and "11 tokens" in reply["error"]["message"] and "at most 10" in reply["error"]["message"]


def test_two_thousand_texts_come_back_in_order(embed, model):
    texts = [f"{'cat ' * (i % 9)}{i}" for i in range(2048)]
    status, reply = embed(input=texts, encoding_format="base64")
    found = [struct.unpack(f"<{model.model.config.d_model}f", base64.b64decode(d["embedding"])) for d in reply["data"]]
    assert status == 200 and torch.equal(torch.tensor(found), model.embed(texts))


def test_a_pass_that_fails_is_500_and_the_next_one_works(place, monkeypatch):
    async def main():
        async with async_client(place) as client:
            loaded = (await client.app.state.manager.worker(None)).loaded
            with monkeypatch.context() as patch:
                patch.setattr(loaded.model, "hidden", lambda batch: [][0])
                reply = await client.post("/v1/embeddings", json={"input": "a"})
                assert reply.status_code == 500 and "internal error" in reply.json()["error"]["message"]
                patch.setattr(loaded.model, "hidden", lambda batch: torch.full((1, 3, 128), torch.nan))
                reply = await client.post("/v1/embeddings", json={"input": "a"})
                assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200

    asyncio.run(main())


def test_a_client_that_goes_away_ends_its_work(place, monkeypatch):
    began, go_on, n_passes = threading.Event(), threading.Event(), 0
    real = embedding_batches.embed_rows

    def slow(*arguments):
        nonlocal n_passes
        n_passes += 1
        began.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(embedding_batches, "embed_rows", slow)
    monkeypatch.setattr(embedding_batches, "MAX_BATCH", 1)

    async def main():
        async with async_client(place) as client:
            messages = [{"type": "http.request", "body": json.dumps({"input": ["a"] * 50}).encode()}]

            async def receive():
                if messages:
                    return messages.pop()
                await asyncio.to_thread(began.wait, 30)
                return {"type": "http.disconnect"}

            async def send(message):
                pass

            headers = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
                "path": "/v1/embeddings", "raw_path": b"/v1/embeddings", "query_string": b"", "root_path": "",
                "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000), "headers": headers,
            }  # fmt: skip
            await client.app(scope, receive, send)
            go_on.set()
            worker = await client.app.state.manager.worker(None)
            await worker.run_job(iter([1])).result()  # behind the one that was given up
            assert n_passes == 1 and not worker.busy

    asyncio.run(main())


def test_requests_that_wait_at_the_same_time_share_batches(place, model, monkeypatch):
    """One pass for the first, and while it runs the others come: texts of about one length are one batch."""
    texts = ["the cat sat", "the dog sat", "a cat did", "the mat sat", "the cat sat on the mat and the dog did not"]
    began, go_on, sizes = threading.Event(), threading.Event(), []
    real = embedding_batches.embed_rows

    def recorded(model, rows, pooling):
        sizes.append(len(rows))
        began.set()
        assert go_on.wait(30)
        return real(model, rows, pooling)

    monkeypatch.setattr(embedding_batches, "embed_rows", recorded)

    async def main():
        async with async_client(place) as client:
            worker = await client.app.state.manager.worker(None)
            assert packed_precision(worker.loaded.model) == "float32"
            first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "dog"}))
            await asyncio.to_thread(began.wait, 30)
            others = [asyncio.create_task(client.post("/v1/embeddings", json={"input": text})) for text in texts]
            while worker.n_waiting < 1 + len(texts):
                await asyncio.sleep(0)
            go_on.set()
            return [(await task).json() for task in (first, *others)]

    replies = asyncio.run(main())
    assert sizes == [1, 4, 1] or sizes == [1, 1, 4]
    expected = model.embed(["dog", *texts])
    for reply, vector in zip(replies, expected, strict=True):
        assert torch.allclose(vectors(reply)[0], vector, atol=1e-5)


def test_a_pass_that_fails_for_one_requests_texts_fails_no_other(model):
    """The batch is computed again without the texts of others."""
    batcher = embedding_batches.EmbeddingBatcher(model)
    good, bad = batcher.add([[5, 6, 7]]), batcher.add([[5, 6, 10**6]])  # an id that is no token's
    assert torch.allclose(list(good)[-1], next(embed_token_ids(model.model, [[5, 6, 7]], model.pooling))[1])
    with pytest.raises(IndexError):
        next(bad)
    assert list(bad) == []


def test_a_packed_encoder_can_be_looked_into(bert, place):
    """The page's attention weights of the served model are those of the plain one."""
    plain, text = heedful.load(place), "the cat sat on the mat"
    tokens = torch.tensor([plain.tokenizer.encode(text, add_special=True)])
    with plain.capture("*.1.self.weights") as activations, torch.no_grad():
        plain.model(tokens)
    body = {"model": "reader", "text": text, "which": "self", "layer": 1}
    status, reply = bert("POST", "/api/attention", json=body)
    assert status == 200
    (expected,) = activations.values()
    same(reply["weights"], expected[0])
