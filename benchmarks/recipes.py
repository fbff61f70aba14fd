"""Runs every recipe that ships, unchanged: final metrics and duration.

    HEEDFUL_DATA=FOLDER python benchmarks/recipes.py OUT [NAME ...]

Each is `heedful train NAME --out OUT/NAME`; existing runs are not repeated. The time is that of the whole command,
without cached data.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from heedful.train.recipe import shipped_recipes

FOR_A_GPU = ("chat", "shakespeare")


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:] or [n for n in shipped_recipes() if n not in FOR_A_GPU]
    for name in names:
        folder, seconds = out / name, 0.0
        if not folder.exists():
            with tempfile.TemporaryDirectory() as cache:
                begin = time.perf_counter()
                command = [
                    sys.executable,
                    "-m",
                    "heedful.cli",
                    "train",
                    name,
                    "--out",
                    str(folder),
                    "--quiet",
                ]
                done = subprocess.run(["env", f"XDG_CACHE_HOME={cache}", *command], capture_output=True, text=True)
                seconds = time.perf_counter() - begin
            (out / f"{name}.seconds").write_text(str(seconds))
            if done.returncode:
                print(f"{name:<16} failed: {done.stderr.strip()[-500:]}", flush=True)
                continue
        seconds = float((out / f"{name}.seconds").read_text())
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        scores = [line for line in lines if line["kind"] == "validation"]
        best = min(scores, key=lambda line: line["loss"])
        told = {k: v for k, v in best.items() if isinstance(v, float) and k not in ("loss", "seconds")}
        rest = "  ".join(f"{k} {v:.4g}" for k, v in told.items())
        print(f"{name:<16} loss {best['loss']:.4f} at {best['step']:>5}  {seconds:6.0f} s  {rest}", flush=True)


if __name__ == "__main__":
    main()
