"""README.md: its Python runs and its commands run, in a folder of their own and without a network."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from matplotlib.image import imsave

from heedful.cli import main, parse_arguments
from support.chats import CHATS, write_chat_model
from support.documents import ROOT, blocks, commands, read
from support.trainings import own_cache, write_story

# What a reader has, and its like here.
MODELS_OF_THE_HUB = {"sentence-transformers/all-MiniLM-L6-v2": "bert-books"}
PLACEHOLDERS = {
    "MODEL": "tiny",
    "CHAT_MODEL": "chatty",
    "RECIPE": "runs/my-1/recipe.toml",
}  # and FOLDER is a new one each time
# Commands that are only parsed: one needs an old checkpoint, one serves until it is stopped, one needs eight devices.
ONLY_PARSED = [["heedful", "convert"], ["heedful", "serve"], ["torchrun"]]
SHORT = [
    word
    for setting in ("train.steps=2", "train.batch_size=2", "train.eval_batches=1", "train.device=cpu", "data.length=16")
    for word in ("--set", setting)
]
CONLL = "Mary B-PER\nlives O\nin O\nParis B-LOC\n\nThe O\nold O\nman O\nsat O\n\n" * 8


@pytest.fixture(scope="module", autouse=True)
def workspace(tmp_path_factory):
    """A folder with the files that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    write_story(folder / "my.txt", 60)
    write_story(folder / "more.txt", 20, seed=2)
    write_chat_model(folder / "chatty")
    (folder / "chats.jsonl").write_text(CHATS)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(3):
            imsave(
                folder / "photos" / name / f"{i}.png", np.full((16, 16, 3), i * 40 + 100 * (name == "dog"), np.uint8)
            )
    for name in ("train.conll", "dev.conll"):
        (folder / name).write_text(CONLL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path_factory.mktemp("cache"))))
        patch.delenv("HEEDFUL_DATA", raising=False)
        patch.chdir(folder)
        yield folder


def test_the_python_runs(capsys):
    code = "\n".join(blocks("README.md", "python"))
    for name, like in MODELS_OF_THE_HUB.items():
        assert name in code
        code = code.replace(name, like)
    assert '"steps": 200' in code
    code = code.replace('"steps": 200', '"steps": 2')
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "ROMEO:" in out and "124439808" in out
    assert "torch.Size([1, 4, 10, 10])" in out


def given() -> list[list[str]]:
    """Every command of the README, in the text too, with what stands for the reader's own."""
    found = [words for code in blocks("README.md") for words in commands(code)]
    found += [words for line in re.findall(r"`(heedful [^`]*)`", read("README.md")) for words in commands(line)]
    likes = [PLACEHOLDERS | {"FOLDER": f"folder-{i}"} for i in range(len(found))]
    return [
        [like.get(word, word) for word in words] for words, like in zip(found, likes, strict=True) if words[0] != "make"
    ]


def only_parsed(words: list[str]) -> bool:
    return any(words[: len(start)] == start for start in ONLY_PARSED)


def test_the_commands_run(capsys, workspace, monkeypatch):
    """In the order of the page: later ones use what earlier ones wrote."""
    monkeypatch.setattr("sys.stdin", io.StringIO())  # `heedful generate` without a prompt asks for some
    ran = set()
    for words in given():
        if only_parsed(words):
            parse_arguments(words[words.index("heedful") + 1 :])
            continue
        assert words[0] == "heedful", words
        _, *arguments = words
        trains = arguments[0] == "train" and "--list" not in arguments and "--resume" not in arguments
        assert main([*arguments, *(SHORT if trains else [])]) == 0, (words, capsys.readouterr().err)
        ran.add(arguments[0])
    out = capsys.readouterr().out
    assert ran >= {
        "models",
        "pull",
        "info",
        "generate",
        "chat",
        "translate",
        "classify",
        "neighbours",
        "export",
        "tokenize",
        "merges",
        "show",
        "fill",
        "probe",
        "eval",
        "train",
        "estimate",
    }
    assert "The old house" in out and "XdXac" in out and "174,604,259,328" in out
    assert (workspace / "alignment.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(workspace.glob("folder-*/model.safetensors"))) == 2


def test_its_links_lead_somewhere():
    for page in (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
    ):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", read(page)):
            assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), (page, target)
    for target in re.findall(r"`((?:src|docs|tests|benchmarks)/[^`*]*)`", read("README.md")):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"^make (\w+)", read("README.md"), re.MULTILINE):
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target
