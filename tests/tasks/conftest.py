"""A tiny BERT with any head, for the tasks that encoders do."""

from __future__ import annotations

import pytest

from heedful.loaded import Loaded
from heedful.text.train import train_wordpiece
from support.tiny import tiny

PASSAGE = "The cat sat on the mat in Paris. The dog of John Smith slept in Rome, and the mat was red."


@pytest.fixture(scope="session")
def passage():
    return PASSAGE


@pytest.fixture(scope="session")
def tokenizer():
    return train_wordpiece([PASSAGE] * 20, 200)


@pytest.fixture(scope="session")
def bert(tokenizer):
    """Makes a loaded model with the head named."""

    def make(head: str, **more) -> Loaded:
        return Loaded(tiny("bert", vocab_size=len(tokenizer), head=head, **more).eval(), tokenizer, "a small one")

    return make
