"""A vector for each text: the last layer's hidden states, pooled (Reimers & Gurevych 2019, section 3).

    pool    the vector is                        usual for
    mean    the mean over a text's tokens        encoders, BERT's kin as well as T5's
    first   the first token's state, [CLS]       encoders that were trained so
    last    the last token's state               decoders, of which it alone has seen the whole text

Which one, whether vectors are scaled to length 1, and how many tokens of a text are read, a folder of
sentence-transformers says in its files (modules.json and those it names); `Pooling.from_folder` reads them. A folder
without them pools as is usual for its model, scales nothing, and cuts nothing off: a longer text is an error.

Speed is a matter of not computing padding. Texts are read in the order of their lengths, those of about one length
together, and as many at a time as keep the processor busy while what they leave in its caches is still there.

    N texts, B rows of a batch, T positions, E model width
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, Model, last_of_each
from heedful.models.encoder import EncoderModel
from heedful.text.tokenizer import Tokenizer
from heedful.weights.folder import LARGEST_CONFIG, allowed_roots

POOLS = ("mean", "first", "last")
BUDGET = 1024  # tokens of a batch
PADDING = 32  # tokens of it at most: one more batch costs about as much

# sentence-transformers' names, and its older files' way to say them: a key each, true or false.
THEIRS = {"mean": "mean", "cls": "first", "lasttoken": "last"}
OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text become its vector."""

    pool: str | None = None  # of POOLS; None: as is usual for the model
    normalize: bool = False
    cut: bool = False  # read no more of a text than the model can, instead of refusing it
    max_tokens: int | None = None  # and no more than this

    @classmethod
    def from_folder(cls, folder: Path) -> Pooling:
        """What sentence-transformers' files in a model's folder say, if it has them.

        What they may say and we cannot do becomes the name of a pool that `embed` refuses: the model has other uses.
        """
        if not (folder / "modules.json").exists():
            return cls()
        modules = _read(folder, "modules.json", list)
        try:
            kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
            paths = {kind: str(module["path"]) for kind, module in zip(kinds, modules, strict=True)}
        except (KeyError, TypeError) as error:
            raise ValueError(f"modules.json in {folder} lists no types and paths: {error}") from None
        pool = "mean"
        if "Pooling" in paths:
            pool = _pool(_read(folder, f"{paths['Pooling']}/config.json", dict))
        if foreign := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
            pool = " + ".join([pool, *foreign])
        name = "sentence_bert_config.json"
        most = _read(folder, name, dict).get("max_seq_length") if (folder / name).exists() else None
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_seq_length is {str(most)[:100]!r} in {folder / name}: it must be a number")
        return cls(pool, "Normalize" in kinds, True, most)

    def files(self, model: Model) -> dict[str, Any]:
        """The same as sentence-transformers' files, by their names; none where no such folder was read."""
        if not self.cut or self.pool not in POOLS:
            return {}
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, places, strict=True))
        ]
        theirs = next(name for name, ours in THEIRS.items() if ours == self.pool)
        modes = {key: mode == theirs for key, mode in OLDER.items()}
        pooling = {"word_embedding_dimension": model.config.d_model} | modes
        longest = {"max_seq_length": self.max_tokens, "do_lower_case": False}
        return {
            "modules.json": modules,
            "1_Pooling/config.json": pooling,
            "sentence_bert_config.json": longest,
        }


