"""The served models: names, loading on demand, and a budget of memory."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

import heedful
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import n_bytes, packed_precision
from heedful.serve import model_manager
from heedful.serve.errors import ApiError, Overloaded, ShuttingDown
from heedful.serve.memory import MemoryEstimate, estimate_memory, kv_cache_tokens, memory_budget
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options
from heedful.train.cost import free_memory
from heedful.weights.resolve import shipped_models
from support.folders import saved, tiny_gpt

REQUEST = Request((1, 2), max_tokens=3, sampling=Sampling(temperature=0))


def make_manager(*names, **options) -> ModelManager:
    return ModelManager(names, Options(**options), Metrics())


@asynccontextmanager
async def running_manager(*names, **options):
    found = make_manager(*names, **options)
    try:
        yield found
    finally:
        await found.stop()


@pytest.fixture
def three(tmp_path):
    """Three models of one size, and the GB that one needs."""
    folders = [str(saved(tmp_path / name, tiny_gpt())) for name in ("one", "two", "three")]
    return folders, estimate_memory(tmp_path / "one").minimum / 1e9


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, in order; a gate that a test may close."""
    real, done, gate = model_manager.load, [], threading.Event()
    gate.set()

    def load(source, **options):
        done.append(str(source))
        assert gate.wait(30)
        return real(source, **options)

    monkeypatch.setattr(model_manager, "load", load)
    return done, gate


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_loaded_models_or_given(tmp_path):
    folder = saved(tmp_path / "mine", tiny_gpt())
    found = make_manager("tiny", str(folder), f"other={folder}", "poet=shakespeare")
    assert found.names == ("tiny", "mine", "other", "poet")
    assert [heedful.load(name).name for name in ("tiny", folder)] == ["tiny", "mine"]
    os.utime(folder / "model.safetensors", (10**9, 10**9))
    about = found.info("other")
    assert about.id == "other" and not about.loaded and {"generate", "embed"} <= set(about.abilities)
    newest = max(file.stat().st_mtime for file in folder.iterdir())
    assert about.created == int(newest)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path):
    assert make_manager(str(saved(tmp_path / "lr=0.1", tiny_gpt()))).names == ("lr=0.1",)


def test_without_names_all_that_ship_those_that_write_first():
    names = make_manager().names
    assert sorted(names) == sorted(shipped_models()) and names[:3] == ("books", "chat", "shakespeare")
    assert names.index("tiny") < names.index("bert-books") < names.index("digits-vit")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["no-such-model"], "no model, folder or file is called"),
        (["tiny", "tiny"], "two models are called 'tiny'"),
        (["a=tiny", "a=shakespeare"], "two models are called 'a'"),
        (["a=", "tiny"], "name of a model"),
    ],
)
def test_names_that_cannot_be_served_are_refused_at_the_start(names, problem):
    with pytest.raises(ValueError, match=problem):
        make_manager(*names)


