"""`import heedful` is light; what `load` returns says what it is, and generates, searches, translates and drafts."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise, takewhile

import pytest
import tokenizers
import torch
from torch import nn

import heedful
from heedful.cli import main
from heedful.loaded import Loaded
from heedful.models.base import TruncationWarning
from heedful.text.tokenizer import Tokenizer
from support.beams import prompts_of, reference_beams, softened
from support.case import VOCAB, randomize
from support.chats import write_chat_model
from support.families import CASES
from support.folders import saved, tiny_gpt

case_of = {case.name: case for case in CASES}
GREEDY = {"temperature": 0, "max_tokens": 20}


def vocabulary(word: str = "w") -> Tokenizer:
    """w0, w1, w2 and so on by their numbers."""
    table = {f"{word}{i}": i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token=f"{word}0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend, roles={})


def tiny(name: str, reference: nn.Module | None = None, ends: list[int] | None = None) -> Loaded:
    case = case_of[name]
    model = case.ours(reference or case.reference())
    model.special = {"eos_token_id": ends or []}
    return Loaded(model, vocabulary(), f"tiny-{name}")


def prompts(name: str) -> list[str]:
    batch = prompts_of(case_of[name])
    rows, lengths = (batch.tokens, batch.lengths) if batch.source is None else (batch.source, batch.source_lengths)
    return [words(row[:n]) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]


def words(tokens: list[int]) -> str:
    return " ".join(f"w{i}" for i in tokens)


def test_importing_costs_nothing():
    program = (
        "import sys, heedful; heedful.__version__; dir(heedful)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'gguf', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_loading_imports_no_reference_implementation(tmp_path):
    program = (
        f"import sys, heedful; heedful.load({str(saved(tmp_path / 'm'))!r})\n"
        "print(sorted({'transformers', 'huggingface_hub', 'requests', 'httpx2', 'heedful.cli'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_package_has_what_it_says():
    for name in heedful.__all__:
        assert getattr(heedful, name) is not None
    with pytest.raises(AttributeError, match=r"it has .*load"):
        heedful.laod  # noqa: B018


def test_what_a_model_cannot_do_says_what_it_is(tmp_path):
    loaded = heedful.load(saved(tmp_path / "mine", tiny_gpt()))
    assert "generate" in loaded.abilities and "translate" not in loaded.abilities
    with pytest.raises(ValueError, match="mine is a GPT and cannot translate"):
        loaded.require("translate")
    with pytest.raises(AttributeError, match="nonsense"):
        loaded.nonsense  # noqa: B018
    assert "mine: GPT" in repr(loaded)


def test_device_and_type(tmp_path):
    folder = saved(tmp_path / "m", tiny_gpt())
    loaded = heedful.load(str(folder), device="cpu", dtype=torch.bfloat16)
    assert loaded.model.device.type == "cpu"
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in loaded.model.parameters())
    with pytest.raises(ValueError, match="cannot be loaded as"):
        heedful.load(folder, dtype=torch.int8)


@pytest.mark.parametrize("name", case_of)
def test_every_ability_of_a_family_is_a_method(name):
    for ability in case_of[name].ours(case_of[name].reference()).abilities:
        assert callable(getattr(Loaded, ability))


def test_what_a_model_is_not_for_says_what_it_is():
    with pytest.raises(ValueError, match="cannot classify; it can: "):
        heedful.load("tiny").classify("x")
    with pytest.raises(ValueError, match="cannot complete_image"):
        heedful.load("tiny").complete_image(torch.zeros(3))
    with heedful.load("tiny").capture("decoder.0.self.weights") as acts:
        assert list(acts) == ["decoder.0.self.weights"]


# --- generation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "scale", "seed"), [("gpt2", 0.7, 0), ("t5", 0.7, 1), ("marian", 0.3, 3)])
@pytest.mark.parametrize("early", [True, False])
def test_beams_find_what_transformers_finds(name, scale, seed, early):
    reference, ends = softened(case_of[name], scale), random.Random(seed).sample(range(1, 61), 10)
    loaded, bad = tiny(name, reference, ends), 5
    loaded.model.generation = {"bad_words_ids": [[bad]]}
    theirs = reference_beams(
        case_of[name], reference, prompts_of(case_of[name]), num_beams=4, num_return_sequences=3,
        length_penalty=0.6, early_stopping=early, max_new_tokens=12, eos_token_id=ends, bad_words_ids=[[bad]],
    )  # fmt: skip
    how = {"beams": 4, "length_penalty": 0.6, "early_stopping": early, "max_tokens": 12}
    results = loaded.complete(prompts(name), n=3, **how)
    for result, hers in zip(results, theirs, strict=True):
        cut = [list(takewhile(lambda token: token not in ends, answer)) for answer, _ in hers]
        assert [choice.tokens for choice in result.choices] == cut
        assert [choice.text.strip() for choice in result.choices] == [words(tokens) for tokens in cut]
        assert [c.score for c in result.choices] == pytest.approx([score for _, score in hers], abs=1e-5)
        reasons = ["stop" if answer[-1] in ends else "length" for answer, _ in hers]
        assert [choice.finish_reason for choice in result.choices] == reasons
    assert loaded.generate(prompts(name), **how) == [result.choices[0].text for result in results]
    assert loaded.generate(prompts(name)[1], **how) == results[1].choices[0].text


@pytest.mark.parametrize("name", ["gpt2", "t5", "seq2seq-gru-bi-dot"])
def test_many_prompts_are_searched_side_by_side(name):
    loaded = tiny(name)
    many = [" ".join(text.split()[: 1 + i % 5]) for i in range(9) for text in prompts(name)]
    together = loaded.generate(many, beams=5, beam_groups=5, diversity=0.5, max_tokens=4)
    for text, found in list(zip(many, together, strict=True))[::7]:
        assert loaded.generate(text, beams=5, beam_groups=5, diversity=0.5, max_tokens=4) == found


def test_a_stop_text_cuts_what_the_search_found():
    bard = heedful.load("shakespeare", dtype=torch.float32)
    how = {"beams": 3, "max_tokens": 30}
    (whole,) = bard.complete("ROMEO:\n", **how)
    (cut,) = bard.complete("ROMEO:\n", stop=["th"], **how)
    text = whole.choices[0].text
    assert "th" in text and cut.choices[0].text == text[: text.index("th")]
    assert (whole.choices[0].finish_reason, cut.choices[0].finish_reason) == ("length", "stop")
    assert cut.choices[0].score == whole.choices[0].score


def test_a_search_leaves_the_random_state_alone():
    loaded = tiny("gpt2")
    before = torch.get_rng_state()
    loaded.generate("w3 w4", beams=2, max_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["t5", "marian", "seq2seq-gru-bi-dot"])
def test_translation_follows_the_models_own_settings(name):
    loaded, some = tiny(name, ends=[7, 11]), prompts(name)
    loaded.model.generation = {}
    off = {"no_repeat_ngram_size": 0}
    limits = [len(loaded.tokenizer.encode(prompt, add_special=True)) + 50 for prompt in some]  # Vaswani et al., 6.1
    theirs = [loaded.generate(prompt, beams=4, max_tokens=n) for prompt, n in zip(some, limits, strict=True)]
    assert loaded.translate(some, **off) == theirs
    loaded.model.generation = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "max_length": 9}
    theirs = {"beams": 3, "length_penalty": 2.0, "early_stopping": True, "max_tokens": 8}
    assert loaded.translate(some, **off) == loaded.generate(some, **theirs)
    assert loaded.translate(some[0], beams=2, max_tokens=5) == loaded.generate(
        some[0], **{**theirs, "beams": 2, "max_tokens": 5}
    )
    assert loaded.translate(some, beams=1, **off) == loaded.generate(some, temperature=0, max_tokens=8)
    loaded.model.generation = {"num_beams": 1, "length_penalty": 2.0}
    assert loaded.translate(some[0], **off) == loaded.generate(some[0], temperature=0, max_tokens=limits[0])
    for beams in 1, 4:  # no 5 tokens occur twice, where the source repeats none
        words = loaded.translate("w5 w6 w7", beams=beams).split()
        runs = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
        assert len(set(runs)) == len(runs)


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_an_encoder_decoder_searches_as_transformers_does_by_the_same_file(name):
    """Without options: the beams, length and penalty of generation_config.json."""
    case, ends = case_of[name], [7, 11]
    reference = softened(case, 0.5)
    file = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "max_new_tokens": 9}
    loaded = tiny(name, reference, ends)
    loaded.model.generation = dict(file)
    theirs = reference_beams(case, reference, prompts_of(case), num_return_sequences=1, eos_token_id=ends, **file)
    found = loaded.complete(prompts(name))
    assert [r.choices[0].score for r in found] == pytest.approx([hers[0][1] for hers in theirs], abs=1e-5)
    assert loaded.translate(prompts(name), no_repeat_ngram_size=0) == [r.choices[0].text for r in found]


@pytest.mark.parametrize("how", [{}, {"beams": 3, "n": 2}, {"draft": "lookup"}], ids=["greedy", "beams", "draft"])
def test_settings_of_the_file_that_forbid_tokens_are_followed_however_it_decodes(how):
    loaded, some = tiny("gpt2", softened(case_of["gpt2"], 3.0), ends=[7, 11, 30]), prompts("gpt2")
    asked = {"no_repeat_ngram_size": 2, "min_tokens": 6, "max_tokens": 12}
    how = how if "beams" in how else {**how, "temperature": 0}
    found = loaded.complete(some, **asked, **how)
    assert found != loaded.complete(some, max_tokens=12, **how)
    loaded.model.generation = {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "max_new_tokens": 12}
    assert loaded.complete(some, **how) == found
    if "beams" not in how:  # a draft changes nothing
        assert found == loaded.complete(some, temperature=0)
    for result in found:
        tokens = result.choices[0].tokens
        assert len(tokens) >= 6 and len(set(pairwise(tokens))) == len(tokens) - 1


def test_the_file_of_a_summarizer():
    """BART's: min_length counts the start token; what a request asks for bounds it."""
    translator, gpt = tiny("t5", ends=[7, 11]), tiny("gpt2")
    file = {"num_beams": 4, "min_length": 7, "max_length": 13, "no_repeat_ngram_size": 3, "num_beam_groups": 2}
    translator.model.generation = {**file, "diversity_penalty": 0.5}
    theirs = {
        "beams": 4,
        "min_tokens": 6,
        "max_tokens": 12,
        "no_repeat_ngram_size": 3,
        "beam_groups": 2,
        "diversity": 0.5,
    }
    assert translator.generation_options() == theirs
    assert translator.generation_options(max_tokens=4)["min_tokens"] == 4
    assert "beam_groups" not in translator.generation_options(beams=3)
    for file, names in (({"min_length": 5}, "min_length"), ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha")):
        gpt.model.generation = file
        with pytest.warns(UserWarning, match=f"generation_config.json has {names}, not followed"):
            gpt.generation_options()


def test_defaults_follow_what_a_model_is():
    translator, gpt, text, most = tiny("t5", ends=[7, 11]), tiny("gpt2"), prompts("t5")[0], {"max_tokens": 9}
    assert translator.generate(text, **most) == translator.generate(text, beams=4, **most)
    greedy = translator.complete(text, temperature=0, **most)[0].choices[0]
    assert "".join(translator.stream(text, **most)) == greedy.text
    assert translator.complete(text, logprobs=0, **most)[0].choices[0].tokens == greedy.tokens
    assert len(translator.complete(text, n=6, **most)[0].choices) == 6
    assert gpt.generation_options() == {"beams": 1}
    assert gpt.generation_options(top_p=0.5, beams=2) == {"top_p": 0.5, "beams": 2}  # refused where it is used
    assert translator.generation_options(top_p=0.5) == {"beams": 1, "top_p": 0.5}
    assert translator.generation_options(seed=3) == {"beams": 1, "seed": 3, "temperature": 0.0}


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": 20, "max_length": 30}, {"temperature": 0.7, "top_k": 20}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"max_new_tokens": 30, "min_p": None}, {"max_tokens": 30}),
    ],
)
def test_a_decoder_samples_as_its_file_says(file, options):
    loaded = tiny("gpt2")
    loaded.model.generation = file
    assert loaded.generation_options() == {"beams": 1, **options}
    assert loaded.generation_options(temperature=0.3)["temperature"] == 0.3
    how = {"max_tokens": 9, "seed": 1}
    assert loaded.generate("w1 w2", **how) == loaded.generate("w1 w2", **{**options, **how})


