"""What benchmarks/classification.py and the grammar of captions compute, against definitions and school grammar."""

import importlib
import importlib.util
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful.generate.batch import greedy_batch
from heedful.loaded import Loaded
from heedful.models.base import Batch
from heedful.text import train_bpe
from support.chats import CHATML
from support.folders import tiny_llama

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(Path(name).stem, BENCHMARKS / name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, Path(name).stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_calibration_error_is_the_gap_between_confidence_and_accuracy(monkeypatch):
    measure = script("classification.py", monkeypatch)
    chances = np.array([[0.9, 0.1]] * 10 + [[0.4, 0.6]] * 10)
    labels = np.array([0] * 7 + [1] * 3 + [1] * 6 + [0] * 4)  # 70 % of the sure ones are right, 60 % of the others
    assert measure.expected_calibration_error(chances, labels) == pytest.approx(0.5 * 0.2)
    sure = np.array([[0.99, 0.01]] * 100)
    right = np.array([0] * 80 + [1] * 20)
    temperature = measure.fit_temperature(sure, right)
    assert temperature > 1 and measure.heated(sure, temperature)[0, 0] == pytest.approx(0.8, abs=0.02)


def test_near_duplicates_are_in_one_part(monkeypatch):
    measure = script("classification.py", monkeypatch)
    assert len({measure.part_of(t) for t in ("Call 0800 now!", "call 0900 NOW", "CALL now...")}) == 1
    parts = [measure.part_of(f"{chr(97 + i % 26)} {chr(97 + i // 26)}") for i in range(600)]
    assert 0.6 < parts.count("train") / 600 < 0.8 and 0.1 < parts.count("test") / 600 < 0.3


def test_captions_are_declined_as_german_is(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "zoo_data"))
    captions, german = script("zoo_data/captions.py", monkeypatch), importlib.import_module("german")
    grammar = captions.Grammar(random.Random(0))
    few = [noun for noun in german.NOUNS["person"] if noun.singular in ("Mann", "Frau", "Kind", "Junge")]
    with monkeypatch.context() as patch:
        patch.setitem(german.NOUNS, "person", few)
        patch.setitem(german.ADJECTIVES, "person", [("alt", "alt", "old")])
        forms = [(case, det, n) for case in german.CASES for det in ("ein", "der", "kein") for n in (True, False)]
        said = {grammar.noun_phrase("person", *form).german for form in forms for _ in range(900)}
    assert {"ein alter Mann", "einen alten Mann", "einem alten Mann", "der alte Mann", "keine alte Frau"} <= said
    assert {
        "einen Jungen",
        "dem alten Jungen",
        "ein altes Kind",
        "den Kindern",
        "die alten Frauen",
        "alte Frauen",
    } <= said
    assert {"zwei alte Männer", "einigen alten Männern", "einer alten Frau", "keinen alten Kindern"} <= said
    assert not {"einen Junge", "den Junge", "einen Frau", "den Kinder", "ein alte Kind", "zwei alten Männer"} & said
    clauses = dict(grammar.sentence() for _ in range(4000))
    assert all(german[-1] in ".?!" and german[-1] == english[-1] for german, english in clauses.items())
    assert not any(", ," in german or "  " in german or " ." in german for german in clauses)
    assert any(german.startswith("Während") and english.startswith("While") for german, english in clauses.items())
    assert any(" hat " in g and g.endswith(("gesehen.", "gelesen.", "gekauft.")) for g in clauses)


def test_verbs_have_the_forms_of_school_grammar(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "zoo_data"))
    verb = importlib.import_module("german").verb
    forms = {
        "zeichnen": "zeichne zeichnest zeichnet zeichnete gezeichnet zu zeichnen",
        "halten": "halte hältst hält hielt gehalten zu halten",
        "an|ziehen": "ziehe ziehst zieht zog angezogen anzuziehen",
        "lächeln": "lächle lächelst lächelt lächelte gelächelt zu lächeln",
        "*auf|stehen": "stehe stehst steht stand aufgestanden aufzustehen",
        "besuchen": "besuche besuchst besucht besuchte besucht zu besuchen",
        "lesen": "lese liest liest las gelesen zu lesen",
        "*Fahrrad_fahren": "fahre fährst fährt fuhr Fahrrad gefahren Fahrrad zu fahren",
        "fotografieren": "fotografiere fotografierst fotografiert fotografierte fotografiert zu fotografieren",
    }
    for name, expected in forms.items():
        v = verb(name, "be")
        said = [*map(v.present, ("1s", "2s", "3s")), v.preterite("3s"), v.participle, v.with_zu]
        assert " ".join(said) == expected
    for english, expected in {
        "lie": "lying lay lies",
        "run around": "running around ran around runs around", "study": "studying studied studies"
    }.items():  # fmt: skip
        v = verb("sehen", english.replace(" ", "_")).english
        assert f"{v.ing} {v.past} {v.present('3s')}" == expected


