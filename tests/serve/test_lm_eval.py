"""EleutherAI's lm-evaluation-harness: the same scores in process, over HTTP, and from its own model."""

from __future__ import annotations

import gzip
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import heedful
from support.serving import Client, exported, serving, shared_data
from support.trainings import story

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'heedful[harness]'")

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from heedful.evaluate import perplexity
from heedful.evaluate.harness import HarnessModel, local_task
from heedful.evaluate.tasks import create_task

N = 100
TEXTS = [text.strip() for text in story(40, seed=5).split("\n\f\n")]


def over_http(server: Client, model: str, tokenizer: str | None = None, **settings: Any):
    """lm_eval's own client of servers like ours; without a tokenizer it asks the server for one."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    own = {} if tokenizer is None else {"tokenizer_backend": "huggingface"}
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=model,
        tokenizer=tokenizer,
        max_retries=1,
        **own,
        **settings,
    )


def pairs(*args: tuple) -> list[Instance]:
    kinds = {1: "loglikelihood_rolling", 2: "loglikelihood"}
    return [Instance(kinds[len(a)], {}, a, i) for i, a in enumerate(args)]


def generations(*args: tuple[str, dict[str, Any]]) -> list[Instance]:
    return [Instance("generate_until", {}, a, i) for i, a in enumerate(args)]


def scores(model: Any, task: Any) -> dict[str, Any]:
    """What lm_eval reports, and every item's own numbers."""
    name = task.config.task
    found = evaluate(lm=model, task_dict={name: task}, limit=N, bootstrap_iters=0, log_samples=True)
    return {"results": found["results"][name], "items": [s["filtered_resps"] for s in found["samples"][name]]}


def cloze() -> Any:
    """A task in the manner of LAMBADA, of words that the small model knows."""
    import datasets

    rows = datasets.Dataset.from_list([{"text": text.rstrip(".")} for text in TEXTS])
    return ConfigurableTask(
        config={
            "task": "cloze",
            "custom_dataset": lambda **_: {"test": rows},
            "output_type": "loglikelihood",
            "test_split": "test",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        }
    )


# --- in process -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture(scope="module")
def ours(export) -> HarnessModel:
    return HarnessModel(heedful.load(export))


