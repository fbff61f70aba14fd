"""CBOW's word vectors beside gensim's, on the same text, vocabulary, width, window and processor time.

    python benchmarks/word_vectors.py --text ../shared/data/books/train.txt.xz --gensim VENV/bin/python
    python benchmarks/word_vectors.py ... --megabytes 20 --seconds 300 --device cuda

VENV is a virtual environment with gensim, which also has the lists: WordSim-353, SimLex-999 (Spearman's correlation of
cosines with people's judgements, over the pairs whose words are known) and Google's analogies (3CosAdd, the share that
is right, over those whose words are known). Text is lower-cased; words are runs of letters. gensim trains with one
worker, negative sampling (5) and its defaults, as many epochs as fit; ours negative sampling too, as many steps as fit.
On a CPU the time is processor time, so that other work beside it does not count. Our settings were chosen with
`--skip 60 --half odd --seconds 20`; what is reported is `--half even` of the text's beginning.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from heedful.data.corpus import Corpus
from heedful.data.loader import BatchSampler
from heedful.data.neighbour_windows import CBOWWindows
from heedful.models.base import Batch
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.train.negative_sampling import NOISE_POWER
from heedful.train.objectives import cbow

LENGTH = 64  # words of a row
SOFTMAX_ROWS, SOFTMAX_RATE = 64, 0.02
NEIGHBOURS = ("king", "ship", "seven", "red", "paris", "walked")
GENSIM = """
import sys, time
from gensim.models import Word2Vec
from gensim.test.utils import datapath
path, out, width, window, seconds = sys.argv[1:4] + [int(sys.argv[4]), float(sys.argv[5])]
lines = [line.split() for line in open(path, encoding="utf-8")]
def train(epochs):
    began = time.process_time()
    model = Word2Vec(lines, sg=0, vector_size=int(width), window=window, min_count=1, workers=1, epochs=epochs, seed=0)
    return model, time.process_time() - began
model, once = train(1)
epochs = max(1, int(seconds / once))
model, took = train(epochs)
model.wv.save_word2vec_format(out)
print(epochs, took, datapath("wordsim353.tsv"), datapath("simlex999.txt"), datapath("questions-words.txt"), sep="\\t")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--gensim", required=True, help="a Python that has gensim")
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--skip", type=float, default=0, metavar="MEGABYTES", help="of the text, before these")
    parser.add_argument("--half", choices=["even", "odd"], help="of each list, every other known line")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--negatives", type=int, default=5)
    parser.add_argument("--subsample", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--softmax", action="store_true", help="also ours with a full softmax")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    words = read_words(given.text, int(given.megabytes * 1e6), int(given.skip * 1e6))
    known = [word for word, _ in Counter(words).most_common(given.vocabulary)]
    kept = set(known)
    words = [word for word in words if word in kept]
    print(f"{len(words):,} words, {len(known):,} different", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "text.txt", Path(folder) / "vectors.txt"
        text.write_text("\n".join(" ".join(words[i : i + 1000]) for i in range(0, len(words), 1000)), encoding="utf-8")
        command = [
            given.gensim,
            "-c",
            GENSIM,
            str(text),
            str(out),
            *map(str, (given.width, given.window, given.seconds)),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split("\t")
        lists = [Path(path) for path in told[2:]]
        theirs = read_vectors(out, known)
    report(f"gensim, {told[0]} epochs, {float(told[1]):.0f} s", theirs, known, lists, given.half)
    for negatives in (given.negatives, 0) if given.softmax else (given.negatives,):
        vectors, label = train(words, known, given, negatives)
        report(label, vectors, known, lists, given.half)


def read_words(path: Path, n_bytes: int, skip: int) -> list[str]:
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "rb") as file:
        file.read(skip)
        return re.findall(r"[^\W\d_]+", file.read(n_bytes).decode("utf-8", "ignore").lower())


def read_vectors(path: Path, known: list[str]) -> np.ndarray:
    """The vectors (V, E) of word2vec's text format, in the order of `known`."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        word, *numbers = line.split(" ")
        found[word] = np.array(numbers, dtype=np.float32)
    return np.stack([found[word] for word in known])


def train(words: list[str], known: list[str], given: argparse.Namespace, negatives: int) -> tuple[np.ndarray, str]:
    """Our vectors after the given time, and what was done: by negative sampling, or 0 by the full softmax."""
    place = {word: i for i, word in enumerate(known)}
    ids = [place[word] for word in words]
    data = CBOWWindows(Corpus.of([ids]), LENGTH, subsample=given.subsample if negatives else 0.0)
    rows, rate = (given.rows, given.rate) if negatives else (SOFTMAX_ROWS, SOFTMAX_RATE)
    torch.manual_seed(0)
    model = CBOW.create(CBOWConfig(len(known), given.width, given.window), device=given.device)
    counts = torch.bincount(torch.tensor(ids), minlength=len(known))
    model.init_unigram(counts.to(given.device), NOISE_POWER if negatives else 1.0)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.99), fused=True)
    order = BatchSampler(len(data), rows, seed=0)
    clock = time.process_time if given.device == "cpu" else time.perf_counter
    began, step = clock(), 0
    while (spent := (clock() - began) / given.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - spent)
        batch = on_device(data.batch(order(step), seed=0), given.device)
        optimizer.zero_grad()
        cbow(model, batch, negatives=negatives).mean.backward()
        optimizer.step()
        step += 1
    how = f"{negatives} negatives" if negatives else "softmax"
    took = clock() - began
    return model.vectors.cpu().numpy(), f"heedful, {how}, {step * rows / len(data):.2g} epochs, {took:.0f} s"


def on_device(batch: Batch, device: str) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, torch.Tensor)})


def report(label: str, vectors: np.ndarray, known: list[str], lists: list[Path], half: str | None) -> None:
    place = {word: i for i, word in enumerate(known)}
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    chosen = {None: slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}[half]
    told = [f"{label:<36}"]
    for path in lists[:2]:
        pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").lower().splitlines() if line[:1] != "#"]
        pairs = [p for p in pairs if len(p) >= 3 and p[0] in place and p[1] in place][chosen]
        cosines = [float(units[place[a]] @ units[place[b]]) for a, b, *_ in pairs]
        rho = spearmanr(cosines, [float(p[2]) for p in pairs]).statistic
        told.append(f"{path.stem} {rho:.3f} ({len(pairs)} pairs)")
    fours = [line.split() for line in lists[2].read_text(encoding="utf-8").lower().splitlines()]
    fours = [four for four in fours if len(four) == 4 and all(word in place for word in four)][chosen]
    right = 0
    for a, b, c, d in ([place[word] for word in four] for four in fours):
        scores = units @ (units[b] - units[a] + units[c])
        scores[[a, b, c]] = -np.inf
        right += int(scores.argmax() == d)
    n = len(fours)
    print(*told, f"analogies {right / max(n, 1):.1%} of {n}", sep="  ", flush=True)
    for word in NEIGHBOURS:
        if word in place:
            nearest = np.argsort(-units @ units[place[word]])[1:6]
            print(f"    {word}: {', '.join(known[i] for i in nearest)}", flush=True)


if __name__ == "__main__":
    main()
