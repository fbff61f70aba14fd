"""POST /v1/completions: the same texts and numbers as in process, in the shape that OpenAI's own types accept."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch
from openai.types import Completion

import heedful
from heedful.loaded import Loaded
from heedful.serve.options import Options
from heedful.text.tokenizer import Tokenizer
from support.folders import tiny_gpt
from support.in_process import Gate, InProcessServer, until
from support.serving import CHATML, words
from support.tiny import tiny

GREEDY = {"temperature": 0}
EOT = "<|endoftext|>"


def small(name: str = "small", **changes) -> Loaded:
    """A tiny GPT with random weights and a byte-level tokenizer of 345 tokens."""
    tokenizer = words()
    tokenizer.chat_template = CHATML
    return Loaded(tiny_gpt(vocab_size=len(tokenizer), max_len=128, **changes), tokenizer, name)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return small()


@pytest.fixture(scope="module")
def inside(loaded):
    with InProcessServer(loaded, max_rows=4, options=Options(max_tokens_per_request=2000)) as found:
        yield found


@pytest.fixture(scope="module")
def others():
    names = ("shakespeare", "bert-books")
    with InProcessServer(*(heedful.load(name) for name in names)) as found:
        yield found


def completion(answer) -> Completion:
    """The reply, as strict as OpenAI's types are."""
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    echoed = [s for c in body["choices"] if (s := c["logprobs"]) and None in s["token_logprobs"]]
    for scores in echoed:  # the first token of an echo has none, for which OpenAI's own types have no place
        assert scores["token_logprobs"].index(None) == scores["top_logprobs"].index(None) == 0
        scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}
    reply = Completion.model_validate_json(json.dumps(body), strict=True)
    for scores in [c.logprobs for c in reply.choices if echoed and c.logprobs]:
        scores.token_logprobs[0] = scores.top_logprobs[0] = None
    return reply


# --- texts ----------------------------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_complete(inside, loaded):
    reply = completion(inside.complete("the small cat", max_tokens=20, **GREEDY))
    (expected,) = loaded.complete("the small cat", max_tokens=20, **GREEDY)
    assert reply.choices[0].text == expected.choices[0].text
    assert reply.choices[0].finish_reason == expected.choices[0].finish_reason
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", "small", "cmpl-")
    n = len(loaded.tokenizer.encode("the small cat"))
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": n,
        "completion_tokens": len(expected.choices[0].tokens),
        "total_tokens": n + len(expected.choices[0].tokens),
    }


def test_sixteen_tokens_unless_said_otherwise(inside):
    reply = completion(inside.complete("the", logit_bias={"342": -100}))
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (16, "length")


def test_prompts_come_in_four_shapes(inside, loaded):
    texts = ["the cat", "a dog"]
    ids = [loaded.tokenizer.encode(text) for text in texts]
    both = [result.choices[0].text for result in loaded.complete(texts, max_tokens=5, **GREEDY)]
    for prompt, expected in (("the cat", both[:1]), (texts, both), (ids[0], both[:1]), (ids, both)):
        reply = completion(inside.complete(prompt, max_tokens=5, **GREEDY))
        assert [choice.text for choice in reply.choices] == expected
        assert [choice.index for choice in reply.choices] == list(range(len(expected)))


@pytest.mark.parametrize("prompt", [None, "", [""]])
def test_no_prompt_is_the_start_of_a_text(inside, loaded, prompt):
    reply = completion(inside.complete(prompt, max_tokens=5, **GREEDY))
    (expected,) = loaded.complete("", max_tokens=5, **GREEDY)
    assert reply.choices[0].text == expected.choices[0].text
    assert reply.usage.prompt_tokens == 1


def test_a_special_token_in_a_prompt_is_text(inside, loaded):
    reply = completion(inside.complete(EOT, max_tokens=1, echo=True, logprobs=0, **GREEDY))
    assert reply.choices[0].text.startswith(EOT)
    assert "".join(reply.choices[0].logprobs.tokens[:-1]) == EOT
    assert reply.usage.prompt_tokens == len(loaded.tokenizer.encode(EOT)) > 1


def test_special_tokens_in_a_prompt_can_be_allowed(inside):
    reply = completion(inside.complete(f"a{EOT}b", max_tokens=1, allow_special=True, **GREEDY))
    assert reply.usage.prompt_tokens == 3


def test_a_prompt_of_megabytes_is_refused_by_its_characters(inside, monkeypatch):
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_, **__: pytest.fail("it was tokenized"))
    reply = inside.complete("the cat " * 50_000, max_tokens=1)
    assert reply.status == 400 and "characters" in reply.error["message"]
    assert (reply.error["param"], reply.error["code"]) == ("prompt", "context_length_exceeded")


