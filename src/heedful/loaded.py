"""`heedful.load`: the one way in. A name, a folder, a GGUF file or a hub id becomes a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict, Unpack, cast

import torch

from heedful.generate.engine import Speaker, decode, pieces
from heedful.generate.request import Sampling
from heedful.models.base import Batch, DecoderModel, Model
from heedful.text.tokenizer import Tokenizer
from heedful.weights.find import find, refuse_pickle
from heedful.weights.folder import load_folder
from heedful.weights.save import MAX_SHARD, save

# Everything some model can do; which of it a model can is its family's to say (`Model.abilities`).
ABILITIES = (
    "generate", "stream", "chat", "translate", "fill", "embed", "classify", "answer", "tag", "complete_image",
    "capture",
)  # fmt: skip

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "source.spm",
    "sentencepiece.bpe.model", "tokenizer_config.json",
)  # fmt: skip


class Settings(TypedDict, total=False):
    """How to generate; what is not given is the default."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    chat: bool


class Loaded:
    """A model with its tokenizer (None if it has none) and its name."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name

    @property
    def bos_id(self) -> int | None:
        """The token a text begins with, if the model has one."""
        return self._special("bos")[0] if self._special("bos") else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text; a chat model often has several."""
        return self._special("eos")

    @property
    def pad_id(self) -> int | None:
        return self._special("pad")[0] if self._special("pad") else None

    def _special(self, role: str) -> tuple[int, ...]:
        value = self.model.special.get(f"{role}_token_id")
        if value is None and self.tokenizer is not None:
            value = getattr(self.tokenizer, f"{role}_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(i for i in ids if i >= 0)  # old LLaMA files say -1 for none

    @property
    def abilities(self) -> tuple[str, ...]:
        """What this model can do."""
        return self.model.abilities

    def require(self, ability: str) -> None:
        """ValueError unless the model can do it."""
        if ability not in self.abilities:
            raise ValueError(self._cannot(ability))

    def _cannot(self, ability: str) -> str:
        can = ", ".join(a for a in self.abilities if hasattr(type(self), a)) or "nothing more"
        return f"{self.name} is a {type(self.model).__name__} and cannot {ability}; it can: {can}"

    def __getattr__(self, name: str) -> object:
        # Reached only for what does not exist.
        if name in ABILITIES and "model" in self.__dict__:
            raise AttributeError(self._cannot(name))
        raise AttributeError(
            f"a loaded model has no {name!r}; it has model, tokenizer, name and its abilities"
        )

    @property
    def continues(self) -> bool:
        """True if it goes on with its prompt; an encoder-decoder answers it."""
        return isinstance(self.model, DecoderModel)

    def generate(self, prompt: str, **settings: Unpack[Settings]) -> str:
        """What the model writes after the prompt, or in answer to it; see `stream`."""
        return "".join(self.stream(prompt, **settings))

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        chat: bool = False,
    ) -> Iterator[str]:
        """The same piece by piece, as it is written; a piece never splits a character.

        Temperature 0 is greedy; `chat` puts the prompt into the model's chat template.
        """
        self.require("generate")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: use heedful.generate.engine with its token ids")
        batch, stop = self._read(prompt, chat), frozenset(self.eos_ids)
        how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        steps = decode(cast(Speaker, self.model), batch, max_tokens, how, stop)
        tokens = (step[0] for step in steps if step[0] is not None and step[0] not in stop)
        return pieces(tokens, self.tokenizer.target)

    def _read(self, prompt: str, chat: bool) -> Batch:
        assert self.tokenizer is not None
        if chat:
            ids = self.tokenizer.chat([{"role": "user", "content": prompt}])
        else:
            ids = self.tokenizer.encode(prompt, add_special=True)
        ids = ids or [i for i in (self.bos_id, *self.eos_ids) if i is not None][:1]
        if not ids:
            raise ValueError("the prompt is empty, and this model has no token to begin a text with")
        tokens = torch.tensor([ids], device=self.model.device)
        return Batch(tokens) if self.continues else Batch(source=tokens)

    def save(self, folder: str | Path, *, max_shard: int = MAX_SHARD, overwrite: bool = False) -> None:
        """Write a folder that `load` and transformers' from_pretrained read."""
        save(self.model, folder, self.tokenizer, max_shard=max_shard, overwrite=overwrite)

    def __repr__(self) -> str:
        count = f"{self.model.n_parameters() / 1e6:.1f}M parameters"
        return f"Loaded({self.name}: {type(self.model).__name__}, {count}, on {self.model.device})"


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load a model that ships with heedful, a folder in the hub's layout, a GGUF file, or a model of the hub
    ("org/name", downloaded once).

    `device` is the CPU unless given; `dtype` None keeps the type of the stored weights.
    """
    path = find(name)
    place = torch.device(device or "cpu")
    if path.is_dir():
        if not (path / "config.json").exists() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return _from_gguf(files[0], path.name, place, dtype)
        model = load_folder(path, device=place, dtype=dtype)
        has_tokenizer = any((path / file).exists() for file in TOKENIZER_FILES)
        return Loaded(model, Tokenizer.from_folder(path) if has_tokenizer else None, _name(name, path))
    refuse_pickle(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, path.stem, place, dtype)
    raise ValueError(f"{path} is a single file: give its folder (with config.json), or a .gguf file")


def _from_gguf(path: Path, name: str, device: torch.device, dtype: torch.dtype | None) -> Loaded:
    from heedful.weights.gguf import load_gguf

    model, fields = load_gguf(path, device=device, dtype=dtype)
    tokenizer = Tokenizer.from_gguf(fields) if "tokenizer.ggml.model" in fields else None
    return Loaded(model, tokenizer, name)


def _name(given: str | Path, path: Path) -> str:
    """What to call it: the name it was asked for by, a folder's own name for a path."""
    return str(given) if "snapshots" in path.parts else path.resolve().name