def _pool(config: dict[str, Any]) -> str:
    modes = config.get("pooling_mode") or [mode for key, mode in OLDER.items() if config.get(key)] or "mean"
    names = [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    return " + ".join(THEIRS.get(name, name) for name in names)


def _read(folder: Path, name: str, kind: type) -> Any:
    """JSON from a file in the folder or below it; a link may lead no further than those of the weights."""
    path = (folder / name).resolve()
    if not any(path.is_relative_to(root) for root in allowed_roots(folder)) or not path.is_file():
        raise ValueError(f"{name[:200]!r} is not a file in {folder}")
    with path.open("rb") as file:
        raw = file.read(LARGEST_CONFIG + 1)
    try:
        found = json.loads(raw[:LARGEST_CONFIG].decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} must hold a JSON {kind.__name__}, not {type(found).__name__}")
    return found


def embed(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, *, budget: int = BUDGET
) -> Tensor:
    """The vectors of the texts (N, E), in float32. `budget` is how many tokens are read at a time."""
    rows = tokenize(tokenizer, texts, longest(model, pooling))
    vectors = torch.empty(len(rows), model.config.d_model, device=model.device)
    for batch, found in embed_rows(model, rows, pooling, budget=budget):
        vectors[batch] = found
    return vectors


def embed_rows(
    model: Model, rows: Sequence[Sequence[int]], pooling: Pooling, *, budget: int = BUDGET
) -> Iterator[tuple[list[int], Tensor]]:
    """The same of token ids, batch by batch, for who has other things to do in between: the places of some rows, and
    their vectors (B, E)."""
    pool = pool_of(model, pooling)
    for batch in batches([len(row) for row in rows], budget):
        with torch.inference_mode():  # not while somebody else has his turn
            vectors = vectors_of(model, [rows[i] for i in batch], pool)
            if pooling.normalize:
                vectors /= vectors.norm(dim=-1, keepdim=True).clamp_(min=1e-12)
        yield batch, vectors


def pool_of(model: Model, pooling: Pooling) -> str:
    """Which of POOLS; ValueError where the model's files ask for another."""
    pool = pooling.pool or ("last" if isinstance(model, DecoderModel) else "mean")
    if pool not in POOLS:
        raise ValueError(f"{pool!r} is no way to pool that heedful has; pool can be {', '.join(POOLS)}")
    return pool


def longest(model: Model, pooling: Pooling) -> int | None:
    """How many tokens of a text are read; None: all, however many that are."""
    limits = [pooling.max_tokens, model.longest if pooling.cut or pooling.max_tokens else None]
    return min((limit for limit in limits if limit is not None), default=None)


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], most: int | None) -> list[list[int]]:
    """The ids of each text, with what the model's family puts around one; that stays where a text is cut."""
    around = tokenizer.encode("", add_special=True)
    # Some decoders put nothing around a text: an empty one is what begins or ends a text.
    empty = around or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    rows = [row or empty for row in tokenizer.encode_batch(texts, add_special=True)]
    if not all(rows):
        raise ValueError("a text is empty, and this model has no token that stands for nothing")
    if most is not None and most <= len(around):
        raise ValueError(f"max_tokens is {most}: {len(around)} tokens stand around every text")
    return rows if most is None else [row if len(row) <= most else _cut(row, most, around) for row in rows]


def _cut(row: list[int], most: int, around: list[int]) -> list[int]:
    before = next((i for i, pair in enumerate(zip(row, around, strict=False)) if pair[0] != pair[1]), len(around))
    after = around[before:]
    return row[: most - len(after)] + after


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Which rows are read together: of nearly equal length, the longest first (too little memory shows at once)."""
    batch: list[int] = []
    real = 0  # tokens of the batch; with padding they are `width` times its rows
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = width * (len(batch) + 1)
        if batch and (size > budget or size - real - lengths[i] > PADDING):
            yield batch
            batch, real = [], 0
        width = width if batch else lengths[i]
        batch.append(i)
        real += lengths[i]
    if batch:
        yield batch


def vectors_of(model: Model, rows: Sequence[Sequence[int]], pool: str) -> Tensor:
    """The vectors (B, E) of one batch."""
    counts = [len(row) for row in rows]
    width = max(counts)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)  # (B, T)
    lengths = None if min(counts) == width else torch.tensor(counts, device=model.device)
    hidden = read(model, tokens, lengths)  # (B, T, E)
    if pool == "first":
        return hidden[:, 0].float()
    if pool == "last":
        return last_of_each(hidden, counts).float()
    if lengths is None:
        return hidden.mean(dim=1, dtype=torch.float32)
    padded = torch.arange(width, device=model.device) >= lengths[:, None]  # (B, T)
    return hidden.masked_fill(padded[..., None], 0).sum(dim=1, dtype=torch.float32) / lengths[:, None]


def read(model: Model, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """The last layer's hidden states (B, T, E); of an encoder-decoder, the encoder's."""
    if isinstance(model, EncoderDecoderModel):
        return model.encode(Batch(source=tokens, source_lengths=lengths))
    assert isinstance(model, EncoderModel | DecoderModel), "others do not have the ability"
    return model.hidden(Batch(tokens, lengths))