@pytest.fixture(scope="module")
def theirs(export):
    """lm_eval's own model on transformers; it sees one token more than we do, see heedful.evaluate.harness."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(export), device="cpu", dtype="float32", batch_size=4, max_length=1023)


def test_scores_are_those_of_the_reference(ours, theirs):
    asked = pairs(
        *((text[:30], text[30:]) for text in TEXTS),
        ("", TEXTS[0]),  # begins with the end of the text before
        ("the cat ", "sees"),  # the space belongs to what follows
        ("\n".join(TEXTS * 3), " and then the dog runs"),  # longer than the model
    )
    mine, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True)
    for (score, greedy), (other, other_greedy) in zip(mine, expected, strict=True):
        assert score == pytest.approx(other, rel=1e-5, abs=1e-4) and greedy == other_greedy


def test_padded_batches_give_the_same_scores(ours, monkeypatch):
    """What a GPU does instead of a pass for each request."""
    asked = pairs(*((text[: 5 + 3 * i], text[5 + 3 * i :]) for i, text in enumerate(TEXTS[:8])), ("", TEXTS[0]))
    expected = ours.loglikelihood(asked)
    monkeypatch.setattr(perplexity, "MAX_BATCH", 60)  # several batches
    monkeypatch.setattr(ours, "_echoed", partial(perplexity.score_continuations, ours.model))
    found = ours.loglikelihood(asked)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-5)


def test_greedy_continuations_are_found_to_be_greedy():
    speaker, context = HarnessModel(heedful.load("shakespeare")), "ROMEO:\nWhat"
    (said,) = speaker.generate_until(generations((context, {"max_gen_toks": 9, "until": []})))
    right, wrong = speaker.loglikelihood(pairs((context, said), (context, " zebras q")))
    assert right[1] and not wrong[1] and right[0] > wrong[0]


def test_rolling_scores_are_those_of_the_reference(ours, theirs):
    texts = [TEXTS[0], "\n".join(TEXTS * 3)]  # one window, and several
    asked = pairs(*((text,) for text in texts))
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(expected, rel=1e-5)


def test_texts_are_those_of_the_reference(ours, theirs):
    settings = {"until": ["\n", " cat"], "max_gen_toks": 24, "do_sample": False}
    asked = generations(*((text[:40], settings) for text in TEXTS[:8]))
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


ROWS = {
    "lambada_openai": [{"text": text.rstrip(".")} for text in TEXTS[:5]],
    "winogrande": [
        {
            "context_options": [f"the dog sees the cat and the {who}" for who in ("dog", "cat")],
            "continuation": said,
            "gold": i,
        }
        for i, said in enumerate(("runs to the house.", "sleeps in the garden."))
    ],
    "hellaswag": [
        {"ctx_a": "the cat runs.", "ctx_b": "it", "activity_label": "Play", "endings": TEXTS[i : i + 4], "label": i}
        for i in range(3)
    ],
    "piqa": [{"query": "Question: how to run?\n", "choices": TEXTS[i : i + 2], "gold": i % 2} for i in range(4)],
    "arc_easy": [
        {
            "question": "who runs?",
            "choices": {"text": ["the dog", "a house"], "label": ["A", "B"]},
            "answerKey": key,
        }
        for key in "AB"
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_tasks_are_evaluated_as_by_lm_eval_itself(export, theirs, tmp_path, name):
    """Item by item, by its own evaluator with its own model on transformers; interrupted or not."""
    with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    loaded = heedful.load(export)
    found = loaded.evaluate(name, tmp_path, limit=1, out=tmp_path, batch_size=1)
    found = loaded.evaluate(name, tmp_path, out=tmp_path)
    task = local_task(name, tmp_path)
    expected = evaluate(lm=theirs, task_dict={name: task}, bootstrap_iters=0, log_samples=True)
    samples = expected["samples"][name]
    assert found.n == len(ROWS[name]) == len(samples)
    for record, sample in zip(found.records, samples, strict=True):
        said = [score for score, _ in record["prediction"]]
        assert said == pytest.approx([float(r[0]) for r in sample["filtered_resps"]], rel=1e-4, abs=1e-3)
        assert record["metrics"] == pytest.approx({k: sample[k] for k in record["metrics"]}, rel=1e-4, abs=1e-3)
    for score in found.scores:
        value = expected["results"][name][f"{score.metric},none"]
        assert score.value == pytest.approx(100 * value if score.unit else value, rel=1e-3)


def test_what_lm_eval_does_not_have_is_told(export, tmp_path):
    loaded = heedful.load(export)
    with pytest.raises(ValueError, match=r"has no file piqa\*"):
        loaded.evaluate("piqa", tmp_path)
    with pytest.raises(ValueError, match="as lm_eval defines it"):
        loaded.evaluate("piqa", tmp_path, shots=3)
    with pytest.raises(ValueError, match="for models that continue a text"):
        heedful.load("bert-books").evaluate("piqa", tmp_path)


def test_without_the_hub_it_says_what_to_give(export, monkeypatch):
    class Registry:
        all_subtasks = ("hellaswag",)

        def load(self, names: list[str]) -> None:
            raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr("heedful.evaluate.harness.TaskManager", Registry)
    with pytest.raises(ValueError, match="cannot be reached: give a file or a folder with its rows"):
        heedful.load(export).evaluate("hellaswag")


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "heedful.evaluate.harness", None)
    with pytest.raises(ValueError, match=r"pip install 'heedful\[harness\]'"):
        create_task("lambada_openai")
    with pytest.raises(ValueError, match="did you mean lambada_openai"):
        create_task("lambada_openia")


def test_settings_that_mean_nothing_to_us_are_refused(ours):
    with pytest.raises(ValueError, match="num_beams: unknown"):
        ours.generate_until(generations(("the", {"until": [], "num_beams": 4})))
    with pytest.raises(ValueError, match="continues a text"):
        HarnessModel(heedful.load("bert-books"))


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def same(folder) -> HarnessModel:
    """What the server does: the weights packed in their own type, which shows in the last digits."""
    return HarnessModel(heedful.load(folder, quantize="float32"))


def task_called(name: str) -> Any:
    return cloze() if name == "cloze" else local_task(name, shared_data("lm-benchmarks"))


@pytest.mark.parametrize("name", ["cloze", "lambada_openai", "piqa"])
def test_scores_over_http_are_those_in_process(server, folder, same, name):
    """To the last digit, in every item."""
    task = task_called(name)
    http = over_http(server, "small", str(folder), max_length=1024, batch_size=8)
    assert scores(http, task) == scores(same, task)


def test_many_at_once_over_http(server, folder, same):
    http = over_http(server, "small", str(folder), max_length=1024, num_concurrent=8)
    assert scores(http, cloze()) == scores(same, cloze())


def test_without_a_tokenizer_it_asks_the_server(folder, same):
    with serving(folder) as alone:  # /tokenize does not say which model: it has to be the only one
        http = over_http(alone, "small", max_length=1024)
        assert http.tokenizer_backend == "remote"
        mine = same
        assert http.eot_token_id == mine.eot_token_id and http.prefix_token_id == mine.prefix_token_id
        assert http.tok_encode(TEXTS[0]) == mine.tok_encode(TEXTS[0])
        assert http.decode_batch([mine.tok_encode(TEXTS[0])]) == [TEXTS[0]]
        asked = pairs(("", TEXTS[0]), (TEXTS[1], " dog"))
        assert http.loglikelihood(asked, disable_tqdm=True) == mine.loglikelihood(asked)


def test_rolling_scores_and_texts_over_http(server, folder):
    http = over_http(server, "small", str(folder), max_length=1024, max_gen_toks=8)
    # A server keeps a position for a new token.
    mine = HarnessModel(heedful.load(folder, quantize="float32"), max_length=1023)
    asked = pairs(*((text,) for text in TEXTS[:3]))
    assert http.loglikelihood_rolling(asked, disable_tqdm=True) == mine.loglikelihood_rolling(asked)
    settings = {"until": [" cat"], "max_gen_toks": 24, "do_sample": False}
    asked = generations(*((text[:40], dict(settings)) for text in TEXTS[:4]))
    assert http.generate_until(asked) == mine.generate_until(asked)


def test_the_end_of_a_text_counts_as_a_token(server, folder):
    """Even where the model chooses to end the text, a prompt has all its entries and one more."""
    loaded = heedful.load(folder)
    end = min(loaded.eos_ids)
    ids = loaded.tokenizer.encode(TEXTS[0])
    body = {"model": "small", "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    found = server.complete(**body, echo=True, logit_bias={str(end): 100})["choices"][0]["logprobs"]
    lengths = {len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(ids) + 1}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for own, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert own in top.values() and own <= max(top.values())
