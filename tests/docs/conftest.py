"""What a reader of the documents has: files of their own, a cache folder, a server; no network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "LANGSMITH_TRACING": "false"}

from support.chats import CHATS, write_chat_model
from support.serving import serving
from support.trainings import own_cache, write_story

CONLL = "Mary B-PER\nlives O\nin O\nParis B-LOC\n\nThe O\nold O\nman O\nsat O\n\n" * 8
REVIEWS = "a fine film\t1\na dull mess\t0\nbad\t0\nwarm and funny\t1\nnot good\t0\ngreat\t1\n" * 3
GERMAN = ["Ein Mann fährt Rad.", "Zwei Hunde spielen im Schnee.", "Eine Frau liest.", "Kinder laufen am Strand."]
ENGLISH = ["A man rides a bike.", "Two dogs play in the snow.", "A woman is reading.", "Children run on the beach."]
PASSAGE = "The old bridge was built in 1890 by John Smith."
PAIRS = "sent_more,sent_less\nThe women are at home.,The men are at home.\nShe is a nurse.,He is a nurse.\n"
SERVED = ("shakespeare", "translator", "sentiment", "entities", "reader", "bert-books", "digits-gpt")


@pytest.fixture(scope="module")
def belongings(tmp_path_factory) -> Path:
    """The files that the documents speak of; small random models stand for SmolLM2."""
    folder = tmp_path_factory.mktemp("belongings")
    write_story(folder / "my.txt", 60)
    write_story(folder / "more.txt", 20, seed=2)
    write_chat_model(folder / "chatty", max_len=2048)
    shutil.copytree(folder / "chatty", folder / "smollm2-135m-instruct")
    texts = {
        "chats.jsonl": CHATS,  "train.conll": CONLL, "dev.conll": CONLL, "reviews.tsv": REVIEWS,
        "more-reviews.tsv": REVIEWS, "captions.txt": "Ein Hund.\n\nEine Frau singt.\n", "reviews.txt": "Good.\nBad.\n",
        "letters.txt": "Mary Smith lives in Paris.\n", "crows_pairs_anonymized.csv": PAIRS,
        "train.de": "\n".join(GERMAN * 6), "train.en": "\n".join(ENGLISH * 6),
        "test.de": "\n".join(GERMAN), "test.en": "\n".join(ENGLISH),
        "words.tsv": "word1\tword2\tSimLex999\nking\tqueen\t8.5\nriver\twater\t7\nstone\tnight\t1.5\nday\tnight\t6\n",
        "questions.json": json.dumps(
            [{"context": PASSAGE, "qas": [{"question": "When was it built?", "answer": "1890"}]}]
        ),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for place in ("photos/cat", "photos/dog", "more-photos/cat", "more-photos/dog"):
        (folder / place).mkdir(parents=True)
        for i in range(3):
            imsave(folder / place / f"{i}.png", np.full((16, 16, 3), i * 40 + 100 * ("dog" in place), np.uint8))
    imsave(folder / "digit.png", np.eye(8), cmap="gray")
    np.savez(folder / "digits.npz", images=np.random.default_rng(0).integers(0, 255, (3, 8, 8), dtype=np.uint8))
    return folder


@pytest.fixture
def workspace(belongings, tmp_path, tmp_path_factory, monkeypatch) -> Path:
    """A folder with these files, where a page's commands are given."""
    shutil.copytree(belongings, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
    monkeypatch.delenv("HEEDFUL_DATA", raising=False)
    monkeypatch.setattr("heedful.tasks.neighbours.MAX_WORDS", 300)  # of the first 5,000, which takes long
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def server(belongings) -> Iterator[str]:
    """The address of a server with the models of all pages."""
    with serving(*SERVED, f"smollm2={belongings / 'chatty'}", belongings / "smollm2-135m-instruct") as found:
        yield found.url
