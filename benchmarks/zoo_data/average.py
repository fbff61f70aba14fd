"""The weighted mean of two models' weights, one of which goes on from the other (Wortsman et al. 2022).

    python benchmarks/zoo_data/average.py runs/bert-books runs/bert-wiki 0.55 FOLDER

bert-books reads old books, bert-wiki went on with Wikipedia and forgot much of them. The mean knows both nearly as well
as each its own: this is the one that ships as bert-books. 0.55 is the share of the second; int8 is written.
"""

from __future__ import annotations

import sys

import torch

import heedful


def main() -> None:
    first, second, share, folder = sys.argv[1:5]
    kept, other = (heedful.load(name, dtype=torch.float32) for name in (first, second))
    theirs = dict(other.model.named_parameters())
    with torch.no_grad():
        for name, p in kept.model.named_parameters():
            p.lerp_(theirs[name], float(share))
    kept.save(folder, quantize="int8")


if __name__ == "__main__":
    main()