def test_a_seed_repeats_its_texts_which_differ(inside, loaded):
    ask = dict(prompt="the", n=6, max_tokens=8, seed=3)
    first, again = (completion(inside.complete(**ask)) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 6
    # four rows at once: in two parts, and still the answers of a single request
    (expected,) = loaded.complete("the", n=6, max_tokens=8, seed=3)
    assert texts == [choice.text for choice in expected.choices]


def test_without_a_seed_by_chance_whatever_torchs_seed_is(inside):
    found = set()
    for _ in range(2):
        torch.manual_seed(0)
        found.add(completion(inside.complete("the", max_tokens=12)).choices[0].text)
    assert len(found) == 2


def test_choices_are_numbered_prompt_by_prompt(inside, loaded):
    prompts = ["the cat", "a dog", "we"]
    reply = completion(inside.complete(prompts, n=5, max_tokens=4, seed=1))
    expected = [c.text for r in loaded.complete(prompts, n=5, max_tokens=4, seed=1) for c in r.choices]
    assert [choice.index for choice in reply.choices] == list(range(15))
    assert [choice.text for choice in reply.choices] == expected


@pytest.mark.parametrize(("n", "best_of"), [(1, 3), (2, 4), (3, 11)])
def test_the_best_are_chosen_by_their_mean_and_all_count(inside, loaded, n, best_of):
    settings = dict(n=n, best_of=best_of, max_tokens=6, seed=5)
    reply = completion(inside.complete("the", **settings))
    (expected,) = loaded.complete("the", **settings)
    (written,) = loaded.complete("the", n=best_of, max_tokens=6, seed=5)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in expected.choices]
    assert reply.usage.completion_tokens == sum(len(choice.tokens) for choice in written.choices)
    assert reply.choices[0].logprobs is None


def test_settings_of_sampling_reach_the_model(inside, loaded):
    settings = dict(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.5,
        presence_penalty=-0.5, logit_bias={5: 3.0}, seed=9, max_tokens=20,
    )  # fmt: skip
    (expected,) = loaded.complete("the", **settings)
    body = {**settings, "logit_bias": {"5": 3}}
    assert completion(inside.complete("the", **body)).choices[0].text == expected.choices[0].text


def test_stop_texts_are_not_part_of_the_answer(inside, loaded):
    (whole,) = loaded.complete("the", max_tokens=20, **GREEDY)
    text = whole.choices[0].text
    stop = text[5:8]
    reply = completion(inside.complete("the", max_tokens=20, stop=[stop, "never"], **GREEDY))
    assert reply.choices[0].text == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_the_lectures_call_with_its_old_names(others):
    body = dict(
        engine="shakespeare", prompt="1. ROMEO", temperature=0.7, max_tokens=50, top_p=1, frequency_penalty=0,
        presence_penalty=0, stop=["12."],
    )  # fmt: skip
    assert completion(others.complete(**body)).model == "shakespeare"
    path = others.post("/v1/engines/shakespeare/completions", prompt="ROMEO", max_tokens=3, model="bert-books")
    assert completion(path).model == "shakespeare"


def test_nulls_and_unknown_fields_are_accepted(inside):
    nulls = dict.fromkeys(("max_tokens", "n", "stop", "logprobs", "seed", "suffix", "user", "stream", "best_of"))
    assert completion(inside.complete("the", **nulls, **GREEDY, frobnicate={"a": 1})).choices[0].text


def test_an_encoder_decoder_answers_its_prompt():
    tokenizer = words()
    loaded = Loaded(tiny("t5", vocab_size=len(tokenizer)).eval(), tokenizer, "answers")
    (expected,) = loaded.complete("the cat", max_tokens=8, logprobs=1, **GREEDY)
    with InProcessServer(loaded) as server:
        reply = completion(server.complete("the cat", max_tokens=8, logprobs=1, **GREEDY))
        assert reply.choices[0].text == expected.choices[0].text
        assert reply.usage.prompt_tokens == len(loaded.encode_prompt("the cat")[1])
        scores = [score.logprob for score in expected.choices[0].scores]
        assert reply.choices[0].logprobs.token_logprobs == pytest.approx(scores, abs=1e-5)
        refused(server.complete("the cat", echo=True), "echo", "answers its prompt")
        assert completion(server.complete("the cat", max_tokens=8)).choices[0].text == expected.choices[0].text


