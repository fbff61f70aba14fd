"""docs/serving.md: every example is run, every command and metric exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from heedful.cli import parse_arguments
from support.documents import blocks, commands, read
from support.serving import Client, serving

PAGE = "docs/serving.md"
PLACE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def documented(folder) -> Iterator[Client]:
    """The models of the page; a small one stands for SmolLM2."""
    with serving("shakespeare", "bert-books", f"smollm2={folder}") as found:
        yield found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("code", blocks(PAGE, "bash"))
def test_commands(documented, code):
    script = "set -euo pipefail\nexport HEEDFUL_API_KEY=sk-secret\n" + code.replace(PLACE, documented.url)
    script = script.replace("curl ", "curl --silent --show-error --fail --noproxy '*' ")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("code", blocks(PAGE, "python"))
def test_programs(documented, code, capsys):
    needed = re.findall(r"^from (openai|langchain_openai|lm_eval)", code, re.MULTILINE)
    for package in needed:
        pytest.importorskip(package, reason=f"{package} is not installed")
    exec(compile(code.replace(PLACE, documented.url), PAGE, "exec"), {})
    assert capsys.readouterr().out


STARTED = [words for code in blocks(PAGE, "sh") for words in commands(code)]


@pytest.mark.parametrize("words", [words for words in STARTED if "serve" in words], ids=" ".join)
def test_ways_to_start(words):
    _, options = parse_arguments(words[words.index("heedful") + 1 :])
    assert options.models or options.model


def test_the_harness(documented, folder):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    (words,) = [words for words in STARTED if words[0] == "lm_eval"]
    given = words[words.index("--model_args") + 1]
    given = given.replace(PLACE, documented.url).replace("FOLDER", str(folder))
    http = LocalCompletionsAPI.create_from_arg_string(given)
    assert http.loglikelihood([Instance("loglikelihood", {}, ("the old", " dog"), 0)])[0][0] < 0


def test_metrics(documented):
    documented.complete(model="shakespeare", prompt="a", max_tokens=1)
    told = set(re.findall(r"`(heedful_\w+)`", read(PAGE)))
    lines = documented.get("/metrics").text.splitlines()
    there = {
        line.split()[2] for line in lines if line.startswith("# TYPE") and not line.split()[2].endswith("_created")
    }
    assert told == there


def test_the_readme_points_to_it():
    assert "docs/serving.md" in read("README.md")


def test_the_playgrounds_routes_are_those_of_the_schema(documented):
    """By their first words: /api/steps/weights is found in the schema beside /api/steps."""
    schema = {"/".join(path.split("/")[:3]) for path in documented.get("/openapi.json").json()["paths"]}
    written = {"/".join(path.split("/")[:3]) for path in re.findall(r"/api/[\w/]+", read(PAGE))}
    assert written == {path for path in schema if path.startswith("/api/")}
