"""docs/jobs.md: every command, program and request of it is run."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread, imsave

from heedful.cli import main, parse_arguments
from support.chats import write_chat_model
from support.documents import blocks, commands, read
from support.serving import serving

PAGE = "docs/jobs.md"
PLACE = "http://127.0.0.1:8000"
CHAT_MODEL = "smollm2-135m-instruct"
SERVED = ("translator", "sentiment", "entities", "reader", "bert-books", "digits-gpt")


@pytest.fixture(scope="module", autouse=True)
def workspace(tmp_path_factory):
    """A folder with the files that the page speaks of, and a small model in place of SmolLM2."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "captions.txt").write_text("Ein Hund.\n\nEine Frau singt.\n", encoding="utf-8")
    (folder / "reviews.txt").write_text("Good.\nBad.\n")
    (folder / "letters.txt").write_text("Mary Smith lives in Paris.\n")
    imsave(folder / "digit.png", np.eye(8), cmap="gray")
    write_chat_model(folder / CHAT_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.tasks.neighbours.MAX_WORDS", 300)
        patch.chdir(folder)
        yield folder


def test_the_commands_run(capsys, workspace, monkeypatch):
    monkeypatch.setattr("heedful.cli.chat.default_chat_model", lambda: CHAT_MODEL)
    monkeypatch.setattr("sys.stdin", None)
    ran = set()
    for words in (words for code in blocks(PAGE) for words in commands(code)):
        program, *arguments = words
        assert program == "heedful"
        parse_arguments(arguments)
        if arguments[0] == "pull" or arguments == ["chat"]:  # one needs a network, one a terminal
            continue
        more = ["--max-tokens", "4"] if arguments[0] == "chat" else []
        assert main([*arguments, *more]) == 0, (words, capsys.readouterr().err)
        ran.add(arguments[0])
    out = capsys.readouterr().out
    assert ran == {"translate", "classify", "tag", "answer", "chat", "embed", "neighbours", "complete-image"}
    assert "queen" in out and "[Paris](LOC)" in out and "A dog" in out
    assert imread(workspace / "completed.png").shape[:2] == (96, 9 * 96 + 8 * 4)
    assert np.load(workspace / "vectors.npy", allow_pickle=False).shape[0] == 2


def test_the_programs_run(capsys):
    exec(compile("\n".join(blocks(PAGE, "python")), PAGE, "exec"), {})
    out = capsys.readouterr().out
    assert "['queen', 'princess', 'empress']" in out and "torch.Size([2, 1, 8, 8])" in out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_requests_are_answered(workspace):
    with serving(*SERVED, str(workspace / CHAT_MODEL)) as server:
        script = "set -euo pipefail\n" + "\n".join(blocks(PAGE, "bash")).replace(PLACE, server.url)
        script = script.replace("curl ", "curl --silent --show-error --fail-with-body --noproxy '*' ")
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        routes = {path for path in server.get("/openapi.json").json()["paths"]}
    assert done.returncode == 0, done.stdout + done.stderr
    assert "queen" in done.stdout and '"pixel": 63' in done.stdout
    for path in ("/api/translate", "/api/neighbours", "/api/image/complete", "/v1/embeddings", "/v1/chat/completions"):
        assert path in routes and path in read(PAGE)
