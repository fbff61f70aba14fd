"""Follows a document as a reader would: its programs and commands one after another, in one folder, without a network.

Every `python` block of a page runs in one namespace, every line of its `sh` blocks is a command. What a reader has is
replaced by its like (STANDS_FOR, SHORTER), trainings are shortened (SHORT), and a few commands are parsed alone
(ONLY_PARSED). Blocks in other languages are data.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from heedful.cli import main, parse_arguments
from support.documents import ROOT, Block, read

ADDRESS = "http://127.0.0.1:8000"  # of the server, in the documents
STANDS_FOR = {
    "CHAT_MODEL": "chatty",
    "MODEL": "tiny",
    "RECIPE": "tiny",
    "HOST": "localhost",
    "sentence-transformers/all-MiniLM-L6-v2": "bert-books",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "chatty",
}  # and FOLDER is a new one each time
ON_PAGE = {  # where another model fits what the page does
    "docs/classifier.md": {"MODEL": "bert-books"},
    "docs/evaluation.md": {"MODEL": "sentiment"},
    "docs/inside.md": {"bias books": "bias tiny-books"},
}
DATA = {  # blocks that are files
    ("docs/batches.md", "json"): "requests.jsonl",
    ("docs/chat.md", "json"): "chats.jsonl",
    ("docs/generation.md", "json"): "person.json",
    ("docs/preference.md", "json"): "pairs.jsonl",
    ("docs/training.md", "toml"): "my-llama.toml",
}
SHORTER = {'{"steps": 200}': '{"steps": 2}'}  # in Python
SHORT = [
    word
    for setting in ("train.steps=2", "train.batch_size=2", "train.eval_batches=1", "train.device=cpu", "data.length=64")
    for word in ("--set", setting)
]
ONLY_PARSED = {
    r"(\w+=\S+ )?heedful serve": "serves until it is stopped",
    r"heedful chat$": "is a conversation in a terminal",
    r"heedful pull \S": "needs a network",
    r"heedful export .*--calibrate-on": "takes a minute; tests/cli/test_cli.py has a smaller model",
    r"heedful convert": "needs pickled weights; tests/weights has them",
    r"heedful train chat ": "needs a chat model to learn from",
    r"torchrun": "needs several processes or machines; tests/train starts two",
    r"heedful batch .*--ray": "needs a Ray cluster; tests/serve/test_ray.py starts one",
    r"(\w+=\S+ )?(serve|ray) ": "needs a Ray cluster; tests/serve/test_ray.py starts one",
    r"pip install": "needs a network",
    r"make": "is what started this test, or builds for minutes",
    r"lm_eval": "needs a network; tests/serve/test_docs.py calls what it calls",
    r"python benchmarks/": "needs real weights and a GPU",
}


class Reader:
    """Somebody who reads a page, in the folder of this process."""

    def __init__(self, page: str, address: str) -> None:
        self.page, self.address = page, address
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.done: Counter[str] = Counter()
        self.folders = 0

    def follow(self, block: Block) -> None:
        """Do what a block says; an exception or an AssertionError says which line failed."""
        if block.language == "python":
            exec(compile(self._like(block.code), f"{self.page}:{block.line}", "exec"), self.names)
            self.done["programs"] += 1
        elif block.language == "sh":
            self._commands(block)
            self.done["shell blocks"] += 1
        elif (self.page, block.language) in DATA:
            Path(DATA[self.page, block.language]).write_text(block.code, encoding="utf-8")

    def _like(self, text: str) -> str:
        """The text with what this reader has."""
        for name, like in (STANDS_FOR | ON_PAGE.get(self.page, {})).items():
            text = re.sub(rf"(?<![\w/]){re.escape(name)}(?![\w/])", like, text)
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        return text.replace(ADDRESS, self.address)

    def _commands(self, block: Block) -> None:
        code = self._like(block.code)
        lines = [code] if "curl " in code else code.replace("\\\n", " ").splitlines()  # JSON may have several
        for line in lines:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if any(re.match(start, " ".join(words)) for start in ONLY_PARSED):
                parse(words)
                self.done["commands that are only parsed"] += 1
                continue
            where = f"{self.page}, the block in line {block.line}: {line}"
            if "curl " in line or words[0] == "python" or {"|", ">"} & set(words):
                self._in_bash(line, where)
            else:
                assert words[0] == "heedful", where
                assert main(self._arguments(words[1:])) == 0, where
            self.done["commands"] += len(re.findall(r"^(?:curl|cat|heedful|python) ", line, re.MULTILINE))

    def _arguments(self, words: list[str]) -> list[str]:
        if words[0] == "train" and not {"--list", "--resume"} & set(words):
            return [*words, *SHORT]
        if words[0] == "chat":
            return [*words, "--max-tokens", "4"]
        self.folders += "FOLDER" in words
        return [f"folder-{self.folders}" if word == "FOLDER" else word for word in words]

    def _in_bash(self, code: str, where: str) -> None:
        script = code.replace("curl ", "curl --silent --show-error --fail-with-body --noproxy '*' ")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, "HEEDFUL_API_KEY": "sk-secret", "OMP_NUM_THREADS": "1"}
        words = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=given)
        assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
        print(done.stdout)


def parse(words: list[str]) -> None:
    """A command that is not run: its options exist, or its file."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+", word)]  # variables before the command
    if words[0] in ("heedful", "torchrun"):
        parse_arguments(words[words.index("heedful") + 1 :])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", read("Makefile"), re.MULTILINE), words
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), words