@pytest.mark.parametrize(
    "file", [{"num_beams": 10**9}, {"top_p": "x"}, {"temperature": float("nan")}, {"max_new_tokens": 0}]
)
def test_a_file_that_makes_no_sense_is_named(file):
    loaded = tiny("gpt2")
    loaded.model.generation = file
    with pytest.raises(ValueError, match=f"{next(iter(file))} is .* in generation_config.json"):
        loaded.generate("w1")


@pytest.mark.parametrize("nothing", ["", " \n", "\u200b"])
def test_the_translation_of_nothing_is_nothing(nothing):
    translator = heedful.load("translator", dtype=torch.float32)
    text = "Ein Hund rennt."
    assert translator.translate(nothing) == "" == "".join(translator.stream(nothing))
    assert translator.translate([text, nothing, text]) == [translator.translate(text), "", translator.translate(text)]
    assert main(["generate", "translator", nothing]) == 0


def test_more_tokens_than_the_context_has_room_for_are_told():
    loaded = heedful.load("tiny")
    most = loaded.model.context_length
    with pytest.warns(
        TruncationWarning, match=f"the context of {most} tokens has room for {most - 4} after the prompt"
    ):
        (result,) = loaded.complete("To be", max_tokens=1000, temperature=0)
    assert len(result.choices[0].tokens) == most - 4
    loaded.complete("To be", max_tokens=most - 4, temperature=0)  # says nothing


