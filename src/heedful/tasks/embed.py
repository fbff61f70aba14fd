"""Text embeddings: the last layer's hidden states, pooled into one vector (Reimers & Gurevych 2019, section 3).

    pool    the vector is                        usual for
    mean    the mean over a text's tokens        encoders, BERT's kin as well as T5's; CBOW's word vectors
    first   the first token's state, [CLS]       encoders that were trained so
    last    the last token's state               decoders, of which it alone has seen the whole text

`Pooling.from_folder` reads which one it is, whether vectors are normalized, and the most tokens of a text from
sentence-transformers' files (modules.json and those it names). A folder without them pools as is usual for its model,
normalizes and truncates nothing: a longer text is an error.

Padding is what costs time. Texts are sorted by length, and those of about one length make a batch, small enough for its
activations to stay in the caches.

    N texts, B rows of a batch, T positions, E model width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, Model, TruncationWarning, last_of_each
from heedful.models.cbow import CBOW
from heedful.models.encoder import EncoderModel
from heedful.text.limits import characters_for, check_characters
from heedful.text.parse import parse_json
from heedful.text.plural import counted
from heedful.text.tokenizer import Tokenizer
from heedful.text.unknown import warn_if_unknown
from heedful.text.warn import warn
from heedful.weights.folder import LARGEST_CONFIG, allowed_roots

POOLS = ("mean", "first", "last")
MAX_BATCH = 1024  # tokens
MAX_PADDING = 32  # tokens of a batch: one more batch costs about as much

# sentence-transformers' names of the pooling modes, and the keys that its older files have instead, each true or false.
HUB_POOLS = {"mean": "mean", "cls": "first", "lasttoken": "last"}
HUB_POOL_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text are pooled into its embedding."""

    pool: str | None = None  # one of POOLS; None: as is usual for the model
    normalize: bool = False
    truncate: bool = False  # texts longer than the model's context, instead of refusing them
    max_tokens: int | None = None  # truncate texts to this many

    @classmethod
    def from_folder(cls, folder: Path) -> Pooling:
        """Read from sentence-transformers' files in a model's folder, if it has them.

        A mode that is not supported is kept as the name of a pool that `embed_texts` refuses: the model has other uses.
        """
        if not (folder / "modules.json").exists():
            return cls()
        modules = _read_json(folder, "modules.json", list)
        try:
            kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
            paths = {kind: str(module["path"]) for kind, module in zip(kinds, modules, strict=True)}
        except (KeyError, TypeError) as error:
            raise ValueError(f"modules.json in {folder} lists no types and paths: {error}") from None
        pool = "mean"
        if "Pooling" in paths:
            pool = _pool(_read_json(folder, f"{paths['Pooling']}/config.json", dict))
        if foreign := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
            pool = " + ".join([pool, *foreign])
        name = "sentence_bert_config.json"
        most = _read_json(folder, name, dict).get("max_seq_length") if (folder / name).exists() else None
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_seq_length is {str(most)[:100]!r} in {folder / name}: it must be a number")
        return cls(pool, "Normalize" in kinds, True, most)

    def files(self, model: Model) -> dict[str, Any]:
        """sentence-transformers' files, contents by name; none unless such a folder was read."""
        if not self.truncate or self.pool not in POOLS:
            return {}
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, places, strict=True))
        ]
        theirs = next(name for name, ours in HUB_POOLS.items() if ours == self.pool)
        modes = {key: mode == theirs for key, mode in HUB_POOL_KEYS.items()}
        pooling = {"word_embedding_dimension": model.config.d_model} | modes
        longest = {"max_seq_length": self.max_tokens, "do_lower_case": False}
        return {
            "modules.json": modules,
            "1_Pooling/config.json": pooling,
            "sentence_bert_config.json": longest,
        }


