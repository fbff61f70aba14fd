"""Tokenizes a text source once into memory-mapped files in the cache folder.

    NAME/meta.json                        inputs (source, tokenizer, settings), sizes, checksums, notes
    NAME/train.tokens.npy                 (N,) uint16 or uint32
    NAME/train.starts.npy                 (D,) int64, the first token of each document
    NAME/validation.*.npy                 the same, if a validation share was held out

NAME is a digest of the inputs. The validation split is a fixed random selection of whole documents if there are 20 or
more, else the end of the text, as in nanoGPT. If there are several documents, each ends with the tokenizer's eos, where
it has one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from heedful.data.corpus import Corpus, json_digest
from heedful.data.loader import Permutation
from heedful.data.sources import AFTER_LINE, BEFORE_SPACE, TextSource
from heedful.paths import data_cache_folder
from heedful.text.parse import parse_json
from heedful.text.tokenizer import Tokenizer

FORMAT = 1  # version of the file format; files of another version are rebuilt
ENOUGH_DOCUMENTS = 20  # least number of documents for a split by documents
BATCH_CHARACTERS = 2**20  # characters tokenized at a time
SAMPLE = 20_000  # characters for testing how a tokenizer handles pieces
LONGEST_UNCUT = 2**22  # characters of a document tokenized at once if it cannot be tokenized in pieces
LARGEST_CHECKED = 2**28  # bytes; larger files are opened without verifying their checksum


def prepare_corpus(
    source: TextSource, tokenizer: Tokenizer, *, share: float = 0.0, cache: Path | None = None
) -> tuple[Corpus, Corpus | None]:
    """The training corpus, and the validation corpus if a `share` of the text is held out; cached."""
    if not 0 <= share < 1:
        raise ValueError(f"share={share}: the validation share is from 0 to less than 1")
    made_of = {
        "format": FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "share": share,
    }
    with _writable(data_cache_folder() / "data" if cache is None else cache) as folder:
        place = folder / json_digest(made_of)
        found = _load_cached(place, made_of)
        if found is None:
            with _lock(folder):
                found = _load_cached(place, made_of)  # another process may have built it meanwhile
                if found is None:
                    _build(place, source, tokenizer, made_of)
                    found = _load_cached(place, made_of)
    assert found is not None, "the files just written are valid"
    return found


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of everything that affects the tokens of a text and the end of a document."""
    state = tokenizer.__getstate__()
    special = ["special tokens"] if tokenizer.reads_special else []
    return json_digest([state["backend"], state["unknown_from"], tokenizer.eos_id, *special])


# --- the cache -------------------------------------------------------------------------------------------------------