def test_answers_of_a_batch_are_those_of_each_prompt_alone(monkeypatch):
    """Padding, a cache that is compacted, and grouped heads change nothing."""
    batched = script("zoo_data/batched.py", monkeypatch)
    monkeypatch.setattr(batched, "CHECK", 2)
    monkeypatch.setattr(batched, "FEWEST", 0.0)
    monkeypatch.setattr(batched, "ROWS", 5)
    monkeypatch.setattr(batched, "KEYS", 8)
    model, rng, n = tiny_llama(), random.Random(0), 20
    prompts = [[rng.randrange(80) for _ in range(rng.randrange(2, 20))] for _ in range(12)]
    alone = [greedy_batch(model, Batch(torch.tensor([prompt])), n)[0] for prompt in prompts]
    end = Counter(token for ids in alone for token in ids[5:15]).most_common(1)[0][0]
    sampler = batched.BatchedSampler(model, end, 15 * 48, min_p=1.0, longest=n)
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in alone]
    assert sampler.sample(prompts, [0.5] * 12) == expected
    assert len({ids[-1] == end for ids in expected}) == 2, "some end, some do not"


def test_conversations_worth_learning_from(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "zoo_data"))
    chats = script("zoo_data/chats.py", monkeypatch)
    selection = chats.Selection()
    good = "A fox lived in a wood. One day it found a clock and took it home."
    assert selection.accepts(good)
    assert chats.cut_at_end(good + "\n\nThen it") == good
    assert chats.cut_at_end("It said: no. And") == "It said: no." and chats.cut_at_end("one two three") == ""
    for bad in ("", "Je suis déjà là.", "I am SmolLM.", "It rains here today. It rains here today.", "so " * 40):
        assert not selection.accepts(bad)
    assert sum(selection.accepts(good + f" {i}") for i in range(20)) == chats.MOST_ALIKE - 1
    requests = chats.Requests(BENCHMARKS / "zoo_data" / "chats.toml", seed=0)
    drawn = [requests.first() for _ in range(2000)]
    assert len(set(drawn)) > 1500 and not any("{" in text or " a old " in text for text in drawn)
    for request, opening in (requests.story() for _ in range(200)):
        assert "{" not in request + opening
        if "the words" in request:
            words = re.split(r" and |, ", request.lower().rstrip(".").partition("the words ")[2])
            assert all(word in opening.lower() for word in words)
    asked = [[{"role": "user", "content": text}] for text in drawn]
    assert 0.005 < sum(map(chats.is_held_out, asked)) / 2000 < 0.05
    same = [
        chats.is_held_out([{"role": "user", "content": t}]) for t in ("Write about Rain.", "please write about rain")
    ]
    assert len(set(same)) == 1


WIKI = """<page><title>Ulm</title><text xml:space="preserve">{{Infobox | a = {{b}} }}
'''Ulm''' is a city in [[Germany|the German state]] on the [[Danube]].&lt;ref&gt;Who says?&lt;/ref&gt; \
[[Image:Ulm.jpg|thumb|The [[minster]] of Ulm]] It was first mentioned in 854, and [[Albert Einstein]] was born there.
* a list
[[Category:Cities in Germany]]</text></page>
<page><title>Ulma</title><text xml:space="preserve">#REDIRECT [[Ulm]]</text></page>
<page><title>Talk:Ulm</title><text xml:space="preserve">Nothing.</text></page>"""


