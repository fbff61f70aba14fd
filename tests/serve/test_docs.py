"""docs/serving.md: every example is run, every command and metric exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.cli import parse_arguments
from support.serving import Client, serving

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PLACE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def documented(folder) -> Iterator[Client]:
    """The models of the page; a small one stands for SmolLM2."""
    with serving("shakespeare", "bert-books", f"smollm2={folder}") as found:
        yield found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "bash"])
def test_commands(documented, code):
    script = "set -euo pipefail\nexport HEEDFUL_API_KEY=sk-secret\n" + code.replace(PLACE, documented.url)
    script = script.replace("curl ", "curl --silent --show-error --fail --noproxy '*' ")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_programs(documented, code):
    needed = re.findall(r"^from (openai|langchain_openai|lm_eval)", code, re.MULTILINE)
    for package in needed:
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code.replace(PLACE, documented.url)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def started() -> list[str]:
    lines = "".join(code for kind, code in BLOCKS if kind == "sh").replace("\\\n", " ").splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("line", [line for line in started() if "heedful serve" in line])
def test_ways_to_start(line):
    _, options = parse_arguments(shlex.split(line.partition("heedful ")[2]))
    assert options.models or options.model


def test_the_harness(documented, folder):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    (line,) = [line for line in started() if line.startswith("lm_eval")]
    given = shlex.split(line)[shlex.split(line).index("--model_args") + 1]
    given = given.replace(PLACE, documented.url).replace("FOLDER", str(folder))
    http = LocalCompletionsAPI.create_from_arg_string(given)
    assert http.loglikelihood([Instance("loglikelihood", {}, ("the old", " dog"), 0)])[0][0] < 0


def test_metrics(documented):
    documented.complete(model="shakespeare", prompt="a", max_tokens=1)
    told = set(re.findall(r"`(heedful_\w+)`", PAGE.read_text(encoding="utf-8")))
    lines = documented.get("/metrics").text.splitlines()
    there = {
        line.split()[2] for line in lines if line.startswith("# TYPE") and not line.split()[2].endswith("_created")
    }
    assert told == there


def test_the_readme_points_to_it():
    assert "docs/serving.md" in (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
