"""docs/serving.md: its metrics and routes are those of the server, and the harness works as it says.

tests/docs runs its examples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from support.documents import blocks, commands, read
from support.serving import Client, serving

PAGE = "docs/serving.md"
PLACE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def documented(folder) -> Iterator[Client]:
    """The models of the page; a small one stands for SmolLM2."""
    with serving("shakespeare", "bert-books", f"smollm2={folder}") as found:
        yield found


def test_the_harness(documented, folder):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    found = [words for code in blocks(PAGE, "sh") if "curl" not in code for words in commands(code)]
    (words,) = [words for words in found if words[0] == "lm_eval"]
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