def test_the_models_own_sampling_is_the_default():
    tokenizer = words()
    loaded = Loaded(tiny("gpt", vocab_size=len(tokenizer)).eval(), tokenizer, "own")
    loaded.model.generation = {"do_sample": True, "temperature": 0.5, "top_k": 3}
    ask = {"max_tokens": 12, "seed": 1}
    with InProcessServer(loaded) as server:
        given = {"own": {}, "same": {"temperature": 0.5, "top_k": 3}, "other": {"temperature": 2.0, "top_k": 0}}
        texts = {
            name: completion(server.complete("the cat", **ask, **how)).choices[0].text for name, how in given.items()
        }
        assert texts["own"] == texts["same"] == loaded.generate("the cat", **ask) != texts["other"]
        loaded.model.generation = {"top_p": "x"}
        refused(server.complete("the cat", **ask), "model", "generation_config.json")


# --- log-probabilities ----------------------------------------------------------------------------------------------


def shown(id: int, tokenizer: Tokenizer) -> str:
    if id in tokenizer.special_tokens.values():
        return tokenizer.token(id)
    text = tokenizer.decode([id])
    return text if "\ufffd" not in text else "bytes:" + repr(tokenizer.decode_bytes([id]))[2:-1]


def test_echo_scores_the_prompt_and_the_answer(inside, loaded):
    prompt, whole = "the small cat sat", loaded.tokenizer
    banned = {id: -100.0 for id in range(len(whole)) if not whole.decode([id]).isascii()}
    settings = dict(max_tokens=6, logprobs=3, echo=True, logit_bias=banned, **GREEDY)
    (expected,) = loaded.complete(prompt, **settings)
    reply = completion(inside.complete(prompt, **settings))
    choice, scores = reply.choices[0], reply.choices[0].logprobs
    known = [*expected.prompt_scores, *expected.choices[0].scores]
    tokenizer, ids = loaded.tokenizer, [*loaded.tokenizer.encode(prompt), *expected.choices[0].tokens]
    assert choice.text == expected.choices[0].text and choice.text.startswith(prompt)
    assert scores.tokens == [shown(id, tokenizer) for id in ids]
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx([score.logprob for score in known[1:]], abs=1e-5)
    for i, score in enumerate(known[1:], start=1):
        top = scores.top_logprobs[i]
        assert len(top) in (3, 4) and top[scores.tokens[i]] == scores.token_logprobs[i]
        likely = {shown(id, tokenizer): p for id, p in (*score.top, (score.token, score.logprob))}
        assert top == pytest.approx(likely, abs=1e-5)
    assert [choice.text[at:][: len(t)] for at, t in zip(scores.text_offset, scores.tokens, strict=True)] == (
        scores.tokens
    )


def test_logprobs_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    reference, loaded = transformers.GPT2LMHeadModel.from_pretrained(folder).eval(), heedful.load(folder)
    ids = loaded.tokenizer.encode("the small cat sat on the mat")
    with InProcessServer(loaded) as server:
        reply = completion(server.complete([ids], max_tokens=0, logprobs=2, echo=True))
    with torch.no_grad():
        logs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    scores = reply.choices[0].logprobs
    expected = [float(logs[i, id]) for i, id in enumerate(ids[1:])]
    assert scores.token_logprobs[1:] == pytest.approx(expected, abs=2e-5)
    for top, row in zip(scores.top_logprobs[1:], logs[:-1], strict=True):
        assert sorted(top.values())[-2:] == pytest.approx(sorted(row.tolist())[-2:], abs=2e-5)


def test_greedy_tokens_have_the_very_float_of_the_likeliest(inside):
    """lm-evaluation-harness compares them with ==."""
    ask = dict(max_tokens=1, logprobs=1, echo=True, seed=1, **GREEDY)
    for choice in completion(inside.complete([[1, 2, 3], [4, 5, 6, 7]], **ask)).choices:
        scores = choice.logprobs
        assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values())
        assert len(scores.tokens) in (4, 5)


def test_the_end_of_a_text_has_an_entry_too(inside, loaded):
    """prompt + 1 entries, even if the model has nothing to say."""
    end = loaded.tokenizer.eos_id
    reply = completion(
        inside.complete([[1, 2, 3]], max_tokens=1, logprobs=1, echo=True, logit_bias={str(end): 100}, **GREEDY)
    )
    scores = reply.choices[0].logprobs
    assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens == 0
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 4
    assert scores.tokens[-1] == EOT and scores.text_offset[-1] == len(reply.choices[0].text)
    assert scores.top_logprobs[-1][EOT] == scores.token_logprobs[-1]


def test_zero_logprobs_show_the_chosen_token_alone(inside):
    scores = completion(inside.complete("the", max_tokens=3, logprobs=0)).choices[0].logprobs
    pairs = zip(scores.tokens, scores.token_logprobs, strict=True)
    assert scores.top_logprobs == [{token: logprob} for token, logprob in pairs]


def test_a_prompt_can_be_scored_alone(inside, loaded):
    reply = completion(inside.complete("the cat", max_tokens=0, echo=True, logprobs=1))
    assert reply.choices[0].text == "the cat" and reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.prompt_tokens
    assert reply.usage.completion_tokens == 0