@contextmanager
def _writable(folder: Path) -> Iterator[Path]:
    """The folder, or if it cannot be written to a temporary one, removed at the end: files stay mapped."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.access(folder, os.W_OK):
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="heedful-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that of several processes one tokenizes; without effect where locking is not supported."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load_cached(place: Path, made_of: dict[str, Any]) -> tuple[Corpus, Corpus | None] | None:
    """The cached corpora; None if there are none, or they are damaged or of other inputs."""
    try:
        meta = parse_json((place / "meta.json").read_text(encoding="utf-8"))
        if meta["made_of"] != made_of or "train" not in meta["parts"]:
            return None
        parts = {name: _load_part(place, name, meta) for name in meta["parts"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return parts["train"], parts.get("validation")


def _load_part(place: Path, name: str, meta: dict[str, Any]) -> Corpus:
    """The training or validation corpus; ValueError if its files do not match meta.json."""
    about = meta["parts"][name]
    arrays = []
    for kind, n in (("tokens", about["n_tokens"]), ("starts", about["n_documents"])):
        path = place / f"{name}.{kind}.npy"
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        if found.shape != (n,) or str(found.dtype) != about[f"{kind}_dtype"]:
            raise ValueError(f"{path} has another shape")
        if path.stat().st_size <= LARGEST_CHECKED and _checksum(path) != about[f"{kind}_checksum"]:
            raise ValueError(f"{path} is damaged")
        arrays.append(found)
    fingerprint = json_digest([meta["made_of"], name])
    return Corpus(arrays[0], arrays[1], int(about["n_bytes"]), fingerprint, tuple(map(str, meta["notes"])))


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _build(place: Path, source: TextSource, tokenizer: Tokenizer, made_of: dict[str, Any]) -> None:
    """Write a temporary folder, then rename it atomically."""
    for old in place.parent.glob("aside-*"):  # left by a process that was killed
        if time.time() - old.stat().st_mtime > 86400:
            shutil.rmtree(old, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix="aside-", dir=place.parent))
    try:
        parts, notes = _tokenize(aside, source, tokenizer, made_of["share"])
        meta = {"made_of": made_of, "parts": parts, "notes": notes}
        (aside / "meta.json").write_text(json.dumps(meta, indent=2, ensure_ascii=False), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        os.rename(aside, place)
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not keep the tokens of {source.path}: {error.strerror};"
            " set XDG_CACHE_HOME to a folder with more room",
            str(place.parent),
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# --- tokenizing ------------------------------------------------------------------------------------------------------


@dataclass
class _Survey:
    """Statistics of a text, needed before it is tokenized."""

    n_characters: int = 0
    n_documents: int = 0
    longest: int = 0  # length of the longest document in characters
    sample: str = ""  # text of documents with several pieces


def _survey(source: TextSource) -> _Survey:
    found, length, cut = _Survey(), 0, False
    with _progress(f"reading {source.path.name}", None) as advance:
        for text, ends in source.pieces():
            found.n_characters += len(text)
            found.n_documents += ends
            length += len(text)
            found.longest = max(found.longest, length)
            if (cut or not ends) and len(found.sample) < SAMPLE:
                found.sample += text
            cut = not ends
            length = 0 if ends else length
            advance(len(text))
    return found


def _tokenize(folder: Path, source: TextSource, tokenizer: Tokenizer, share: float) -> tuple[dict[str, Any], list[str]]:
    """Write the token files; returns their entries in meta.json, and the notes."""
    survey = _survey(source)
    notes = source.notes
    eos = tokenizer.eos_id if survey.n_documents > 1 else None
    mode = piece_join_mode(tokenizer, survey.sample)
    pieces = source.pieces()
    if mode == "whole":
        pieces = _merged(pieces)
        if survey.longest > LONGEST_UNCUT:
            notes.append(f"longer documents were cut every {LONGEST_UNCUT:,} characters; tokens there may be others")
    with ExitStack() as stack:
        advance = stack.enter_context(_progress(f"tokenizing {source.path.name}", survey.n_characters))
        writers = {
            name: _Writer(folder / name, tokenizer, eos, drop=mode == "drop")
            for name in ("train", "validation")[: 2 if share else 1]
        }
        for writer in writers.values():
            stack.callback(writer.file.close)
        for name, text, ends in _split(pieces, share, survey):
            writers[name].add(text, ends)
            advance(len(text))
        parts = {name: writer.finish() for name, writer in writers.items()}
    for name, about in parts.items():
        if about["n_tokens"] == 0:
            raise ValueError(f"{source.path}: no tokens for {name}; give more text, or another share than {share}")
    if share:
        whole = survey.n_documents >= ENOUGH_DOCUMENTS
        notes.append(f"validation: {share:.0%} of the " + ("documents" if whole else "characters, the last"))
    return parts, notes


def piece_join_mode(tokenizer: Tokenizer, sample: str) -> str:
    """How to tokenize a document in pieces so that the tokens are the same as those of the whole document.

    Pieces begin with a space. Most tokenizers need it ("keep"); SentencePiece adds a space before every text, so it
    must be removed ("drop"). The mode is determined on a sample; if neither works, documents are tokenized "whole" (up
    to LONGEST_UNCUT characters).
    """
    sample = sample[:SAMPLE]
    border = BEFORE_SPACE if BEFORE_SPACE.search(sample) else AFTER_LINE
    borders = [found.start() for found in border.finditer(sample)]
    borders = borders[:: max(1, len(borders) // 50)]
    pieces = [sample[a:b] for a, b in zip([0, *borders], [*borders, None], strict=True)]
    wanted = tokenizer.encode(sample)
    for mode, given in (
        ("keep", pieces),
        ("drop", pieces[:1] + [piece.removeprefix(" ") for piece in pieces[1:]]),
    ):
        if [index for ids in tokenizer.encode_batch(given) for index in ids] == wanted:
            return mode
    return "whole"


def _merged(pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """The same documents in pieces of up to LONGEST_UNCUT characters."""
    held: list[str] = []
    for text, ends in pieces:
        if sum(map(len, held)) + len(text) > LONGEST_UNCUT:
            yield "".join(held), False
            held = []
        held.append(text)
        if ends:
            yield "".join(held), True
            held = []


def _split(pieces: Iterable[tuple[str, bool]], share: float, survey: _Survey) -> Iterator[tuple[str, str, bool]]:
    """Split pieces into (train or validation, text, whether its document ends with it)."""
    held_out: set[int] = set()
    cut = survey.n_characters
    if share and survey.n_documents >= ENOUGH_DOCUMENTS:
        n_held_out = max(1, round(survey.n_documents * share))
        held_out = set(Permutation(survey.n_documents, 0)(np.arange(n_held_out)).tolist())
    elif share:
        cut = int(survey.n_characters * (1 - share))
    document = place = 0
    for text, ends in pieces:
        if held_out:
            yield "validation" if document in held_out else "train", text, ends
        else:
            before, after = text[: max(0, cut - place)], text[max(0, cut - place) :]
            if before:
                yield "train", before, ends and not after
            if after:
                yield "validation", after, ends
        document, place = document + ends, place + len(text)


class _Writer:
    """Tokenizes the documents of a split and appends their tokens to a file."""

    def __init__(self, path: Path, tokenizer: Tokenizer, eos: int | None, *, drop: bool) -> None:
        self.path, self.tokenizer, self.eos, self.drop = path, tokenizer, eos, drop
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.file: IO[bytes] = open(self._named("tokens"), "wb")
        _write_header(self.file, self.dtype, 0)
        self.n_tokens = self.n_bytes = 0
        self.starts = array("q")
        self._inside = False  # whether the document of the last written token continues
        self._continues = False  # whether the document of the last added piece continues
        self._pending: list[tuple[str, bool]] = []
        self._n_pending = 0

    def _named(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}.npy")

    def add(self, text: str, ends: bool) -> None:
        self.n_bytes += len(text) if text.isascii() else len(text.encode())
        if self.drop and self._continues:
            text = text.removeprefix(" ")
        self._continues = not ends
        self._pending.append((text, ends))
        self._n_pending += len(text)
        if self._n_pending >= BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        encoded = self.tokenizer.encode_batch(text for text, _ in self._pending)
        for ids, (_, ends) in zip(encoded, self._pending, strict=True):
            if ids and not self._inside:
                self.starts.append(self.n_tokens)
                self._inside = True
            if ends and self._inside:
                self._inside = False
                if self.eos is not None:
                    ids.append(self.eos)
            self.n_tokens += len(ids)
        self.file.write(np.fromiter(chain.from_iterable(encoded), dtype=self.dtype).tobytes())
        self._pending, self._n_pending = [], 0

    def finish(self) -> dict[str, Any]:
        """Write the pending tokens and close the files; returns the entry in meta.json."""
        self._flush()
        self.file.seek(0)
        _write_header(self.file, self.dtype, self.n_tokens)
        self.file.close()
        np.save(self._named("starts"), np.array(self.starts, dtype=np.int64), allow_pickle=False)
        about: dict[str, Any] = {"n_tokens": self.n_tokens, "n_documents": len(self.starts)}
        about |= {"n_bytes": self.n_bytes, "tokens_dtype": str(self.dtype), "starts_dtype": "int64"}
        return about | {f"{kind}_checksum": _checksum(self._named(kind)) for kind in ("tokens", "starts")}


def _write_header(file: IO[bytes], dtype: np.dtype[Any], n: int) -> None:
    """Write the header of a .npy file; numpy pads it, so that its size does not depend on n."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
    np.lib.format.write_array_header_1_0(file, header)


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function to report progress with; a progress bar appears after 2 seconds."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task, began, shown = bar.add_task(label, total=total), time.monotonic(), False

    def advance(n: int) -> None:
        nonlocal shown
        bar.update(task, advance=n)
        if not shown and time.monotonic() - began > 2 and bar.console.is_terminal:
            shown = True
            bar.start()

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
