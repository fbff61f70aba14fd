"""The models that ship: small, each with its card, and as good as the card says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

import heedful
from heedful.cli import parse_arguments
from heedful.data.dataset import Draw
from heedful.data.images import LabelledImages, read_images
from heedful.data.synthetic import Reversal
from heedful.generate.batch import greedy_batch
from heedful.models.base import Batch
from heedful.train.distributed import Processes
from heedful.train.objectives import causal, classification
from heedful.train.recipe import read_recipe, shipped_recipes
from heedful.train.trainer import LossModule, validate
from heedful.weights.resolve import shipped_models as models
from heedful.zoo import FOLDER, SHARES, cards, read_card
from support.application import sync_client
from support.serving import shared_data

LARGEST = 16 * 2**20
SENTENCES = Path(__file__).parents[1] / "benchmarks" / "zoo_data"  # everyday ones, written for this


def score(model, objective, data):
    cpu = torch.device("cpu")
    return validate(LossModule(model, objective, "float32", cpu), data, batch_size=64, processes=Processes(cpu))


def card(name):
    return read_card(FOLDER / name).facts


@pytest.mark.parametrize("name", models())
def test_ships_small_with_a_card_and_loads_by_name(name):
    for file in (FOLDER / name).iterdir():
        assert file.stat().st_size <= LARGEST, f"{file} is larger than 16 MiB"
    told = card(name)
    assert told["recipe"].strip("`") in shipped_recipes()
    assert cards()[name]
    loaded = heedful.load(name)
    assert loaded.model.n_parameters() == int(told["parameters"].replace(",", ""))


def test_all_models_fit_a_wheel():
    assert sum(file.stat().st_size for name in models() for file in (FOLDER / name).iterdir()) <= 90 * 2**20


@pytest.mark.parametrize("name", models())
def test_the_card_says_all_that_a_user_asks(name):
    found = read_card(FOLDER / name)
    assert {"data", "kept apart", "licence", "recipe", "good at", "fails at"} <= found.facts.keys()
    assert found.scores, "a card has a score"
    for score in found.scores:
        assert score.data and score.value >= 0 and (score.type not in SHARES or score.value <= 1)
        program, *words = shlex.split(score.command)
        if program == "heedful":
            parse_arguments(words)
            assert words[1] == (found.facts["recipe"].strip("`") if words[0] == "train" else name)
        else:
            assert program == "python" and (FOLDER.parents[2] / words[0]).is_file()
    metadata = ModelCard.load(FOLDER / name / "README.md").data  # as the hub reads it
    assert metadata.license and metadata.datasets and metadata.tags
    assert [result.metric_value for result in metadata.eval_results] == [score.value for score in found.scores]
    loaded = heedful.load(name)
    writes = "generate" in loaded.abilities and loaded.tokenizer is not None
    if (writes and loaded.model.family != "seq2seq") or loaded.model.family == "image_gpt":
        samples = found.text.partition("\n## Samples\n")[2]
        assert samples.count("~~~~text") == 10 and "unedited" in samples


@pytest.mark.parametrize("name", models())
def test_is_what_its_recipe_makes(name):
    recipe = read_recipe(shipped_recipes()[card(name)["recipe"].strip("`")])
    settings = heedful.load(name).model.config.to_dict()
    base = recipe["model"].get("init_from")
    family = heedful.load(base).model.family if base else recipe["model"]["family"]
    for key, value in recipe["model"].items():
        if key not in ("family", "init_from"):
            assert settings[key] == value, key
    assert heedful.load(name).model.family == family


@pytest.mark.parametrize("name", models())
def test_the_telling_head_of_a_card_is_one_of_the_models(name):
    told = read_card(FOLDER / name).metadata.get("attention")
    if told is None:
        pytest.skip(f"the card of {name} names no head")
    config = heedful.load(name).model.config
    assert 0 <= told["layer"] < config.n_layers and 0 <= told["head"] < config.n_heads
    assert told.keys() == {"layer", "head", "shows"} and told["shows"]


def test_reversal_writes_every_new_sequence_backwards():
    model = heedful.load("reversal").model
    data = Reversal(16, 20, 500, seed=12345, ends=True)  # longest, and none of its 20,000 examples
    batch = data.batch([Draw(0, i) for i in range(500)], seed=0)
    assert batch.targets.tolist() == greedy_batch(model, Batch(source=batch.source), 21)


def test_reversal_reads_and_writes_symbols():
    loaded = heedful.load("reversal")
    texts = ["3 1 4 1 5 9 2 6", "7", " ".join(str(1 + i % 16) for i in range(20))]
    backwards = [" ".join(reversed(text.split())) for text in texts]
    assert loaded.generate(texts, temperature=0) == backwards == loaded.translate(texts)
    assert "".join(loaded.stream("1, 2, 3", temperature=0)) == "3 2 1"
    with sync_client("reversal") as post:
        status, reply = post("POST", "/v1/completions", json={"prompt": texts[0], "temperature": 0})
    assert status == 200 and reply["choices"][0]["text"] == backwards[0]


def digits(kind, part):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    from heedful.recipes.inputs import load_data as read_data
    from heedful.train.recipe import Recipe

    return getattr(read_data(Recipe.from_dict(read_recipe(shipped_recipes()[kind])), None), part)


def test_the_vision_transformer_reads_digits():
    images = read_images(shared_data("mnist", "t10k-images-idx3-ubyte.gz"))
    scores = score(heedful.load("digits-vit").model, classification, LabelledImages(images.subset(np.arange(500))))
    assert scores.metrics["accuracy"] > 0.98


def test_the_image_gpt_foresees_pixels():
    told = float(re.search(r"[\d.]+", card("digits-gpt")["result"])[0])
    found = score(heedful.load("digits-gpt").model, causal, digits("image_gpt", "validation"))
    assert found.loss == pytest.approx(told, abs=0.01)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("she was the most beautiful woman he had ever seen.", "woman"),
        ("the old man sat by the fire and smoked his pipe.", "fire"),
        ("they went into the house and shut the door behind them.", "door"),
    ],
)
def test_bert_knows_which_words_fit(text, hidden):
    loaded = heedful.load("bert-books")
    tokenizer, model = loaded.tokenizer, loaded.model.eval()
    ids = tokenizer.encode(text, add_special=True)
    place = ids.index(tokenizer.id(hidden))
    ids[place] = tokenizer.mask_id
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, place]
    assert tokenizer.id(hidden) in logits.topk(5).indices.tolist()


def test_the_translator_translates_in_both_directions():
    """The documentation's examples: it sees which language it reads."""
    pairs = {
        "Ein Mann mit einem Hut steht vor einem Haus.": "A man with a hat is standing in front of a house.",
        "Ein Hund läuft durch den Schnee.": "A dog is running through the snow.",
        "Zwei Kinder spielen.": "Two children are playing.",
        "Wo ist der Bahnhof?": "Where is the train station?",
        "A dog is running.": "Ein Hund läuft.",
        "I have no time today.": "Ich habe heute keine Zeit.",
        "Where did you buy that?": "Wo habt ihr das gekauft?",
    }
    assert heedful.load("translator").translate(list(pairs)) == list(pairs.values())


