"""The command line as a person uses it: real processes, their output and exit codes."""

from __future__ import annotations

import io
import json
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import heedful
from heedful import paths
from heedful.cli import main
from heedful.cli.models import short_count
from heedful.kernels.cpu.library import status
from heedful.models.base import Batch
from heedful.paths import cache_folder
from heedful.text import Tokenizer
from heedful.text.plural import counted
from heedful.zoo import FOLDER, cards


def heedful_command(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "heedful", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin)


def says(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_these_answer_without_torch():
    code = """
import sys
from heedful.cli import main
for arguments in ["--help"], ["models"], ["info", "gpt3-175b"], ["merges", "aab"]:
    try:
        main(arguments)
    except SystemExit:
        pass
    print("\\nimported" if "torch" in sys.modules else "\\nnot yet")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines().count("not yet") == 4
    for words in ("usage: heedful", "shakespeare", "174,604,259,328", "aab"):
        assert words in out


def test_models_lists_what_ships_and_every_family(capsys):
    out = says(capsys, "models")
    assert "nats per character" in out and "heedful pull NAME" in out and "gpt3-175b" not in out
    assert len(out.splitlines()) < 60
    out = says(capsys, "models", "--sizes")
    assert "gpt3-175b" in out and "175B" in out
    assert "gpt2" not in says(capsys, "models", "t5")
    listed = json.loads(says(capsys, "models", "--json"))
    assert {model["name"] for model in listed["shipped"]} == set(cards())
    assert all(score["command"] for model in listed["shipped"] for score in model["scores"])


def test_info_of_a_model_that_ships_has_its_card(capsys):
    out = says(capsys, "info", "tiny")
    for word in ("score", "kept apart", "licence", "good at", "fails at"):
        assert f"\n{word}" in out


def test_info_of_a_published_size(capsys):
    out = says(capsys, "info", "gpt3-175b")
    assert "174,604,259,328" in out and "2,048" in out and "bfloat16 349 GB" in out
    assert "n_layers      96" in out and "d_model       12288" in out


def test_info_without_a_model_says_what_runs_here(capsys):
    out = says(capsys, "info")
    assert f"PyTorch {torch.__version__}" in out and str(status()).removeprefix("C kernels: ") in out
    assert f"threads      {torch.get_num_threads()}" in out and "cache " in out
    assert "GPU kernels  none" in out or torch.cuda.is_available()


def test_info_of_a_model_that_ships(capsys):
    out = says(capsys, "info", "shakespeare")
    assert "2,731,392" in out and "256 positions" in out
    out = says(capsys, "info", "translator")
    assert all(line.split() for line in out.splitlines()) and "scale_embedding True" in " ".join(out.split())


def test_fill_has_a_default_model_and_reads_mask_tokens(capsys):
    """The sentence as BERT's page has it, from which a newcomer copies it."""
    blank = says(capsys, "fill", "In Texas, they like to buy [MASK].", "-n", "3")
    assert blank == says(capsys, "fill", "bert-books", "In Texas, they like to buy _.", "-n", "3")


def test_tokenize_without_a_model(capsys):
    assert main(["tokenize", "Hello world"]) == 0
    out, errors = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == [
        str(i) for i in Tokenizer.from_folder(FOLDER / "books").encode("Hello world")
    ]
    assert errors == "tokenizer of books; for another: heedful tokenize MODEL TEXT\n"
    assert main(["tokenize", "tiny"]) == 2
    assert capsys.readouterr().err == "heedful: which text? heedful tokenize tiny TEXT\n"


def test_counts_agree_with_their_nouns(capsys):
    out = says(capsys, "models")
    assert re.search(r"gpt_j +1 size  ", out) and re.search(r"gpt +13 sizes  ", out)
    assert (counted(1, "class", "classes"), counted(2000, "class", "classes")) == ("1 class", "2,000 classes")


def test_merges_shows_the_lectures_example(capsys):
    out = says(capsys, "merges", "aaabdaaabac")
    assert [line.split("\t")[0] for line in out.splitlines()] == ["aaabdaaabac", "Z=aa", "Y=ab", "X=ZY"]
    assert out.strip().endswith("XdXac")


def test_generate_continues_the_prompt_and_a_seed_repeats_it(capsys):
    arguments = ("generate", "shakespeare", "ROMEO:", "--max-tokens", "30", "--seed", "3")
    first, second = heedful_command(*arguments), says(capsys, *arguments)
    assert first.returncode == 0 and first.stderr == ""
    assert first.stdout.startswith("ROMEO:") and len(first.stdout) == len("ROMEO:") + 30 + 1
    assert second == first.stdout


def test_generate_without_a_prompt_is_a_loop():
    out = heedful_command("generate", "shakespeare", "--max-tokens", "5", stdin="To be\nOr not\n")
    assert out.returncode == 0 and out.stderr == ""
    assert "To be" in out.stdout and "Or not" in out.stdout


def loop(capsys, monkeypatch, lines: str) -> str:
    """What is printed when these lines are typed."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["generate", "shakespeare"]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    return out


def test_the_loop_can_be_told_how_to_answer(capsys, monkeypatch):
    lines = "/set max_tokens 3\n/set seed 1\n/settings\nTo be\n/nonsense\n/set nothing 1\n/quit\n"
    out = loop(capsys, monkeypatch, lines)
    assert "max_tokens = 3" in out and "seed = 1" in out
    assert "/set NAME VALUE, where NAME is one of max_tokens" in out
    spoken = next(line for line in out.splitlines() if "To be" in line)
    assert len(spoken.removeprefix("> ")) <= len("To be") + 3


def test_json_says_everything(capsys):
    out = says(
        capsys, "generate", "shakespeare", "To be", "--json", "--n", "2", "--logprobs", "2", "--echo",
        "--max-tokens", "4", "--seed", "1", "--top-p", "0.9", "--logit-bias", "5=1.5,6=-2", "--stop", "zzz",
    )  # fmt: skip
    result = json.loads(out)
    assert [c["index"] for c in result["choices"]] == [0, 1]
    for choice in result["choices"]:
        assert choice["finish_reason"] == "length" and len(choice["tokens"]) == 4
        assert "".join(s["text"] for s in choice["scores"]) == choice["text"].removeprefix("To be")
        assert all(len(s["top"]) >= 2 for s in choice["scores"])
    assert result["prompt_scores"][0] is None and len(result["prompt_scores"]) == 5


def test_log_probabilities_are_printed_without_json_too(capsys):
    arguments = ("generate", "shakespeare", "To be", "--n", "2", "--logprobs", "1", "--max-tokens", "3", "--seed", "1")
    plain, result = says(capsys, *arguments).splitlines(), json.loads(says(capsys, *arguments, "--json"))
    assert len(plain) == 2 * 4 + 1  # a text and three tokens each, a line between
    for score, line in zip(result["choices"][1]["scores"], plain[-3:], strict=True):
        number, rest = line.split(maxsplit=1)
        assert float(number) == pytest.approx(score["logprob"], abs=1e-3) and rest.startswith(json.dumps(score["text"]))
        assert json.dumps(score["top"][0]["text"]) in rest


def test_beams_search_and_their_scores_are_told(capsys):
    arguments = ("generate", "shakespeare", "ROMEO:", "--beams", "3", "--max-tokens", "12")
    plain = says(capsys, *arguments)
    result = json.loads(says(capsys, *arguments, "--n", "3", "--length-penalty", "0", "--json"))
    scores = [choice["score"] for choice in result["choices"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert plain == f"ROMEO:{result['choices'][0]['text']}\n"  # all are as long: the penalty changes nothing


def test_a_draft_says_the_same(capsys):
    arguments = ("generate", "shakespeare", "To be, or", "--max-tokens", "30", "--temperature", "0")
    plain = says(capsys, *arguments)
    for draft in ("lookup", "shakespeare"):
        assert says(capsys, *arguments, "--draft", draft) == plain


def test_the_loop_can_search(capsys, monkeypatch):
    lines = "/set beams 3\n/set max_tokens 9\nTo be\n/set temperature 0.5\nTo be\n/set temperature\nTo be\n"
    lines += "/set beams\n/set draft lookup\n/set early_stopping no\n/set draft nowhere\n/settings\n"
    out = loop(capsys, monkeypatch, lines)
    said = [line.removeprefix("> ") for line in out.splitlines() if line.startswith("> To be")]
    assert len(said) == 2 and said[0] == said[1]
    assert "[beam search and temperature do not go together" in out
    assert "[early_stopping is 'no'" in out and "[no model, folder or file is called 'nowhere'" in out
    assert "draft = lookup" in out and "temperature = 0.8" in out


def test_export_writes_what_loads_again(tmp_path, capsys):
    says(capsys, "export", "shakespeare", str(tmp_path / "copy"), "--dtype", "float32")
    ours, again = heedful.load("shakespeare", dtype=torch.float32), heedful.load(tmp_path / "copy")
    for (name, a), (_, b) in zip(ours.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.tokenizer.encode("To be") == ours.tokenizer.encode("To be")


def test_export_in_int4_calibrated(tmp_path, capsys):
    """Its predictions are nearer to the model's than those of weights rounded to the nearest."""
    text = (Path(__file__).parents[2] / "src/heedful/lessons/plays.txt").read_text()
    (tmp_path / "text.txt").write_text(text[:30_000])
    batch = Batch(torch.tensor(heedful.load("tiny-books").tokenizer.encode(text[40_000:42_000])[:448]).view(7, 64))
    exact, error = heedful.load("tiny-books").model(batch).logits.log_softmax(-1), {}
    for name, more in {"nearest": [], "text": ["--calibrate-on", str(tmp_path / "text.txt")]}.items():
        told = says(capsys, "export", "tiny-books", str(tmp_path / name), "--dtype", "int4", *more)
        assert ("24 layers were rounded with" in told) == (name != "nearest")
        found = heedful.load(tmp_path / name).model(batch).logits.log_softmax(-1)
        error[name] = torch.nn.functional.kl_div(found, exact, log_target=True, reduction="batchmean").item()
    assert error["text"] < 0.7 * error["nearest"]
    assert main(["export", "tiny-books", str(tmp_path / "x"), "--calibrate-on"]) == 2
    assert "add --dtype int4" in capsys.readouterr().err


def test_a_tokenizer_is_trained_and_used(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, the cat sat\n" * 50)
    out = str(tmp_path / "bpe")
    says(capsys, "train-tokenizer", str(text), "--vocab-size", "280", "--out", out)
    assert "cat" in says(capsys, "tokenize", out, "the cat")


def test_a_tokenizer_of_every_kind_has_at_most_the_size_asked_for(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i:03}" for i in range(600)) + "\n")
    for kind in ("wordpiece", "unigram", "words", "characters"):
        folder = tmp_path / kind
        said = says(capsys, "train-tokenizer", str(text), "--kind", kind, "--vocab-size", "300", "--out", str(folder))
        n = int(said.split()[0])
        assert n == len(Tokenizer.from_folder(folder)) <= 300 and (kind != "words" or n == 300)
        assert ("no more to learn" in said) == (n < 300)
    assert "259 tokens" in says(capsys, "train-tokenizer", "--kind", "bytes", "--out", str(tmp_path / "bytes"))
    assert "Ã" in says(capsys, "tokenize", str(tmp_path / "bytes"), "é")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"\0" * 2_000_000, "NUL"), (bytes(range(128, 256)) + b"\0", "not text")]
)
def test_a_tokenizer_is_not_trained_on_what_is_no_text(content, words, tmp_path, capsys):
    file, out = tmp_path / "file.txt", tmp_path / "out"
    file.write_bytes(content)
    assert main(["train-tokenizer", str(file), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heedful: {file}") and words in error and error.count("\n") == 1 and not out.exists()


def test_special_tokens_in_a_prompt_are_told_and_allowed(capsys):
    arguments = ["generate", "shakespeare", "ROMEO<unk>", "--max-tokens", "1", "--json", "--echo", "--logprobs", "0"]
    assert main(arguments) == 0
    plain, errors = capsys.readouterr()
    assert errors == "heedful: <unk> is read as text; as a special token with --allow-special\n"
    assert main([*arguments, "--allow-special"]) == 0
    allowed, errors = capsys.readouterr()
    assert errors == "" and [len(json.loads(text)["prompt_scores"]) for text in (plain, allowed)] == [10, 6]


def test_merges_of_a_file_and_of_a_trained_tokenizer(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, the cat sat\n" * 50)
    out = says(capsys, "merges", str(text), "--max-merges", "2")
    assert out.splitlines()[0] == "Z=at\t250 times" and "1,800 characters became" in out.splitlines()[-1]
    bpe = str(tmp_path / "bpe")
    says(capsys, "train-tokenizer", str(text), "--vocab-size", "280", "--out", bpe)
    assert says(capsys, "merges", "--tokenizer", bpe, "--max-merges", "1").splitlines()[0] == "      1  a + t = at"
    assert says(capsys, "merges", "--tokenizer", bpe, "sat").splitlines()[0].split() == ["s", "a", "t"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "gpt2-medum"], "gpt2-medium"),
        (["generate", "gpt2", "x"], "heedful.create"),
        (["generate", "no/../where", "x"], "no/../where"),
        (["models", "gtp"], "gpt"),
        (["generate", "shakespeare", "x", "--temperature", "-1"], "temperature"),
        (["generate", "shakespeare", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "shakespeare", "x", "--beams", "2", "--top-k", "3"], "top_k"),
        (["generate", "shakespeare", "x", "--length-penalty", "2"], "beams=2"),
        (["generate", "shakespeare", "x", "--draft", "lookup", "--logprobs", "1"], "logprobs"),
        (["train-tokenizer", "missing.txt", "--out", "nowhere"], "there is no file or folder missing.txt"),
        (["train-tokenizer", "--out", "nowhere"], "which text?"),
        (["train-tokenizer", "--kind", "bytes", "--vocab-size", "300", "--out", "nowhere"], "259 tokens"),
        (["merges"], "which text?"),
        (["merges", "a", "--tokenizer", "bert-books"], "a WordPiece has no merges"),
    ],
)
def test_a_mistake_is_one_line_that_helps(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("heedful: ") and words in error and "Traceback" not in error


def test_counts_read_well():
    assert [short_count(n) for n in (999, 1234, 124_439_808, 174_604_259_328)] == ["999", "1.23k", "124M", "175B"]


# --- mistakes, and what the system refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generat tiny x", "'generat' is none of .*did you mean generate"),
        ("generate tiny x --temprature 0.5", "heedful generate: .* --temprature .did you mean --temperature"),
        ("generate tiny x --temprature=0.5", "did you mean --temperature"),
        ("train my.txt --stes 4", "heedful train: .*did you mean --set"),
        ("show tiny x --what atention", "did you mean attention"),
        ("generate tiny --max-tokens x", "argument --max-tokens: invalid int value"),
        ("generate", "arguments are required: model"),
        ("--verison", "heedful: .* --verison .did you mean --version"),
    ],
)  # fmt: skip
def test_a_misspelled_argument_is_one_line_with_the_nearest(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    out, errors = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and errors.count("\n") == 1
    assert re.search(words, errors) and "--help` says more" in errors


def test_a_misspelled_family_or_option_has_the_nearest(capsys, monkeypatch):
    assert main(["models", "lama"]) == 2 and "did you mean llama?" in capsys.readouterr().err
    assert "did you mean temperature?" in loop(capsys, monkeypatch, "/set temprature 1\n")
    with pytest.raises(ValueError, match=r"generation has no setting 'temprature' \(did you mean temperature"):
        heedful.load("tiny").generate("a", temprature=1)


def test_without_a_home_folder_the_cache_is_temporary(monkeypatch, capsys):
    """As in a container that runs under a user id of its own."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError, match="home directory"):
        Path.home()
    folder = cache_folder()
    assert folder.is_dir() and folder == cache_folder() and folder.stat().st_mode & 0o77 == 0
    assert str(folder) in says(capsys, "info")
    assert main(["generate", "~/nothing", "x"]) == 2
    assert "no model, folder or file is called '~/nothing'" in capsys.readouterr().err
    paths._temporary_cache().cleanup()
    paths._temporary_cache.cache_clear()


def test_a_closed_stdin_is_told(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "tiny"]) == 2
    assert "give one after the model" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("buffering", [1, -1])
def test_output_that_cannot_be_written_is_told(capfd, monkeypatch, buffering):
    with open("/dev/full", "w", buffering=buffering) as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert main(["models", "t5"]) == 1
        patch.undo()
    assert capfd.readouterr().err == "heedful: No space left on device\n"


def test_a_full_disk_is_told(tmp_path, capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("heedful.weights.save.save_file", full)
    assert main(["export", "tiny", str(tmp_path / "copy")]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("heedful: No space left on device: ") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