def test_articles_of_wikipedia_are_read_as_prose_with_links(monkeypatch):
    wikipedia = script("zoo_data/wikipedia.py", monkeypatch)
    ((title, text),) = wikipedia.pages(WIKI)
    (paragraph,) = wikipedia.paragraphs(text)
    assert title == "Ulm" and "[[Germany|the German state]]" in paragraph
    plain = wikipedia.words_of_links(paragraph)
    assert plain.startswith("Ulm is a city in the German state on the Danube. It was") and "minster" not in plain
    assert wikipedia.title_kinds(WIKI) == {"Ulm": "LOC", "Ulma": "LOC"}


def test_questions_have_their_answers_in_the_passage_or_none(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "zoo_data")
    questions = script("zoo_data/questions.py", monkeypatch)
    rng = random.Random(0)
    sentences = ["Ulm lies on the Danube, in the south of Germany.", "The Danube is the longest river there, 2850 km."]
    for _ in range(20):
        context, asked = questions.cloze(sentences[0], sentences, {"Danube": "LOC"}, rng)
        (answer,) = asked["answers"]
        assert context[answer["answer_start"] :].startswith("Danube") and "Danube" not in asked["question"]
    passages = [
        {"context": f"{name} was born in {year}.", "qas": [{"question": f"When was {name} born?", "answer": year}]}
        for name, year in (("Ada", "1815"), ("Alan", "1912"), ("Grace", "1906"))
    ]
    made = questions.with_unanswerable(passages, 1.0, rng)
    added = [(p["context"], q["question"]) for p in made for q in p["qas"] if q.get("answers") == []]
    assert len(added) == 3 and all(q.split()[2] not in context for context, q in added)


def test_headlines_are_written_in_capitals_with_their_tags(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "zoo_data")
    made = script("zoo_data/entities.py", monkeypatch)

    class Drawn:
        def draw(self, kind, rng):
            return {"lastname": "Edberg", "city": "Paris", "usteam": "St Louis"}[kind]

    rng = random.Random(0)
    assert made.from_template("^Tennis - {last} wins in {city} .", Drawn(), rng) == (
        "TENNIS - EDBERG WINS IN PARIS .".split(), ["O", "O", "B-PER", "O", "O", "B-LOC", "O"],
    )  # fmt: skip
    assert made.from_template("{USTEAM} AT {CITY}", Drawn(), rng) == (
        ["ST", "LOUIS", "AT", "PARIS"], ["B-ORG", "I-ORG", "O", "B-LOC"],
    )  # fmt: skip


def test_fewer_tokens_say_the_same(monkeypatch):
    prune = script("zoo_data/prune.py", monkeypatch)
    texts = ["the old man sat on the old mat", "a cat and a hat", "so the cat sat on a hat"]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = train_bpe(texts * 9 + ["quite another thing altogether"] * 9, 340, special=special)
    tokenizer.chat_template = CHATML
    model = tiny_llama(vocab_size=len(tokenizer), tied=True)
    model.special = {"eos_token_id": [tokenizer.id("<|im_end|>")]}
    whole = Loaded(model, tokenizer, "whole")
    small = prune.prune(whole, prune.count_tokens(tokenizer, texts))
    assert len(small.tokenizer) < len(tokenizer) and small.tokenizer.id("<|im_end|>") == small.chat_eos_ids[0]
    talk = [{"role": "user", "content": texts[2]}]
    before, after = tokenizer.chat(talk), small.tokenizer.chat(talk)
    assert [tokenizer.token(i) for i in before] == [small.tokenizer.token(i) for i in after]
    assert small.tokenizer.decode(small.tokenizer.encode("altogether")) == "altogether"
    with torch.no_grad():
        said, says = model(torch.tensor([before])).logits[0], small.model(torch.tensor([after])).logits[0]
    old = [tokenizer.id(small.tokenizer.token(i)) for i in range(len(small.tokenizer))]
    torch.testing.assert_close(said[:, old], says)
    fewer = prune.keep_layers(small, [1])
    assert fewer.model.config.n_layers == 1 and fewer.chat_eos_ids == small.chat_eos_ids
    kept = dict(fewer.model.named_parameters())
    for name, p in small.model.named_parameters():
        if "blocks.1." in name:
            assert torch.equal(kept[name.replace("blocks.1.", "blocks.0.")], p)
