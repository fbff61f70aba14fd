"""Preference training of two models that ship, sums by GRPO and chat by DPO: scores before and after, by seed.

python benchmarks/preference.py                       grpo-sums and dpo-chat, three seeds each
python benchmarks/preference.py --seeds 1 --recipes grpo-sums

`right` is the share of 800 held-out sums that are right, generated greedily and at temperature 1; `polite` the share of
greedy answers to 16 new questions that begin and end politely. The other scores are those of the runs' validation data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import heedful
from heedful.data.samples import sample_file
from heedful.loaded import Loaded
from heedful.recipes import train

PLACES = ("Lisbon", "Warsaw", "Athens", "Quito")  # none of them in the data
PEOPLE = (("Olga", "miner"), ("Jamal", "tailor"), ("Greta", "farmer"), ("Ivan", "nurse"))


def right(loaded: Loaded) -> str:
    """The share of the held-out sums that are right."""
    rows = [json.loads(line) for line in sample_file("sample:sums-test").read_text().splitlines()]
    asked, shares = [row["prompt"] for row in rows], []
    for temperature in 0.0, 1.0:
        said = loaded.generate(asked, temperature=temperature, max_tokens=5, seed=0)
        shares.append(sum(text.strip() == row["answer"] for text, row in zip(said, rows, strict=True)) / len(rows))
    return "right {:.3f} greedy, {:.3f} sampled".format(*shares)


def polite(loaded: Loaded) -> str:
    """The share of polite answers to new questions."""
    asked = [f"{who} is a {job} in {where}. What does {who} do?" for who, job in PEOPLE for where in PLACES]
    said = [loaded.generate(question, chat=True, temperature=0, max_tokens=40) for question in asked]
    kind = [text.startswith(("Of course!", "With pleasure!")) and text.rstrip().endswith(("?", "!")) for text in said]
    return f"polite {sum(kind) / len(kind):.3f}, as {said[0]!r}"


RECIPES = {"grpo-sums": ("sums", right), "dpo-chat": ("chat", polite)}


def main() -> None:
    """Train, and print a row for each recipe and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    for recipe in options.recipes:
        base, score = RECIPES[recipe]
        print(f"{base}: {score(heedful.load(base))}", flush=True)
        for seed in range(1, options.seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                began, run = time.process_time(), Path(folder) / "run"
                tuned = train(recipe, {"train": {"seed": seed}, "log": {"samples": False}}, folder=run, quiet=True)
                seconds = time.process_time() - began
                found = json.loads((run / "summary.json").read_text())
            before, after = found["metrics_before"], found["metrics"]
            scores = ", ".join(f"{name.replace('_', ' ')} {before[name]:.3f} -> {after[name]:.3f}" for name in after)
            print(f"{recipe}, seed {seed}: {score(tuned)}; {scores}; {seconds:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
