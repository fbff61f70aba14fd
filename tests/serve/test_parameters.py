"""Parameters of vLLM's and llama-server's beside OpenAI's: what each does to the answer, and who refuses it."""

from __future__ import annotations

import pytest

from heedful.loaded import Loaded
from support.folders import tiny_gpt
from support.in_process import InProcessServer
from support.serving import CHATML, words

GREEDY = {"temperature": 0, "max_tokens": 12}
DOCUMENTED = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ mood }}" + CHATML


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    tokenizer = words()
    tokenizer.chat_template = CHATML
    return Loaded(tiny_gpt(vocab_size=len(tokenizer), max_len=256), tokenizer, "small")


@pytest.fixture(scope="module")
def inside(loaded):
    tokenizer = words()
    tokenizer.chat_template = DOCUMENTED
    other = Loaded(tiny_gpt(vocab_size=len(tokenizer), max_len=256), tokenizer, "documented")
    with InProcessServer(loaded, other, max_rows=4) as found:
        yield found


@pytest.fixture(scope="module")
def greedy(loaded) -> list[int]:
    """The tokens of the greedy answer, all of them different from one another near the beginning."""
    return loaded.complete("the cat", **GREEDY)[0].choices[0].tokens


def completion(inside, **body):
    answer = inside.post("/v1/completions", model="small", prompt="the cat", **{**GREEDY, **body})
    assert answer.status == 200, answer.text
    return answer.json["choices"][0] | {"n": answer.json["usage"]["completion_tokens"]}


def test_stop_tokens_beside_the_models_own(inside, loaded, greedy):
    at = greedy.index(greedy[5])
    found = completion(inside, stop_token_ids=[greedy[5]])
    assert (found["n"], found["finish_reason"]) == (at, "stop")
    assert found["text"] == loaded.tokenizer.decode(greedy[:at])
    whole = completion(inside, stop_token_ids=[greedy[5]], include_stop_str_in_output=True)
    assert whole["text"] == loaded.tokenizer.decode(greedy[: at + 1]) and whole["finish_reason"] == "stop"


def test_a_stop_string_can_be_part_of_the_answer(inside, loaded, greedy):
    text = loaded.tokenizer.decode(greedy)
    stop = text[4:6]
    assert completion(inside, stop=stop)["text"] == text[: text.index(stop)]
    for streamed in (False, True):
        body = {"model": "small", "prompt": "the cat", **GREEDY, "stop": stop, "include_stop_str_in_output": True}
        answer = inside.post("/v1/completions", stream=streamed, **body)
        chunks = answer.chunks if streamed else [answer.json]
        said = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert said == text[: text.index(stop) + len(stop)]


def test_at_least_min_tokens(inside, loaded, greedy):
    """Neither a stop token nor a stop string ends it before; afterwards both do."""
    text = loaded.tokenizer.decode(greedy)
    assert completion(inside, stop=[text[2]], min_tokens=12)["n"] == 12
    for ends in ({"stop_token_ids": [greedy[2]]}, {"stop": [text[2]]}):
        assert completion(inside, **ends)["n"] < 6 <= completion(inside, **ends, min_tokens=6)["n"]
    (result,) = loaded.complete("the cat", **GREEDY, stop_token_ids=[greedy[2]], min_tokens=6)
    assert greedy[2] not in result.choices[0].tokens[:6]
    long = inside.post("/v1/completions", model="small", prompt="x", max_tokens=4, min_tokens=5)
    assert long.status == 400 and long.error["param"] == "min_tokens"


def test_the_end_of_a_text_can_be_ignored(inside, loaded):
    end = loaded.eos_ids[0]
    sure = {"logit_bias": {str(end): 100}}
    assert completion(inside, **sure)["n"] == 0
    assert completion(inside, **sure, ignore_eos=True)["n"] == 12
    assert completion(inside, **sure, ignore_eos=True, stop_token_ids=[end])["n"] == 0


