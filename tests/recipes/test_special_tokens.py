"""tokenizer.allow_special: special tokens written in training texts, as chat markup, are those tokens."""

import pytest

from heedful.recipes.build import build_training
from heedful.text import train_bpe
from heedful.train.recipe import Recipe
from support.trainings import SMALL

TURN = "<|im_start|>user\nthe cat sat<|im_end|>\n"


@pytest.mark.parametrize("allow", [False, True])
def test_chat_markup_in_a_training_text(allow, tmp_path):
    tokenizer = train_bpe([TURN] * 3, 280, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(TURN * 40)
    setup = build_training(
        Recipe.from_dict(
            {
                "model": {"family": "gpt", **SMALL},
                "tokenizer": {"path": str(tmp_path / "tokenizer"), "allow_special": allow},
                "data": {"source": str(tmp_path / "text.txt"), "length": 16},
            }
        )
    )
    ids = setup.train.corpus.tokens[:].tolist()
    start = tokenizer.id("<|im_start|>")
    assert (start in ids) == allow
    if allow:
        assert ids[:3] == tokenizer.encode(TURN, allow_special=True)[:3]
    assert start not in setup.tokenizer.encode(TURN)  # a user's text stays text
