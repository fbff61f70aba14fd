"""BLEU of translators on Multi30k's test 2016, greedy and with beams, as sacreBLEU and as the literature score it.

    python benchmarks/translation.py MODEL --from de --to en --texts ../shared/data [--device cuda]

The length penalty is the one of PENALTIES with the best sacreBLEU on the validation captions (val); the test captions
are translated with it alone. Two scores of each:

    sacreBLEU    sacrebleu's defaults (13a, case counts) on the text as it stands; its signature is printed
    tokenized    what papers on Multi30k report: lower case, tokens of Moses' tokenizer on both sides, multi-bleu.perl's
                 BLEU, which is sacrebleu's without its own tokenizer and without smoothing. It needs `sacremoses`
                 (pip install sacremoses) and is left out without.

--pairs FILE.tsv.gz (source, target) measures on these instead, with a length penalty of 1, and says how many are
exactly right, and SQuAD's F1 over words: for the recipe translations, DATA/translations/test.tsv.gz; for t5-tasks,
DATA/tasks/test.tsv.gz, a task at a time by --prefix "correct:" (the sources that begin so).

--first N translates the first N captions alone; --json FILE writes the scores, --out FILE the translations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sacrebleu
import torch

import heedful
from heedful.evaluate.squad import answer_f1
from heedful.loaded import Loaded

PENALTIES = (0.6, 1.0, 1.4, 1.8)


def read_captions(texts: Path, part: str, language: str, first: int | None) -> list[str]:
    with gzip.open(texts / f"multi30k/{part}.{language}.gz", "rt", encoding="utf-8") as file:
        return [line.strip() for line in file.read().splitlines()][:first]


def moses_tokenizer(language: str) -> Callable[[str], str] | None:
    """Lower-cased text as tokens of Moses' tokenizer with spaces between; None if sacremoses is not installed."""
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError:
        return None
    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return lambda text: str(tokenizer.tokenize(normalizer.normalize(text), return_str=True, escape=False)).lower()


def scores(said: list[str], references: list[str], language: str) -> dict[str, Any]:
    """Every score of translations, in points."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    found: dict[str, Any] = {
        "sacrebleu": bleu.corpus_score(said, [references]).score,
        "signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(said, [references]).score,
    }
    tokens = moses_tokenizer(language)
    if tokens is not None:
        plain = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
        found["tokenized"] = plain.corpus_score([tokens(t) for t in said], [[tokens(t) for t in references]]).score
    return found


def told(found: dict[str, Any]) -> str:
    tokenized = f"{found['tokenized']:.2f}" if "tokenized" in found else "(needs sacremoses)"
    return f"sacreBLEU {found['sacrebleu']:.2f}, tokenized lower-case BLEU {tokenized}, chrF {found['chrf']:.2f}"


def measure(model: Loaded, options: argparse.Namespace) -> dict[str, Any]:
    """Scores of greedy search and of beams, the length penalty chosen on validation data."""

    def captions(part: str, language: str) -> list[str]:
        return read_captions(options.texts, part, language, options.first)

    source, target = options.source, options.target
    chosen: dict[float, float] = {}
    for penalty in PENALTIES:
        said = model.translate(captions("val", source), beams=options.beams, length_penalty=penalty)
        chosen[penalty] = scores(said, captions("val", target), target)["sacrebleu"]
        print(f"val, {options.beams} beams, length penalty {penalty}: sacreBLEU {chosen[penalty]:.2f}", flush=True)
    best = max(chosen, key=lambda penalty: chosen[penalty])
    results: dict[str, Any] = {"model": model.name, "pair": f"{source}-{target}", "val": chosen, "penalty": best}
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"beams": 1},
        "beams": {"beams": options.beams, "length_penalty": best},
    }
    for name, how in settings.items():
        began = time.perf_counter()
        said = model.translate(captions("test_2016_flickr", source), **how)
        seconds = time.perf_counter() - began
        results[name] = scores(said, captions("test_2016_flickr", target), target) | {"seconds": round(seconds, 1)}
        print(f"test 2016, {name} {how}: {told(results[name])} in {seconds:.0f} s", flush=True)
    print(results["beams"]["signature"])
    if options.out:
        options.out.write_text("".join(f"{line}\n" for line in said), encoding="utf-8")
    return results


def measure_pairs(model: Loaded, options: argparse.Namespace) -> dict[str, Any]:
    """Scores on a table of sources and targets."""
    with gzip.open(options.pairs, "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file if line.startswith(options.prefix)][: options.first]
    if not pairs:
        raise SystemExit(f"no source of {options.pairs} begins with {options.prefix!r}")
    said, wanted = model.translate([source for source, _ in pairs], beams=options.beams), [t for _, t in pairs]
    found = scores(said, wanted, options.target)
    found["exact"] = sum(a == b for a, b in zip(said, wanted, strict=True)) / len(pairs)
    found["f1"] = sum(answer_f1(a, b) for a, b in zip(said, wanted, strict=True)) / len(pairs)
    found["copied"] = sum(source.removeprefix(options.prefix).strip() == t for source, t in pairs) / len(pairs)
    shares = f"{found['exact']:.1%} exactly right (a copy of the source: {found['copied']:.1%}), F1 {found['f1']:.1%}"
    print(f"{len(pairs)} sentences, {options.beams} beams: {told(found)}, {shares}")
    print(found["signature"])
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model or a run")
    parser.add_argument("--from", dest="source", default="de", choices=("de", "en"))
    parser.add_argument("--to", dest="target", default="en", choices=("de", "en"))
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--texts", type=Path, help="the folder with multi30k")
    data.add_argument("--pairs", type=Path, help="a .tsv.gz of sources and targets instead")
    parser.add_argument("--prefix", default="", help="with --pairs: only the sources that begin with this")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, help="translate so many captions only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="where the translations with beams are written, a line each")
    options = parser.parse_args()
    model = heedful.load(options.model, device=options.device, dtype=torch.float32)
    results = measure_pairs(model, options) if options.pairs else measure(model, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
