"""The commands of the jobs, translate, classify, tag and so on: their inputs, results, errors and defaults."""

from __future__ import annotations

import io
import json
import os
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread, imsave
from safetensors.torch import load_file

import heedful
from heedful.cli import chat, inputs, main
from heedful.cli.results import ProgressLines
from support.chats import write_chat_model


def says(capsys, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code, capsys.readouterr().err
    return capsys.readouterr().out


def records(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def type_lines(monkeypatch, text: str, *, terminal: bool = False) -> None:
    stdin = io.StringIO(text)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdin", stdin)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbfEin Hund.\r\n\nEine Frau singt.\n")
    return path


@pytest.fixture(scope="module")
def digit(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "zero.png"
    ring = np.zeros((8, 8), dtype=np.uint8)
    ring[1:7, 2:6] = 255
    ring[2:6, 3:5] = 0
    imsave(path, ring, cmap="gray")
    return path


# --- inputs and results -----------------------------------------------------------------------------------------------


def test_inputs_are_arguments_then_files_then_pipes(capsys, monkeypatch, texts):
    type_lines(monkeypatch, "Ein Kind.\nZwei Hunde.")
    out = records(says(capsys, "translate", "Ein Mann.", "-", "--file", str(texts), "--json", "--beams", "1"))
    given = ["Ein Mann.", "Ein Hund.", "", "Eine Frau singt.", "Ein Kind.", "Zwei Hunde."]
    assert [found["input"] for found in out] == given
    expected = heedful.load("translator").translate(given, beams=1)
    assert [found["translation"] for found in out] == expected and expected[2] == ""


def test_a_pipe_alone_is_read_as_it_arrives(capsys, monkeypatch):
    read, write = os.pipe()
    os.write(write, "Ein Hund läuft.\nEine Fr".encode())
    monkeypatch.setattr("sys.stdin", os.fdopen(read))
    printed = []

    def answer(texts: list[str], **_: object) -> list[str]:
        printed.append(texts)
        if len(printed) == 1:
            os.write(write, b"au.\n")
            os.close(write)
        return [text.upper() for text in texts]

    monkeypatch.setattr(heedful.loaded.Loaded, "translate", lambda self, texts, **options: answer(texts))
    assert says(capsys, "translate").splitlines() == ["EIN HUND LÄUFT.", "EINE FRAU."]
    assert printed == [["Ein Hund läuft."], ["Eine Frau."]]


def test_results_come_in_order_whatever_the_batches(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(inputs, "BATCH", 4)
    lines = [f"The {'very ' * (i % 4)}good film {i}." for i in range(9)]
    (tmp_path / "films.txt").write_text("\n".join(lines) + "\n\n")
    out = records(says(capsys, "classify", "--file", str(tmp_path / "films.txt"), "--json", "--top", "1"))
    assert [found["input"] for found in out] == lines
    expected = heedful.load("sentiment").classify(lines)
    for found, labels in zip(out, expected, strict=True):
        assert found["labels"] == [{"name": labels[0].name, "score": pytest.approx(labels[0].score, abs=1e-3)}]


def test_nothing_given_says_what_to_do(capsys, monkeypatch):
    type_lines(monkeypatch, "", terminal=True)
    for command in ("translate", "classify", "tag", "embed", "neighbours"):
        assert main([command]) == 2
        assert "as an argument, lines by --file FILE, or through a pipe" in capsys.readouterr().err
    assert main(["answer", "Who?"]) == 2 and "QUESTION PASSAGE" in capsys.readouterr().err


def test_an_input_that_is_refused_is_told_and_the_others_go_on(capsys):
    long = "Hund " * 2000
    assert main(["translate", "Ein Hund.", long, "Ein Kind.", "--beams", "1", "--json"]) == 2
    out, errors = capsys.readouterr()
    first, second, third = records(out)
    assert first["translation"] and third["translation"] and "error" in second
    assert errors.startswith("heedful: input 2: ") and errors.count("\n") == 1
    assert main(["translate", long]) == 2
    assert capsys.readouterr().err.startswith("heedful: the ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["translate", "--model", "bert-books", "a"], "cannot translate"),
        (["translate", "--file", "missing.txt"], "missing.txt"),
        (["embed", "a", "--out", "vectors.pkl"], ".npy or .safetensors"),
        (["classify", "a", "--image", "b.png"], "texts or images"),
        (["classify", "a", "b", "c", "--second", "d", "--second", "e"], "one for all, or one for each"),
        (["classify", "a", "--top", "0"], "--top is 0"),
        (["complete-image", "a.png"], "--out completed.png"),
        (["complete-image", "a.png", "--out", "b.png", "--keep", "1.5"], "--keep is a share"),
        (["complete-image", "a.png", "--out", "b.png"], "there is no file a.png"),
        (["chat", "Hello", "--model", "tiny"], "no chat template"),
        (["neighbours", "king", "--layer", "99"], "no layer 99"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert told in errors and errors.count("\n") == 1 and errors.startswith("heedful: ")


def test_a_file_that_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    assert main(["translate", "--file", str(tmp_path / "bytes")]) == 2
    assert "no text in UTF-8" in capsys.readouterr().err


# --- the jobs ---------------------------------------------------------------------------------------------------------


def test_labels_of_one_text_are_all_printed_and_of_several_the_first(capsys):
    names = [line.split()[0] for line in says(capsys, "classify", "A wonderful film.").splitlines()]
    assert names == ["positive", "negative"]
    first, second = says(capsys, "classify", "A wonderful film.", "A dull, tedious mess.").splitlines()
    assert first.startswith("positive") and first.endswith("A wonderful film.") and second.startswith("negative")


def test_pairs_and_images_are_classified(capsys, digit):
    (found,) = records(says(capsys, "classify", "A film.", "--second", "Good.", "--json"))
    expected = heedful.load("sentiment").classify("A film.", "Good.")
    assert found["labels"][0]["score"] == pytest.approx(expected[0].score, abs=1e-3)
    assert says(capsys, "classify", "--image", str(digit)).split()[0] == "0"
    seconds = ("--second", "Bad.", "--second", "Dull.", "--second", "Good.")
    first, second, third = records(says(capsys, "classify", "A film.", "", "A film.", *seconds, "--json", code=2))
    assert third["labels"][0]["score"] == pytest.approx(expected[0].score, abs=1e-3) and "error" in second
    assert first["labels"] != third["labels"]


def test_entities_are_listed_or_marked(capsys):
    out = says(capsys, "tag", "Mary lives in Paris.")
    assert [line.split()[0] for line in out.splitlines()] == ["PER", "LOC"]
    assert says(capsys, "tag", "--inline", "Mary lives in Paris.") == "[Mary](PER) lives in [Paris](LOC).\n"
    (found,) = records(says(capsys, "tag", "--json", "Mary lives in Paris."))
    assert found["spans"][1] | {"score": 1} == {"text": "Paris", "begin": 14, "end": 19, "score": 1, "label": "LOC"}


def test_questions_are_answered_from_an_argument_a_file_or_a_pipe(capsys, monkeypatch, tmp_path):
    passage = "Mary lives in Paris. She was born in 1901."
    (tmp_path / "passage.txt").write_text(passage)
    asked = "Where does Mary live?"
    expected = heedful.load("reader").answer(asked, passage).text
    assert says(capsys, "answer", asked, passage) == expected + "\n"
    assert says(capsys, "answer", asked, "--file", str(tmp_path / "passage.txt")) == expected + "\n"
    type_lines(monkeypatch, passage)
    first, second = records(says(capsys, "answer", asked, "When was she born?", "-", "--json"))
    assert first["input"] == asked and first["text"] == expected == passage[first["begin"] : first["end"]]
    assert second["input"] == "When was she born?"


def test_vectors_are_printed_or_written(capsys, tmp_path, monkeypatch):
    given = ["A man is eating.", "Stars."]
    expected = heedful.load("bert-books").embed(given, normalize=True)
    out = records(says(capsys, "embed", *given, "--normalize"))
    assert [found["input"] for found in out] == given
    torch.testing.assert_close(torch.tensor([found["embedding"] for found in out]), expected, atol=2e-2, rtol=0)
    for name in ("vectors.npy", "vectors.safetensors"):
        says(capsys, "embed", *given, "--normalize", "--out", str(tmp_path / name))
    arrays = np.load(tmp_path / "vectors.npy", allow_pickle=False), load_file(tmp_path / "vectors.safetensors")
    torch.testing.assert_close(torch.from_numpy(arrays[0]), arrays[1]["embeddings"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vectors.npy", "vectors.safetensors"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = says(capsys, "embed", *given).splitlines()
    cosine = float(expected[0] @ expected[1])
    assert float(table[1].split()[2]) == pytest.approx(cosine, abs=0.02) and table[2].endswith("Stars.")


def test_neighbours_of_a_word_and_of_an_expression_without_quotes(capsys):
    assert says(capsys, "neighbours", "king", "-", "man", "+", "woman", "-n", "1").split()[1] == "queen"
    (found,) = records(says(capsys, "neighbours", "man:king::woman:?", "-n", "2", "--json"))
    assert found["input"] == "man:king::woman:?" and found["neighbours"][0]["word"] == "queen"
    lines = says(capsys, "neighbours", "king", "london", "-n", "2").splitlines()
    assert lines[0] == "king" and lines[3] == "london" and len(lines) == 6


def test_the_lower_half_of_images_is_completed(capsys, tmp_path, digit):
    out = tmp_path / "completed.png"
    arguments = ("complete-image", str(digit), str(digit), "-n", "2", "--keep", "0.25")
    assert says(capsys, *arguments, "--out", str(out)) == f"{out}\n"
    assert imread(out).shape[:2] == (2 * 96 + 4, 3 * 96 + 2 * 4)
    first, _ = records(says(capsys, *arguments, "--json"))
    assert first["rows"] == 2 and np.array(first["images"]).shape == (2, 1, 8, 8)


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("models") / "chatty"))


def test_one_answer_and_exit(capsys, monkeypatch, chatty):
    how = ("--model", chatty, "--max-tokens", "6", "--temperature", "0", "--system", "Be brief.")
    expected = heedful.load(chatty).chat("What is red?", system="Be brief.", max_tokens=6, temperature=0)
    assert says(capsys, "chat", "What", "is", "red?", *how) == expected + "\n"
    type_lines(monkeypatch, "What is red?\n")
    (found,) = records(says(capsys, "chat", "--json", *how))
    assert found == {"input": "What is red?", "answer": expected, "model": "chatty"}


def test_a_conversation_has_a_history_and_commands(capsys, monkeypatch, chatty, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = []
    answers = heedful.loaded.Loaded.chat

    def listen(self, messages, **options):
        seen.append([(turn["role"], turn["content"]) for turn in messages])
        return answers(self, messages, **options)

    monkeypatch.setattr(heedful.loaded.Loaded, "chat", listen)
    lines = "a\nb\n/save talk.jsonl\n/save talk.jsonl\n/system Be brief.\nc\n/reset\nd\n/help\n/exit\n"
    type_lines(monkeypatch, lines, terminal=True)
    out = says(capsys, "chat", "--model", chatty, "--max-tokens", "4", "--seed", "1")
    assert [[role for role, _ in turns] for turns in seen] == [
        ["user"],
        ["user", "assistant", "user"],
        ["system", *["user", "assistant"] * 2, "user"],
        ["system", "user"],
    ]
    (saved,) = records((tmp_path / "talk.jsonl").read_text())
    assert [turn["content"] for turn in saved["messages"]][::2] == ["a", "b"] and len(saved["messages"]) == 4
    assert "[talk.jsonl: 4 messages]" in out and "talk.jsonl exists" in out and out.count("/reset forgets") == 2


def test_an_interrupted_answer_stays_and_the_conversation_goes_on(capsys, monkeypatch, chatty):
    def stopped(self, messages, **options):
        yield "A rose"
        if len(messages) == 1:
            raise KeyboardInterrupt
        yield f" ({messages[1]['content']})"

    monkeypatch.setattr(heedful.loaded.Loaded, "chat", stopped)
    type_lines(monkeypatch, "a\nb\n", terminal=True)
    out = says(capsys, "chat", "--model", chatty)
    assert "[stopped]" in out and "A rose (A rose)" in out


def test_the_oldest_messages_are_forgotten_where_the_context_is_full(chatty, capsys):
    talk = chat.Conversation(heedful.load(chatty), "Be brief.", {"max_tokens": 2, "seed": 1})
    for _ in range(6):
        "".join(talk.answer("What is red? A rose is red. " * 2))
    assert len(talk.messages) < 12 and talk.messages[0]["role"] == "user"
    assert "the oldest 2 messages are forgotten" in capsys.readouterr().err


def test_the_first_model_with_a_template_chats(capsys, monkeypatch, tmp_path, chatty):
    monkeypatch.setattr("heedful.weights.resolve.shipped_models", lambda: {})
    monkeypatch.setattr("heedful.weights.catalog.pulled_models", lambda: {})
    assert main(["chat", "Hello"]) == 2
    assert "heedful pull smollm2-135m-instruct" in capsys.readouterr().err
    monkeypatch.setattr("heedful.weights.catalog.pulled_models", lambda: {"chatty": chatty})
    assert chat.default_chat_model() == "chatty"


def test_a_long_job_without_a_terminal_says_how_far_it_is(capsys):
    now = [0.0]
    lines = ProgressLines(100, "translator", clock=lambda: now[0])
    for _ in range(10):
        now[0] += 2
        lines.advance(4)
    assert capsys.readouterr().err.splitlines() == [
        "translator: 12 of 100 in 0:06, 0:44 left", "translator: 24 of 100 in 0:12, 0:38 left",
        "translator: 36 of 100 in 0:18, 0:32 left",
    ]  # fmt: skip