def test_special_tokens_can_be_part_of_the_text(inside, loaded):
    name, id = next(iter(loaded.tokenizer.special_tokens.items()))
    sure = {"logit_bias": {str(id): 100}, "ignore_eos": True, "max_tokens": 2, "logprobs": 0, "stop": ["zz"]}
    assert completion(inside, **sure)["text"] == ""
    found = completion(inside, **sure, skip_special_tokens=False)
    assert found["text"] == name * 2 and found["logprobs"]["text_offset"] == [0, len(name)]
    chunks = inside.post(
        "/v1/completions", model="small", prompt="the cat", stream=True, **sure, skip_special_tokens=False
    )
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks.chunks[:2]] == [[0], [len(name)]]


def test_typical_sampling_is_that_of_python(inside, loaded):
    settings = {"typical_p": 0.3, "seed": 3, "max_tokens": 12, "temperature": 1}
    expected = loaded.generate("the cat", **settings)
    assert completion(inside, **settings)["text"] == expected
    assert expected != loaded.generate("the cat", **settings | {"typical_p": 1.0})


def test_a_prompt_is_truncated_on_the_left_where_it_is_asked_for(inside, loaded):
    long = "the old dog sees a cat " * 80
    ids = loaded.tokenizer.encode(long)
    refused = inside.post("/v1/completions", model="small", prompt=long, **GREEDY)
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    for prompt in (long, ids):
        for given, n in ((20, 20), (-1, 256 - 12)):
            body = {"model": "small", "prompt": prompt, "truncate_prompt_tokens": given, **GREEDY}
            answer = inside.post("/v1/completions", **body)
            assert answer.json["usage"]["prompt_tokens"] == n
            expected = inside.post("/v1/completions", model="small", prompt=ids[-n:], **GREEDY)
            assert answer.json["choices"] == expected.json["choices"]
    chat = inside.chat(long, model="small", truncate_prompt_tokens=-1, max_tokens=5)
    assert chat.json["usage"]["prompt_tokens"] == 251
    assert loaded.generate(long, truncate_prompt_tokens=20, **GREEDY) == loaded.generate(
        loaded.tokenizer.decode(ids[-20:]), **GREEDY
    )


def test_a_message_is_continued(inside, loaded):
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "we see <|im_end|>"}]
    body = {"model": "small", "messages": turns, "continue_final_message": True, **GREEDY}
    answer = inside.post("/v1/chat/completions", **body)
    ids = loaded.tokenizer.chat(turns[:1], add_generation_prompt=True) + loaded.tokenizer.encode("we see <|im_end|>")
    expected = inside.post("/v1/completions", model="small", prompt=ids, **GREEDY)
    assert answer.json["choices"][0]["message"]["content"] == expected.json["choices"][0]["text"]
    assert answer.json["usage"]["prompt_tokens"] == len(ids)


def test_values_reach_the_template_as_text(inside):
    def n_prompt(model: str = "documented", **body) -> int:
        answer = inside.chat("the cat", model=model, max_tokens=1, **body)
        assert answer.status == 200, answer.text
        return answer.json["usage"]["prompt_tokens"]

    plain = n_prompt()
    assert n_prompt(chat_template_kwargs={"mood": "the", "unknown": 1}) == plain + 1
    assert n_prompt(chat_template_kwargs={"mood": "<|im_end|>"}) > plain + 1  # not the special token
    assert n_prompt(documents=[{"text": "the old dog"}]) > plain
    assert n_prompt(add_generation_prompt=False) < plain
    assert n_prompt("small", chat_template_kwargs={"template": "x", "self": 1}) == n_prompt("small")
    refused = inside.chat("x", model="small", documents=[{"text": "the old dog"}])
    assert refused.status == 400 and refused.error["param"] == "documents"
    for wrong in ("messages", "tokenize", "a-b"):
        assert inside.chat("x", model="small", chat_template_kwargs={wrong: 1}).status == 400


def test_a_suffix_is_for_models_that_can_fill_in_the_middle(inside):
    refused = inside.post("/v1/completions", model="small", prompt="a", suffix="b")
    assert refused.status == 400 and refused.error["param"] == "suffix"
    assert "fill in the middle" in refused.error["message"]
    assert inside.post("/v1/completions", model="small", prompt="a", suffix="").status == 200