def everyday(name):
    file = SENTENCES / name
    if not file.is_file():
        pytest.skip(f"{file} comes with the source, not with the package")
    return file.read_text(encoding="utf-8").splitlines()


def test_languages_are_told_apart():
    rows = [line.split("\t") for line in everyday("languages.tsv")]
    loaded = heedful.load("languages")
    wrong = [text for label, text in rows if loaded.classify(text)[0].name != label]
    assert len(wrong) <= len(rows) // 16, wrong
    assert {label for label, _ in rows} == set(loaded.model.config.labels)
    assert "Der Hund läuft über die Straße." not in wrong


def test_people_places_and_organisations_are_found():
    loaded = heedful.load("entities")
    right = said = true = 0
    for line in everyday("entities.txt"):
        wanted = {(name, kind) for kind, name in re.findall(r"\[([A-Z]+) ([^\]]+)\]", line)}
        found = {(s.text, s.label) for s in loaded.tag(re.sub(r"\[[A-Z]+ ([^\]]+)\]", r"\1", line))}
        right, said, true = right + len(found & wanted), said + len(found), true + len(wanted)
    assert 2 * right / (said + true) > 0.9


def test_the_tagger_sees_capitals_though_bert_books_does_not():
    tokenizer, base = heedful.load("entities").tokenizer, heedful.load("bert-books").tokenizer
    assert base.encode("a Rose and a rose") == base.encode("a rose and a rose")
    assert tokenizer.encode("a Rose and a rose") != tokenizer.encode("a rose and a rose")


def test_the_reader_says_when_a_passage_does_not_answer():
    loaded = heedful.load("reader")
    passage = "The Amazon is a river in South America. It is about 6,400 kilometres long."
    asked = ["How long is the Amazon?", "Who discovered penicillin?"]
    first, second = loaded.answer(asked, [passage] * 2)
    assert first.text == "6,400 kilometres" and first.no_answer < 0.1
    assert second.text == "" and second.no_answer > 0.9
