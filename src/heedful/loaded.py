"""`heedful.load`: the one way in. A name, a folder, a GGUF file or a hub id becomes a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, overload

import torch

from heedful.generate.engine import Engine, Speaker
from heedful.generate.request import Request, Result, Sampling
from heedful.models.base import DecoderModel, Model
from heedful.nn.packed import Kind
from heedful.text.chat import Messages
from heedful.text.tokenizer import Tokenizer
from heedful.weights.find import find, refuse_pickle
from heedful.weights.folder import load_folder
from heedful.weights.pack import pack
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


Prompt = str | Messages  # a text, or with chat the turns of a conversation


class Settings(TypedDict, total=False):
    """How to generate; what is not given is the default. See `heedful.generate.request` for what each means."""

    max_tokens: int  # 200
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]  # texts that end the answer and are not part of it
    chat: bool  # put the prompt into the model's chat template
    n: int  # how many answers to each prompt; for `complete`, as the next three
    best_of: int | None
    logprobs: int | None
    echo: bool


# What a request has beside its sampling; more than this default only `complete` can show.
ANSWERING: dict[str, int | None] = {"n": 1, "best_of": None, "logprobs": None, "echo": False}


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

    @overload
    def generate(self, prompt: str, **settings: Unpack[Settings]) -> str: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **settings: Unpack[Settings]) -> list[str]: ...
    def generate(
        self, prompt: str | list[str] | tuple[str, ...], **settings: Unpack[Settings]
    ) -> str | list[str]:
        """What the model writes after the prompt, or in answer to it; of several prompts, all at once.

        Temperature 0 is greedy, a seed repeats its text; `complete` has the other settings of a request.
        """
        self._refuse("generate", settings)
        texts = [result.choices[0].text for result in self.complete(prompt, **settings)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Iterator[str]:
        """The same piece by piece, as it is written; a piece never splits a character."""
        self._refuse("stream", settings)
        engine, (request,) = self._engine(), self._requests([prompt], settings)
        return (event.piece for event in engine.stream(request) if event.piece)

    def complete(self, prompt: Prompt | Sequence[str], **settings: Unpack[Settings]) -> list[Result]:
        """All there is to know of the answers to one prompt or several: see `heedful.generate.request.Result`."""
        one = isinstance(prompt, str) or any(isinstance(turn, Mapping) for turn in prompt)
        prompts = [cast(Prompt, prompt)] if one else list(cast(Sequence[str], prompt))
        return self._engine().run(self._requests(prompts, settings))

    def _refuse(self, what: str, settings: Settings) -> None:
        if wrong := [name for name, usual in ANSWERING.items() if settings.get(name, usual) != usual]:
            raise ValueError(f"{what} gives one text for a prompt: use complete for {', '.join(wrong)}")

    def _engine(self) -> Engine:
        self.require("generate")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: use heedful.generate.engine with its token ids")
        # Nobody else is kept waiting: long prompts are read at once, short ones side by side.
        return Engine(cast(Speaker, self.model), self.tokenizer.target, chunk=4096)

    def _requests(self, prompts: Sequence[Prompt], settings: Settings) -> list[Request]:
        """Settings that are not a request's own are its sampling's."""
        rest: dict[str, Any] = dict(settings)
        chat, stop, max_tokens = rest.pop("chat", False), rest.pop("stop", ()), rest.pop("max_tokens", 200)
        more = {name: rest.pop(name) for name in ANSWERING if name in rest}
        how = Sampling(**rest)
        more["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        more["stop_ids"] = frozenset(self.eos_ids)
        return [Request(*self._read(p, chat), max_tokens, how, **more) for p in prompts]

    def _read(self, prompt: Prompt, chat: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What the decoder continues, and what the encoder reads."""
        assert self.tokenizer is not None
        if chat:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = self.tokenizer.chat(turns)
        elif not isinstance(prompt, str):
            raise ValueError("a conversation needs chat=True")
        else:
            ids = self.tokenizer.encode(prompt, add_special=True)
        ids = ids or [i for i in (self.bos_id, *self.eos_ids) if i is not None][:1]
        if not ids:
            raise ValueError("the prompt is empty, and this model has no token to begin a text with")
        return (tuple(ids), None) if self.continues else ((), tuple(ids))

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
    quantize: Kind | None = None,
) -> Loaded:
    """Load a model that ships with heedful, a folder in the hub's layout, a GGUF file, or a model of the hub
    ("org/name", downloaded once).

    `device` is the CPU unless given; `dtype` None keeps the type of the stored weights. `quantize` packs them for
    running alone: "float32" as they are, "bfloat16" and "float16" in half the memory, "int8" and "int4" in less.
    """
    loaded = _load(name, torch.device(device or "cpu"), dtype)
    if quantize is not None:
        pack(loaded.model, quantize)
    return loaded


def _load(name: str | Path, place: torch.device, dtype: torch.dtype | None) -> Loaded:
    path = find(name)
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
