"""Translation: BLEU (Papineni et al. 2002) and chrF (Popovic 2015) by sacrebleu, with their signatures (Post 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from heedful.data.pairs import read_pairs
from heedful.evaluate.bootstrap import Metric
from heedful.evaluate.task import Item, LoadedModel, Record, Task


@dataclass(frozen=True)
class Translation(Task):
    """BLEU and chrF of a model's translations."""

    about: ClassVar[str] = "BLEU and chrF of translations, by sacrebleu"
    reads: ClassVar[str] = "two parallel files, or a .tsv, .csv or .jsonl of pairs; .gz and .xz too"
    batch_size: ClassVar[int] = 32
    n_files: ClassVar[tuple[int, int]] = (1, 2)

    source: str = ""  # column of a table, by default its first
    target: str = ""  # likewise, by default its second
    prefix: str = ""  # before every source, as T5's "translate English to German: "
    beams: int | None = None  # 1: greedy; by default the model's own
    tokenize: str = "13a"  # sacrebleu's tokenizer for BLEU
    lowercase: bool = False  # compare in lower case

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must translate."""
        loaded.require("translate")
        self._bleu(), self._chrf()
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """A source and its reference translation each."""
        pairs = read_pairs(paths[0], self.source, str(paths[1]) if len(paths) > 1 else self.target)
        return [Item(str(i), self.prefix + source, target, source) for i, (source, target) in enumerate(pairs)]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The translations; an item's score is its sentence BLEU."""
        options: dict[str, Any] = {} if self.beams is None else {"beams": self.beams}
        said = loaded.translate([item.input for item in items], **options)
        bleu = self._bleu(effective_order=True)
        scores = [bleu.sentence_score(text, [item.reference]).score for text, item in zip(said, items, strict=True)]
        return [{"prediction": text, "score": score} for text, score in zip(said, scores, strict=True)]

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """BLEU and chrF of the corpus."""
        return [
            _corpus_metric(name, scorer, records) for name, scorer in (("BLEU", self._bleu()), ("chrF", self._chrf()))
        ]

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """sacrebleu's signatures."""
        found = {}
        for name, scorer in (("BLEU", self._bleu()), ("chrF", self._chrf())):
            scorer.corpus_score([records[0]["prediction"]], [[records[0]["reference"]]])  # counts the references
            found[name] = str(scorer.get_signature())
        return {"signatures": found}

    def _bleu(self, **options: Any) -> Any:
        from sacrebleu.metrics.bleu import BLEU

        if self.tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"tokenize is {self.tokenize!r}: sacrebleu has {', '.join(sorted(BLEU.TOKENIZERS))}")
        return BLEU(tokenize=self.tokenize, lowercase=self.lowercase, **options)

    def _chrf(self) -> Any:
        from sacrebleu.metrics.chrf import CHRF

        return CHRF(lowercase=self.lowercase)


def _corpus_metric(name: str, scorer: Any, records: Sequence[Record]) -> Metric:
    """sacrebleu's corpus score from sums of its statistics per sentence, as its own significance tests compute it."""
    said, right = [r["prediction"] for r in records], [r["reference"] for r in records]
    statistics = np.array(scorer._extract_corpus_statistics(said, [right]), dtype=float)  # (N, K)

    def values(counts: np.ndarray) -> np.ndarray:
        sums = np.rint(counts @ statistics).astype(int)
        return np.array([scorer._compute_score_from_stats(row.tolist()).score for row in sums])

    return Metric(name, values, unit="")
