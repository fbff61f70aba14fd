"""Conversations as data: the formats that are read, and packed rows that are no other than rows of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful.data.chats import Chats, is_chat_file, pack_rows, read_chats, to_messages, tokenize_chat
from heedful.data.dataset import IGNORED, Draw
from heedful.text import Tokenizer, train_bpe
from heedful.text.chat_answers import tokenize_answers
from heedful.train.objectives import causal
from support.chats import CHATML
from support.folders import tiny_llama

WANTED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
FORMATS = [
    {"messages": WANTED},
    {"prompt": "Hi", "completion": "Ho"},
    {"question": "Hi", "answer": "Ho", "id": 3},
    {"instruction": "Hi", "input": "", "output": "Ho"},
    {"prompt": WANTED[:1], "completion": WANTED[1:]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_bpe(
        ["What is red? A rose is red. Hi Ho user assistant"] * 9, 300, special=("<|im_start|>", "<|im_end|>")
    )
    made.chat_template = CHATML
    return made


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: "-".join(row))
def test_every_usual_format(row, tmp_path, tokenizer):
    assert to_messages(row)[0] == WANTED
    path = jsonl(tmp_path / "chats.jsonl", row)
    assert is_chat_file(path)
    [(ids, own)] = read_chats(path, tokenizer)
    assert tokenizer.decode([i for i, mine in zip(ids, own, strict=True) if mine], skip_special=False) == "Ho<|im_end|>"


def test_other_names_tables_and_tools(tmp_path, tokenizer):
    assert to_messages({"q": "Hi", "a": "Ho"}, "q", "a")[0] == WANTED
    assert to_messages({"instruction": "Hi", "input": "you", "output": "Ho"})[0][0]["content"] == "Hi\n\nyou"
    assert to_messages({"messages": WANTED, "tools": [{"name": "f"}]})[1] == {"tools": [{"name": "f"}]}
    (tmp_path / "a.csv").write_text('prompt,answer\n"Hi","Ho"\n')
    assert is_chat_file(tmp_path / "a.csv") and len(read_chats(tmp_path / "a.csv", tokenizer)) == 1
    assert not is_chat_file(jsonl(tmp_path / "text.jsonl", {"text": "a", "answer": "b"}))


@pytest.mark.parametrize(
    "row, match",
    [
        ({"text": "a"}, r'line 2: no "messages", and no prompt with its answer; it has: text; say .*data\.target'),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: the conversation has no message of the assistant"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "line 2: message 0 has the role 'boss'"),
        ({"messages": ["a"]}, "line 2: messages must be a list of objects"),
        ({"prompt": 3, "answer": "b"}, "line 2: prompt and answer must be texts"),
    ],
)
def test_a_wrong_row_is_named(row, match, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=match):
        read_chats(jsonl(tmp_path / "a.jsonl", FORMATS[0], row), tokenizer)


def test_without_a_template_pairs_are_texts(tmp_path):
    plain = train_bpe(["What is red? A rose is red."] * 9, 280)
    [(ids, own)] = read_chats(jsonl(tmp_path / "a.jsonl", {"prompt": "What is ", "completion": "red?"}), plain)
    assert plain.decode(ids) == "What is red?" and ids[-1] == plain.eos_id
    assert plain.decode([i for i, mine in zip(ids, own, strict=True) if mine]) == "red?" and own[-1]
    with pytest.raises(ValueError, match="no chat template"):
        read_chats(jsonl(tmp_path / "b.jsonl", FORMATS[0]), plain)


def test_a_template_that_rewrites_the_past_gives_an_example_per_answer(tokenizer, monkeypatch):
    """As those that leave out the reasoning of past answers."""
    monkeypatch.setattr(tokenizer, "chat_template", CHATML.replace("m.content", "m.content.split('}')[-1]"))
    same = tokenize_answers(tokenizer, WANTED)
    keep_last = "(m.content if loop.last else m.content.split('}')[-1])"
    monkeypatch.setattr(tokenizer, "chat_template", CHATML.replace("m.content", keep_last))
    thinking = {"role": "assistant", "content": "{red}Ho"}
    examples = list(tokenize_chat(tokenizer, [WANTED[0], thinking, WANTED[0], thinking]))
    texts = [tokenizer.decode([i for i, mine in zip(*example, strict=True) if mine]) for example in examples]
    assert texts == ["{red}Ho"] * 2
    past = len(same[0])
    assert examples[1][0][:past] == same[0] and not any(examples[1][1][:past])  # the answer before, without reasoning


def test_rows_hold_whole_conversations_and_little_else():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = pack_rows(lengths, 128)
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    assert all(lengths[row].sum() <= 128 for row in rows)
    assert len(rows) <= 1.03 * np.ceil(lengths.sum() / 128)


def test_the_loss_of_packed_conversations_is_that_of_each_alone(tokenizer):
    """Only the answers count, and no conversation sees another; padding is neither."""
    talks = [
        [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": answer}]
        for answer in ("A rose", "Hi", "red red red", "Ho Ho is a rose")
    ]
    tokens = [tokenize_answers(tokenizer, talk) for talk in talks]
    model = tiny_llama(vocab_size=len(tokenizer), max_len=512)
    packed = Chats(tokens, 2 * max(len(ids) for ids, _ in tokens))
    assert len(packed) < len(talks) and packed.n_learned == sum(sum(own) for _, own in tokens)
    with torch.no_grad():
        whole = causal(model, packed.batch([Draw(0, i) for i in range(len(packed))], seed=0))
        expected = 0.0
        for ids, own in tokens:  # by PyTorch's own operator
            logits = model(torch.tensor([ids])).logits[0, :-1]
            targets = torch.tensor([i if mine else IGNORED for i, mine in zip(ids, own, strict=True)][1:])
            expected += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    assert int(whole.n_targets) == packed.n_learned
    assert whole.sum.item() == pytest.approx(expected, rel=1e-5)


def test_long_conversations_are_cut_and_told(tokenizer):
    short, long = ([1] * 5, [False] * 3 + [True] * 2), ([2] * 50, [False] * 20 + [True] * 30)
    data = Chats([short, long, ([3] * 9, [False] * 9)], 30)
    assert data.ids.lengths.tolist() == [5, 30]
    assert data.notes[0].startswith("1 of 3 conversations are longer than 30 tokens and are cut")
    assert data.notes[1] == "1 of 3 conversations have nothing to learn and are left out"
    with pytest.raises(ValueError, match="no conversation is left"):
        Chats([long], 15)