def test_the_command_line_searches_with_an_encoder_decoder(tmp_path, capsys):
    loaded = tiny("t5", ends=[7, 11])
    loaded.save(tmp_path / "t5")
    text = prompts("t5")[0]
    assert main(["generate", str(tmp_path / "t5"), text, "--beams", "3", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == loaded.generate(text, beams=3, max_tokens=9) + "\n"
    assert main(["generate", str(tmp_path / "t5"), text, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == loaded.generate(text, beams=4, max_tokens=9) + "\n"


@pytest.mark.filterwarnings("ignore:generation_config.json has bad_words_ids")
def test_what_the_authors_forbid_is_never_said():
    loaded, text = tiny("t5"), prompts("t5")[0]
    first = loaded.generate(text, **GREEDY).split()[0]
    loaded.model.generation = {"bad_words_ids": [[int(first[1:])], [3, 4]]}
    for how in (GREEDY, {"beams": 3, "max_tokens": 20}, {**GREEDY, "draft": "lookup"}, {"seed": 1}):
        assert first not in loaded.generate(text, **how).split()


@pytest.mark.parametrize("name", ["gpt2", "llama3", "t5", "seq2seq-lstm-bi-additive"])
@pytest.mark.parametrize("kind", ["lookup", "itself", "another"])
def test_a_draft_changes_nothing_of_greedy_text(name, kind):
    loaded, some = tiny(name), prompts(name)
    other = tiny(name, randomize(case_of[name].reference(), seed=7))
    draft = {"lookup": "lookup", "itself": loaded, "another": other}[kind]
    plain = loaded.complete(some, **GREEDY)
    assert loaded.complete(some, draft=draft, **GREEDY) == plain
    assert loaded.generate(some, draft=draft, **GREEDY) == [result.choices[0].text for result in plain]
    assert list(loaded.stream(some[1], draft=draft, **GREEDY)) == list(loaded.stream(some[1], **GREEDY))
    # Ends of all kinds: tokens, texts that some say and others do not, the last token allowed.
    said = [choice.tokens for result in plain for choice in result.choices]
    loaded.model.special = {"eos_token_id": [said[0][7]]}
    for stop in ((), (words(said[1][3:5]), f"w{said[2][9]} ")):
        how = {"stop": stop, "temperature": 0, "max_tokens": 13}
        plain = loaded.complete(some, **how)
        assert loaded.complete(some, draft=draft, **how) == plain
        pieces = list(loaded.stream(some[0], draft=draft, **how))
        assert pieces == list(loaded.stream(some[0], **how))


@pytest.mark.filterwarnings("ignore::heedful.models.base.TruncationWarning")
def test_a_draft_ends_at_the_last_position():
    bard = heedful.load("shakespeare", dtype=torch.float32)
    how = {"temperature": 0, "max_tokens": 50}
    plain = bard.complete(["O" * 250, "ROMEO:\n" * 20], **how)
    assert [choice.finish_reason for result in plain for choice in result.choices] == ["length", "length"]
    for draft in ("lookup", bard):
        assert bard.complete(["O" * 250, "ROMEO:\n" * 20], draft=draft, **how) == plain


def test_a_seed_repeats_a_drafted_text_whatever_is_beside_it():
    loaded, some = tiny("gpt2"), prompts("gpt2")
    other = tiny("gpt2", randomize(case_of["gpt2"].reference(), seed=7))
    how = {"draft": other, "temperature": 1.2, "max_tokens": 15, "seed": 5}
    together = loaded.generate(some, **how)
    assert together == [loaded.generate(text, **how) for text in some]
    assert "".join(loaded.stream(some[0], **how)) == together[0]
    assert together != loaded.generate(some, **{**how, "seed": 6})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"beams": 3, "temperature": 0.7, "top_p": 0.9},
            "beam search and temperature, top_p do not go together",
        ),
        ({"beams": 3, "logprobs": 2, "draft": "lookup"}, "beam search and logprobs, draft do not"),
        ({"beams": 2, "n": 3}, "n is 3 with 2 beams"),
        ({"beams": 0}, "beams is 0"),
        ({"length_penalty": 2.0, "diversity": 1.0}, "length_penalty, diversity: for beam search alone"),
        ({"beams": 4, "beam_groups": 3}, "equal groups"),
        ({"draft": "lookup", "n": 2, "echo": True}, "leave out n, echo"),
        ({"draft": "look"}, "draft is 'look'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        tiny("gpt2").complete("w1 w2", **settings)


def test_drafts_that_cannot_be_are_refused():
    loaded = tiny("gpt2")
    foreign = Loaded(loaded.model, vocabulary("v"), "foreign")
    for draft, says in (
        (foreign, "foreign cannot draft for tiny-gpt2: their tokenizers differ"),
        (Loaded(loaded.model, None, "mute"), "mute cannot draft"),
        (tiny("t5"), "both must continue a prompt or both answer a source"),
    ):
        with pytest.raises(ValueError, match=says):
            loaded.generate("w1 w2", draft=draft)
        with pytest.raises(ValueError, match=says):
            loaded.stream("w1 w2", draft=draft)


def test_a_search_does_not_stream_and_a_decoder_does_not_translate():
    with pytest.raises(ValueError, match="cannot stream"):
        tiny("gpt2").stream("w1", beams=2)
    with pytest.raises(ValueError, match="tiny-gpt2 is a GPT and cannot translate"):
        tiny("gpt2").translate("w1")
    with pytest.raises(ValueError, match="use complete for n"):
        tiny("t5").translate("w1", n=2)


def test_a_chat_is_generation_in_the_chat_template(tmp_path):
    loaded = heedful.load(write_chat_model(tmp_path / "chatty"))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is red?"}]
    how = {"max_tokens": 8, "seed": 1}
    expected = loaded.complete(turns, chat=True, **how)[0].choices[0].text
    assert loaded.chat(turns, **how) == expected == loaded.chat("What is red?", system="Be brief.", **how)
    assert "".join(loaded.chat(turns, stream=True, **how)) == expected
    assert loaded.generation_options(chat=True)["max_tokens"] == 2048  # as over HTTP
    with pytest.raises(ValueError, match="chat gives one text"):
        loaded.chat("a", n=2)
    with pytest.raises(ValueError, match="no chat template"):
        heedful.load("tiny").chat("a")