def test_pickles_and_other_files_are_refused(tmp_path):
    for name in ("model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=r"pickled|single file"):
            make_manager(str(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["", "..", "../tiny", "/etc/passwd", "%2e%2e", "ti\0ny", "TINY", "tiny ", "x" * 100_000, "a=tiny"]
)
def test_only_served_names_are_found(name, loads):
    async def main():
        async with running_manager("tiny") as found:
            with pytest.raises(LookupError) as error:
                await found.worker(name)
            assert type(error.value) is LookupError and len(str(error.value)) < 400
            with pytest.raises(LookupError):
                found.info(name)

    asyncio.run(main())
    assert loads[0] == []


def test_no_name_means_the_only_model():
    async def main():
        async with running_manager("tiny") as one, running_manager("tiny", "shakespeare") as two:
            assert (await one.worker(None)).loaded.name == "tiny"
            with pytest.raises(LookupError, match="names no model, and several are served: tiny, shakespeare"):
                await two.worker(None)

    asyncio.run(main())


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_once_however_many_ask(loads):
    done, gate = loads

    async def main():
        async with running_manager("poet=shakespeare", "tiny") as found:
            assert not found.info("poet").loaded
            gate.clear()
            waiting = [asyncio.ensure_future(found.worker("poet")) for _ in range(5)]
            await asyncio.sleep(0)
            waiting.pop().cancel()  # who leaves does not stop it for the others
            gate.set()
            workers = await asyncio.gather(*waiting)
            assert len({id(worker) for worker in workers}) == 1 and found.info("poet").loaded
            assert workers[0].loaded.name == "poet" and packed_precision(workers[0].loaded.model)
            assert 'heedful_model_loaded{model="poet"} 1.0' in found.metrics.render().decode()
            result = await workers[0].submit(REQUEST, stream=False).result()
            alone = heedful.load("shakespeare", dtype=torch.float32)
            ids = alone.model(torch.tensor([REQUEST.prompt])).logits[0, -1].argmax()
            assert result.choices[0].tokens[0] == ids

    asyncio.run(main())
    assert done == ["shakespeare"]


def test_weights_keep_the_precision_they_are_stored_in(tmp_path):
    half = saved(tmp_path / "half", tiny_gpt().bfloat16())

    async def main():
        async with running_manager(str(half)) as found, running_manager("tiny", quantize="int8") as small:
            assert packed_precision((await found.worker("half")).loaded.model) == "bfloat16"
            assert packed_precision((await small.worker("tiny")).loaded.model) == "int8"

    asyncio.run(main())


def test_a_load_that_fails_is_that_requests_error_and_the_next_one_tries_again(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", tiny_gpt())
    weights = (folder / "model.safetensors").read_bytes()

    async def main():
        async with running_manager(str(folder), "tiny") as found:
            (folder / "model.safetensors").write_bytes(weights[:50])
            for _ in range(2):
                with pytest.raises(ValueError, match=r"model could not be loaded: .*model.safetensors"):
                    await found.worker("model")
            await found.worker("tiny")

            def broken(source, **options):
                raise OSError("the disk said no")

            (folder / "model.safetensors").write_bytes(weights)
            with monkeypatch.context() as patch:
                patch.setattr(model_manager, "load", broken)
                with pytest.raises(ApiError, match="model could not be loaded: OSError: the disk said no") as error:
                    await found.worker("model")
                assert error.value.status == 500
            assert (await found.worker("model")).loaded.name == "model"

    asyncio.run(main())


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_makes_room(loads, three):
    done, _ = loads
    folders, size = three

    async def main():
        async with running_manager(*folders, memory=size * 2.5, max_rows=1) as found:
            for name in ("one", "two", "one", "three", "one", "two"):
                await found.worker(name)
                assert sum(model.memory for model in found._models.values()) <= found.budget
            assert [found.info(name).loaded for name in found.names] == [True, True, False]
            text = found.metrics.render().decode()
            assert 'loaded{model="three"} 0.0' in text and 'loaded{model="two"} 1.0' in text

    asyncio.run(main())
    assert [Path(path).name for path in done] == ["one", "two", "three", "two"]


def test_what_is_borrowed_or_busy_stays(three):
    folders, size = three

    async def main():
        async with running_manager(*folders, memory=size * 1.5) as found:
            async with found.acquire("one") as worker:
                with pytest.raises(Overloaded, match="no memory for two while one is in use"):
                    await found.worker("two")
                await worker.submit(REQUEST, stream=False).result()
            model = weakref.ref(worker.loaded.model)
            assert (await found.worker("two")).loaded.name == "two"
            with pytest.raises(ShuttingDown):
                worker.submit(REQUEST, stream=False)
            del worker
            assert model() is None  # its memory is free
            assert await (await found.worker("one")).submit(REQUEST, stream=False).result()

    asyncio.run(main())


def test_a_model_larger_than_the_budget_is_refused_at_the_start_with_the_numbers():
    with pytest.raises(ValueError, match=r"shakespeare needs [\d.]+ MB \(weights .* may take 1 MB.*--memory"):
        make_manager("shakespeare", memory=0.001)
    with pytest.raises(ValueError, match="1000000 tokens"):
        make_manager("tiny", memory=0.1, cache_tokens=1_000_000)


@pytest.mark.parametrize("name", ["tiny", "shakespeare", "bert-books", "reversal"])
@pytest.mark.parametrize("quantize", [None, "bfloat16", "int8"])
def test_what_a_model_takes_is_about_what_was_expected(name, quantize):
    async def main():
        async with running_manager(name, quantize=quantize) as found:
            worker = await found.worker(name)
            model = found._models[name]
            weights = n_bytes(worker.loaded.model)
            assert weights <= model.estimate.weights * 1.3 + 100_000 and model.estimate.weights <= weights * 2 + 100_000
            assert model.memory >= weights

    if name == "reversal" and quantize == "int8":
        pytest.skip("recurrent cells are not packed")
    asyncio.run(main())


def test_the_pool_is_as_large_as_the_rows_and_the_memory_allow():
    estimate = MemoryEstimate(("generate",), weights=100, per_token=10, context=50)
    assert kv_cache_tokens(estimate, max_rows=4, available=10_000) == 200
    assert kv_cache_tokens(estimate, max_rows=4, available=1000) == 100
    assert kv_cache_tokens(estimate, max_rows=4, available=1) == 50
    assert kv_cache_tokens(estimate, max_rows=4, available=float("inf")) == 200

    async def main():
        async with running_manager("shakespeare", max_rows=3) as found:
            worker = await found.worker("shakespeare")
            pool = worker._engine.runner.pool
            assert pool.n_blocks * pool.block_size == 3 * worker.loaded.model.context_length

    asyncio.run(main())


def test_no_packed_model_keeps_its_file_in_memory():
    async def main():
        async with running_manager("shakespeare") as found:
            model = (await found.worker("shakespeare")).loaded.model
            tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cpu]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            assert sum(storages.values()) <= 2 * sum(tensor.nbytes for tensor in tensors)
            assert found._models["shakespeare"].memory <= found.budget

    asyncio.run(main())


def test_caches_and_weights_together_stay_within_the_budget(three):
    folders, size = three

    async def main():
        async with running_manager(*folders, memory=size * 3.5) as found:
            for name in found.names:
                worker = await found.worker(name)
                pool = worker._engine.runner.pool
                estimate = found._models[name].estimate
                taken = n_bytes(worker.loaded.model) + pool.n_blocks * pool.block_size * estimate.per_token
                assert taken <= found._models[name].memory
            assert sum(model.memory for model in found._models.values()) <= found.budget

    asyncio.run(main())


def test_the_budget_is_most_of_what_there_is():
    free = free_memory("cpu")
    assert 0.5 * free < memory_budget(None, "cpu") < 0.95 * free
    assert memory_budget(1.5, "cpu") == 1_500_000_000


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_shelf_that_stops_lets_nobody_in(loads):
    done, gate = loads

    async def main():
        found = make_manager("tiny", "shakespeare")
        worker = await found.worker("tiny")
        gate.clear()
        loading = asyncio.ensure_future(found.worker("shakespeare"))
        while len(done) < 2:
            await asyncio.to_thread(lambda: None)
        stopping = asyncio.ensure_future(found.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping
        with pytest.raises(ShuttingDown):
            await loading
        with pytest.raises(ShuttingDown):
            await found.worker("tiny")
        with pytest.raises(ShuttingDown):
            worker.submit(REQUEST, stream=False)
        await found.stop()

    asyncio.run(main())


def test_an_adapter_can_what_its_own_head_can():
    if "sentiment" not in shipped_models():
        pytest.skip("no adapter ships here")
    assert estimate_memory(shipped_models()["sentiment"]).abilities == ("embed", "classify", "neighbours", "capture")