@pytest.mark.parametrize(("echo", "text"), [(False, ""), (True, "the cat")])
def test_no_tokens_are_no_text(inside, echo, text):
    reply = completion(inside.complete("the cat", max_tokens=0, echo=echo, n=2))
    assert [(c.text, c.finish_reason, c.logprobs) for c in reply.choices] == [(text, "length", None)] * 2


def test_an_echo_without_scores_is_the_same_text(inside, loaded):
    reply = completion(inside.complete("the cat", max_tokens=5, echo=True, **GREEDY))
    (expected,) = loaded.complete("the cat", max_tokens=5, echo=True, **GREEDY)
    assert reply.choices[0].text == expected.choices[0].text


def test_tokens_end_where_a_stop_text_cuts(inside, loaded):
    (whole,) = loaded.complete("the", max_tokens=20, **GREEDY)
    text, starts = whole.choices[0].text, [0]
    for id in whole.choices[0].tokens:
        starts.append(starts[-1] + len(loaded.tokenizer.decode([id])))
    stop = text[starts[3] : starts[5]]
    reply = completion(inside.complete("the", max_tokens=20, stop=stop, logprobs=0, **GREEDY))
    cut = text.index(stop)
    assert reply.choices[0].text == text[:cut]
    assert reply.choices[0].logprobs.text_offset == [start for start in starts if start < cut]


def test_impossible_and_half_characters_are_still_json(inside, loaded):
    """A ban gives no infinity, and parts of a character are shown as bytes."""
    tokenizer = loaded.tokenizer
    parts = tokenizer.encode_bytes("👍".encode()[:2])
    reply = completion(inside.complete([parts], max_tokens=1, echo=True, logprobs=5))
    scores = reply.choices[0].logprobs
    assert scores.tokens[:2] == ["bytes:\\xf0", "bytes:\\x9f"] and scores.text_offset[:2] == [0, 0]
    assert all(math.isfinite(p) for p in scores.token_logprobs[1:])


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(answer, param: str | None, *words: str, status: int = 400, code: str | None = None) -> None:
    assert answer.status == status and answer.error["param"] == param, answer.text
    assert code is None or answer.error["code"] == code
    for word in words:
        assert word in answer.error["message"], answer.text


def test_the_first_bad_token_is_named(inside):
    refused(inside.complete([1, 999, 345, 2]), "prompt", "999", "0 to 344")
    refused(inside.complete([[1, 2], [3, 400]]), "prompt", "400", "prompt 1")


def test_nothing_past_the_context(inside, loaded):
    n = len(loaded.tokenizer.encode("the cat"))
    answer = inside.complete("the cat", max_tokens=128)
    refused(answer, "max_tokens", "128", str(n), str(n + 128), code="context_length_exceeded")
    assert completion(inside.complete("the cat", max_tokens=128 - n, **GREEDY))
    refused(inside.complete([1] * 200, max_tokens=0), "prompt", code="context_length_exceeded")


def test_a_budget_for_one_request(inside):
    refused(inside.complete(["a"] * 11, n=10, max_tokens=20), "max_tokens", "2200", "2000")
    refused(inside.complete("a", best_of=20, max_tokens=101), "max_tokens", "2020")


def test_biases_on_tokens_there_are(inside):
    refused(inside.complete("a", logit_bias={"344": 1, "345": 1, "9999": 1}), "logit_bias", "345", "9999")


def test_unknown_models_and_those_that_cannot(others):
    refused(others.complete("a", model="../etc"), "model", status=404, code="model_not_found")
    refused(others.complete("a", model="bert-books"), "model", "cannot generate", "embed")


def test_a_full_line_is_busy_and_leaves_nothing_behind(loaded, monkeypatch):
    gate = Gate(monkeypatch, "decode")
    with InProcessServer(loaded, queue=2, max_rows=1) as server:
        worker = server.manager.workers["small"]

        async def crowd():
            leave = asyncio.Event()
            body = dict(prompt=["the"] * 9, max_tokens=100, logit_bias={"342": -100})  # all let in, or none
            first = asyncio.create_task(server.exchange("/v1/completions", body, leave=leave))
            await until(lambda: gate.n_asked)
            assert worker.n_waiting == 8  # they count as one
            second = asyncio.create_task(server.exchange("/v1/completions", dict(prompt="the"), leave=leave))
            await until(lambda: worker.n_waiting == 9)
            busy = await server.exchange("/v1/completions", dict(prompt="the"))
            leave.set()
            await asyncio.gather(first, second)
            gate.let(1)
            await until(lambda: not worker.busy)
            return busy

        answer = server.runner.run(crowd())
        refused(answer, None, status=429, code="rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) > 0 and server.manager.n_users == 0