def _pool(config: dict[str, Any]) -> str:
    modes = config.get("pooling_mode") or [mode for key, mode in HUB_POOL_KEYS.items() if config.get(key)] or "mean"
    names = [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    return " + ".join(HUB_POOLS.get(name, name) for name in names)


def _read_json(folder: Path, name: str, kind: type) -> Any:
    """The JSON of a file in the folder or below it; links may lead only where those of the weights may."""
    path = (folder / name).resolve()
    if not any(path.is_relative_to(root) for root in allowed_roots(folder)) or not path.is_file():
        raise ValueError(f"{name[:200]!r} is not a file in {folder}")
    with path.open("rb") as file:
        raw = file.read(LARGEST_CONFIG + 1)
    try:
        found = parse_json(raw[:LARGEST_CONFIG].decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} must hold a JSON {kind.__name__}, not {type(found).__name__}")
    return found


def embed_texts(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, *, max_batch: int = MAX_BATCH
) -> Tensor:
    """The embeddings of the texts (N, E), in float32, computed in batches of at most `max_batch` tokens."""
    rows = tokenize_texts(
        tokenizer, texts, truncation_length(model, pooling), model.context_length, warn_if_cut=pooling.truncate
    )
    vectors = torch.empty(len(rows), model.config.d_model, device=model.device)
    for batch, found in embed_token_ids(model, rows, pooling, max_batch=max_batch):
        vectors[batch] = found
    return vectors


def embed_token_ids(
    model: Model, rows: Sequence[Sequence[int]], pooling: Pooling, *, max_batch: int = MAX_BATCH
) -> Iterator[tuple[list[int], Tensor]]:
    """The embeddings of rows of token ids, a batch at a time: the indices of its rows, and their embeddings (B, E)."""
    for batch in batch_by_length([len(row) for row in rows], max_batch):
        yield batch, embed_rows(model, [rows[i] for i in batch], pooling)


@torch.inference_mode()
def embed_rows(model: Model, rows: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
    """The embeddings (B, E) of rows of token ids that make one batch, normalized if the pooling says so."""
    vectors = embed_batch(model, rows, pooling_mode(model, pooling))
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_(min=1e-12) if pooling.normalize else vectors


def pooling_mode(model: Model, pooling: Pooling) -> str:
    """One of POOLS; ValueError where the model's files ask for another."""
    pool = pooling.pool or ("last" if isinstance(model, DecoderModel) else "mean")
    if pool not in POOLS:
        raise ValueError(f"{pool!r} is no way to pool that heedful has; pool can be {', '.join(POOLS)}")
    return pool


def truncation_length(model: Model, pooling: Pooling) -> int | None:
    """The number of tokens to which texts are truncated; None: they are not."""
    limits = [pooling.max_tokens, model.context_length if pooling.truncate or pooling.max_tokens else None]
    return min((limit for limit in limits if limit is not None), default=None)


def tokenize_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    most: int | None,
    context_length: int | None = None,
    *,
    warn_if_cut: bool = False,
) -> list[list[int]]:
    """The ids of each text with its special tokens ([CLS], [SEP]), truncated to `most` between them; TextTooLong for
    one that is not truncated and cannot fit into the context."""
    for text in texts if most is None else ():
        check_characters(tokenizer, [text], context_length)
    if most is not None:
        n_characters = characters_for(tokenizer, most)  # of a longer text the end is not tokenized
        texts = [text[:n_characters] for text in texts]
    around = tokenizer.encode("", add_special=True)
    # Some decoders have no special tokens around a text: an empty one is the token that begins or ends a text.
    empty = around or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    rows = [row or empty for row in tokenizer.encode_batch(texts, add_special=True)]
    warn_if_unknown(tokenizer, (text for text, row in zip(texts, rows, strict=True) if tokenizer.unk_id in row))
    if not all(rows):
        raise ValueError("a text is empty, and this model has no token that stands for nothing")
    if most is not None and most <= len(around):
        raise ValueError(f"max_tokens is {most}: {counted(len(around), 'token')} stand around every text")
    n_cut = 0 if most is None else sum(len(row) > most for row in rows)
    if n_cut and warn_if_cut:
        warn(
            f"this model reads {most} tokens of a text: the end of {n_cut} of {len(rows)} is cut",
            TruncationWarning,
        )
    return rows if most is None else [row if len(row) <= most else _truncate(row, most, around) for row in rows]


def _truncate(row: list[int], most: int, around: list[int]) -> list[int]:
    before = next((i for i, pair in enumerate(zip(row, around, strict=False)) if pair[0] != pair[1]), len(around))
    after = around[before:]
    return row[: most - len(after)] + after


def batch_by_length(lengths: Sequence[int], max_batch: int) -> Iterator[list[int]]:
    """Batches of row indices of nearly equal length, the longest first (too little memory shows at once)."""
    batch: list[int] = []
    real = 0  # tokens of the batch without padding
    width = 0  # of the batch, with it
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = width * (len(batch) + 1)
        if batch and (size > max_batch or size - real - lengths[i] > MAX_PADDING):
            yield batch
            batch, real = [], 0
        width = width if batch else lengths[i]
        batch.append(i)
        real += lengths[i]
    if batch:
        yield batch


def embed_batch(model: Model, rows: Sequence[Sequence[int]], pool: str) -> Tensor:
    """The embeddings (B, E) of one batch."""
    counts = [len(row) for row in rows]
    width = max(counts)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)  # (B, T)
    lengths = None if min(counts) == width else torch.tensor(counts, device=model.device)
    hidden = last_hidden_states(model, tokens, lengths)  # (B, T, E)
    if pool == "first":
        return hidden[:, 0].float()
    if pool == "last":
        return last_of_each(hidden, counts).float()
    if lengths is None:
        return hidden.mean(dim=1, dtype=torch.float32)
    padded = torch.arange(width, device=model.device) >= lengths[:, None]  # (B, T)
    return hidden.masked_fill(padded[..., None], 0).sum(dim=1, dtype=torch.float32) / lengths[:, None]


def last_hidden_states(model: Model, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """The last layer's hidden states (B, T, E); of an encoder-decoder, the encoder's; of CBOW, the words' vectors."""
    if isinstance(model, CBOW):
        return model.embed(tokens)
    if isinstance(model, EncoderDecoderModel):
        return model.encode(Batch(source=tokens, source_lengths=lengths))
    assert isinstance(model, EncoderModel | DecoderModel), "others do not have the ability"
    return model.hidden(Batch(tokens, lengths))
