"""How the playground's numbers travel, how often a model runs for them, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from heedful.observe import attention as look
from heedful.observe.inputs import text_input
from heedful.serve.playground import attention_view, wire
from heedful.serve.playground.inspection import CACHE_BYTES, Inspector, LRUCache, memory_size
from heedful.serve.playground.wire import encode_arrays, encode_json
from support.playground import TEXTS, array, asked, packed, same
from support.serving import ThreadServer, assert_error, serving

IMAGE = [[0.5, 0.25] * 4] * 8
WITH_ARRAYS: dict[str, dict[str, Any]] = {
    "attention": {"model": "tiny", "text": "To be"},
    "attention/overview": {"model": "bert-books", "text": "A man <b> 日本"},
    "attention/neuron": {"model": "tiny", "text": "To be", "index": 1},
    "alignment": {"model": "reversal", "source": "1 2 3"},
    "rollout": {"model": "tiny", "text": "To be"},
    "steps": {"model": "tiny", "text": "To be"},
    "steps/map": {"model": "tiny", "text": "To be"},
    "translate": {"model": "translator", "text": "Ein Hund."},
    "fill": {"model": "tiny", "texts": ["he is a _", "she is a _"], "n": 5},
    "image/classify": {"model": "digits-vit", "image": IMAGE},
}


@pytest.fixture(scope="module")
def page() -> Iterator[ThreadServer]:
    with serving(*TEXTS, "digits-vit") as found:
        yield found


def inspector_of(page: ThreadServer, name: str) -> Inspector:
    (found,) = (i for i in page.app.state.inspectors._by_worker.values() if i.loaded.name == name)
    return found


@pytest.fixture
def forgetful(page: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> ThreadServer:
    """The server with an empty cache."""
    for name in TEXTS:
        asked(page, "tokens", model=name, text="1 2")
        monkeypatch.setattr(inspector_of(page, name), "_cache", LRUCache())
    return page


def passes(page: ThreadServer, name: str) -> list[int]:
    """A list that grows with every pass of a served model."""
    count: list[int] = []
    model = inspector_of(page, name).model
    half = getattr(model, "encoder", None) or model.get_submodule("decoder")
    half.register_forward_hook(lambda *_: count.append(1))
    return count


# --- how they travel --------------------------------------------------------------------------------------------------


def compare(plain: Any, framed: Any, after: bytes) -> int:
    """The number of arrays in two forms of a reply, which must be the same to the bit."""
    if isinstance(plain, dict) and "dtype" in plain:
        assert framed["at"] % 4 == 0 and framed["shape"] == plain["shape"]
        assert array(plain).numpy().tobytes() == array(framed, after).numpy().tobytes()
        return 1
    assert type(plain) is type(framed)
    if isinstance(plain, dict):
        assert list(plain) == list(framed)
        return sum(compare(plain[key], framed[key], after) for key in plain)
    if isinstance(plain, list):
        assert len(plain) == len(framed)
        return sum(compare(a, b, after) for a, b in zip(plain, framed, strict=True))
    assert plain == framed
    return 0


@pytest.mark.parametrize("path", WITH_ARRAYS)
def test_json_and_arrays_beside_it_agree_to_the_bit(page, path):
    framed, after = packed(page, path, **WITH_ARRAYS[path])
    assert compare(asked(page, path, **WITH_ARRAYS[path]), framed, after) >= 1


@pytest.mark.parametrize("name", TEXTS)
def test_weights_are_the_librarys_to_the_bit(page, name):
    for layer in (0, -1):
        asked(page, "tokens", model=name, text=TEXTS[name])
        loaded = inspector_of(page, name).loaded
        reading = text_input(loaded.model, loaded.tokenizer, TEXTS[name])
        expected = list(look.attention_weights(loaded.model, reading).values())
        layer %= len(expected)
        (expected[layer],) = look.attention_weights(loaded.model, reading, layer=layer).values()
        which = "cross" if reading.source else "self"
        found, after = packed(page, "attention", model=name, text=TEXTS[name], which=which, layer=layer)
        assert torch.equal(array(found["weights"], after), expected[layer])


def test_whoever_does_not_ask_for_arrays_gets_json(page):
    for accept in ("*/*", "application/json", "text/html", "application/vnd.heedful.arrays-2", ""):
        response = page.post("/api/attention", WITH_ARRAYS["attention"], headers={"accept": accept})
        assert response.headers["content-type"] == "application/json" and response.headers["vary"] == "accept"
    wanted = {"accept": "application/vnd.heedful.arrays"}
    plain = page.post("/api/tokens", {"model": "tiny", "text": "To be"}, headers=wanted)
    assert plain.headers["content-type"] == "application/json" and plain.json()["tokens"]  # it has none
    wrong = page.post("/api/attention", {"model": "tiny", "text": "To be", "layer": 9}, headers=wanted)
    assert "no layer 9" in assert_error(wrong, 400)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_arrays_of_every_shape_begin_where_they_are_said_to(shape, dtype):
    given = [(255 * torch.rand(shape, generator=torch.Generator().manual_seed(i))).to(dtype) for i in range(3)]
    body = encode_arrays({"a": given[0], "é": [given[1], {"b": given[2]}], "n": None})
    end = 4 + int.from_bytes(body[:4], "little")
    assert end % 4 == 0
    framed = wire.json.loads(body[4:end])
    for x, told in zip(given, (framed["a"], framed["é"][0], framed["é"][1]["b"]), strict=True):
        assert (told["at"] + end) % 4 == 0
        assert torch.equal(array(told, body[end:]), x if dtype == torch.uint8 else x.float())


def test_what_is_not_a_number_is_said_and_not_sent():
    for make in (encode_json, encode_arrays):
        with pytest.raises(wire.ApiError, match="not one"):
            make({"weights": torch.tensor([1.0, torch.nan])})
        with pytest.raises(wire.ApiError, match="not finite"):
            make({"scale": float("inf")})
        make({"scores": torch.tensor([0.0, -torch.inf])})  # where nobody may look


# --- how often a model runs, and what is cached -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shakespeare", "bert-books", "translator"])
def test_moving_between_layers_heads_and_tokens_runs_the_model_once(forgetful, name):
    text = {"model": name, "text": TEXTS[name], "which": "encoder" if name == "translator" else "self"}
    asked(forgetful, "attention", **{**text, "text": TEXTS[name] + " a"})  # what is read, is not what is looked at
    count = passes(forgetful, name)
    asked(forgetful, "tokens", **text)
    asked(forgetful, "attention", **text, layer=2)
    before = len(count)
    for layer in range(3):
        asked(forgetful, "attention", **text, layer=layer)
        for token in range(3):
            asked(forgetful, "attention/neuron", **text, layer=layer, head=token, index=token)
    assert before >= 1 and len(count) == before


def test_of_a_large_pass_only_the_requested_layer_is_cached(forgetful, monkeypatch):
    text = {"model": "shakespeare", "text": "A horse! a horse! my kingdom"}
    whole = [asked(forgetful, "attention", **text, layer=i)["weights"] for i in range(2)]
    small = asked(forgetful, "attention/overview", **text)["thumbnails"]
    inspector = inspector_of(forgetful, "shakespeare")
    before = inspector._cache.size
    monkeypatch.setattr(inspector, "_cache", LRUCache())
    monkeypatch.setattr(attention_view, "MAX_CACHED_INPUTS", 0)
    for layer, weights in enumerate(whole):
        assert asked(forgetful, "attention", **text, layer=layer)["weights"] == weights
    assert asked(forgetful, "attention/overview", **text)["thumbnails"] == small
    assert inspector._cache.size < before


def test_the_cache_is_bounded():
    cache = LRUCache(10_000)
    for i in range(10):
        cache.put(i, torch.zeros(1000))
    assert cache.size <= 10_000 and cache.get(9) is not None and cache.get(0) is None
    cache.get(8)
    cache.put("new", torch.zeros(1000))
    assert cache.get(8) is not None and cache.get(9) is None
    cache.put("huge", torch.zeros(10_000))
    assert cache.get("huge") is None and cache.get("new") is not None


def test_all_memory_is_counted_once():
    x = torch.zeros(1000, 1000)
    assert 4_000_000 <= memory_size(x) == memory_size(x[0]) < 4_001_000  # a view keeps all of it
    assert memory_size([x, x[0], {"a": (x,)}]) < 4_002_000
    assert memory_size([x, x.clone()]) > 8_000_000


def test_many_requests_do_not_grow_the_cache(forgetful, monkeypatch):
    inspector = inspector_of(forgetful, "shakespeare")
    capacity = 2**20
    monkeypatch.setattr(inspector, "_cache", LRUCache(capacity))
    for i in range(4):
        for layer in range(6):
            body = {"model": "shakespeare", "text": f"{i} " + "word " * 10, "layer": layer}
            asked(forgetful, "attention", **body)
            assert inspector._cache.size <= capacity
    held = [value for value, _ in inspector._cache._entries.values()]
    assert memory_size(held) <= capacity and len(held) > 2
    assert attention_view.MAX_CACHED_INPUTS < CACHE_BYTES


def test_more_than_is_sent_at_once_is_refused(forgetful, monkeypatch):
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 1000)
    for path, body in (
        ("alignment", {"model": "translator", "source": TEXTS["translator"]}),
        ("rollout", {"model": "shakespeare", "text": TEXTS["shakespeare"]}),
        ("image/classify", {"model": "digits-vit", "image": [[0.1] * 8] * 8}),
        ("rollout", {"model": "digits-vit", "image": IMAGE}),
    ):
        assert "give less" in assert_error(forgetful.post(f"/api/{path}", body), 400)
    same(asked(forgetful, "attention", model="shakespeare", text="a")["weights"], torch.ones(6, 1, 1))
