"""LAMBADA and PIQA by lm-evaluation-harness, in process and over HTTP, compared with published scores.

    python benchmarks/harness.py [MODEL] [--limit N] [--data FOLDER] [--only process|http]

MODEL is SmolLM2-135M-Instruct (`heedful pull` it) unless given. The tasks are lm_eval's own
definitions on the rows in FOLDER (lambada_test_openai.jsonl.gz, piqa.jsonl.gz). In process: HarnessModel on our engine.
Over HTTP: `heedful serve` in its own process, with lm_eval's local-completions as client. Both must give identical
results. `--limit 50` takes some minutes with SmolLM2 on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.weights.catalog import pulled_models

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

TASKS = ("lambada_openai", "piqa")
SHOWN = {"lambada_openai": ("acc", "perplexity"), "piqa": ("acc", "acc_norm")}
ITEMS = 8  # prompts per request
# lm_eval, no shots, full precision. Instruct: the base line that https://huggingface.co/lldois/
# SmolLM2-135M-Reasoning-SLERP-Champion reports. GPT-2: lm-evaluation-harness issue 2159. Ours is quantized to 4 bits.
PUBLISHED = {
    ("piqa", "acc_norm"): "66.92 SmolLM2-135M-Instruct",
    ("lambada_openai", "acc"): "32.56 GPT-2 124M",
    ("lambada_openai", "perplexity"): "40.06 GPT-2 124M",
}


def find_smollm2() -> str:
    if "smollm2-135m-instruct" not in pulled_models():
        sys.exit("SmolLM2 is not here: `heedful pull smollm2-135m-instruct`, or give a MODEL")
    return str(pulled_models()["smollm2-135m-instruct"])


@contextmanager
def run_server(model: str) -> Iterator[str]:
    """Run a server; the context's value is its address."""
    command = [sys.executable, "-m", "heedful", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert found, "the server did not start"
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def evaluate_task(model: Any, task: Any, limit: int | None) -> tuple[dict[str, float], list[Any], float]:
    """lm_eval's metrics, the results of every item, and the seconds it took."""
    from lm_eval.evaluator import evaluate

    began, name = time.monotonic(), task.config.task
    found = evaluate(lm=model, task_dict={name: task}, limit=limit, bootstrap_iters=0, log_samples=True)
    items = [sample["filtered_resps"] for sample in found["samples"][name]]
    results = {key.partition(",")[0]: value for key, value in found["results"][name].items() if "stderr" not in key}
    return results, items, time.monotonic() - began


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?")
    options.add_argument("--limit", type=int)
    options.add_argument("--data", type=Path, default=Path("../shared/data/lm-benchmarks"))
    options.add_argument("--only", choices=["process", "http"])
    given = options.parse_args()

    from lm_eval.models.openai_completions import LocalCompletionsAPI

    import heedful
    from heedful.evaluate.harness import HarnessModel, local_task
    from heedful.kernels.accelerate import accelerate_as_stored

    name = given.model or find_smollm2()
    loaded = heedful.load(name)
    accelerate_as_stored(loaded.model)  # as the server does
    ours = HarnessModel(loaded)
    print(f"{loaded.name}, {given.limit or 'all'} items, {os.cpu_count()} cores")
    print("| task | metric | in process | over HTTP | published |\n|---|---|---|---|---|")
    differ = False
    for task in TASKS:
        found: dict[str, tuple[dict[str, float], list[Any], float]] = {}
        if given.only != "http":
            found["process"] = evaluate_task(ours, local_task(task, given.data), given.limit)
        if given.only != "process":
            with run_server(name) as url:
                http = LocalCompletionsAPI(
                    base_url=f"{url}/v1/completions",
                    model=json.loads(_get(f"{url}/v1/models"))["data"][0]["id"],
                    batch_size=ITEMS,
                    max_length=ours.max_length,
                    tokenizer_backend="remote",
                )
                found["http"] = evaluate_task(http, local_task(task, given.data), given.limit)
        for metric in SHOWN[task]:
            cells = [_format(found[mode][0][metric], metric) if mode in found else "" for mode in ("process", "http")]
            print(f"| {task} | {metric} | {' | '.join(cells)} | {PUBLISHED.get((task, metric), '')} |")
        took = [f"{found[mode][2]:.0f}" if mode in found else "" for mode in ("process", "http")]
        print(f"| {task} | seconds | {' | '.join(took)} | |")
        if len(found) == 2:
            differ |= found["process"][:2] != found["http"][:2]
    if differ:
        print("over HTTP is NOT the same as in process to the last digit")
    return int(differ)


def _format(value: float, metric: str) -> str:
    return f"{value:.2f}" if metric == "perplexity" else f"{100 * value:.2f}"


def _get(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url) as response:
        return bytes(response.read())


if __name__ == "__main__":
    sys.exit(main())
