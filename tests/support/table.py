"""The parity table of RESULTS.md: `make parity` prints it, every number measured as the tests measure it."""

from __future__ import annotations

import sys

from rich.progress import track

from support import measure
from support.families import CASES

COLUMNS = ("logits", "loss", "gradients", "greedy", "cached", "round trip")


def row(case) -> list[str]:
    def shown(value: float) -> str:
        return f"{value:.1e}" if value else "0"

    speaks = case.generates
    return [
        shown(measure.logits(case)),
        shown(measure.loss(case)),
        shown(measure.gradients(case)),
        f"{measure.greedy_ids(case)} differ" if speaks else "",
        shown(measure.cached(case)) if speaks else "",
        shown(measure.round_trip(case)) if case.exports else "own layout",
    ]


def main() -> None:
    print(f"| family | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for case in track(CASES, description="parity", disable=not sys.stderr.isatty()):
        print(f"| {case.name} | {' | '.join(row(case))} |", flush=True)


if __name__ == "__main__":
    main()
