"""`heedful.load`: the one way in. A name, a folder, a GGUF file or a hub id becomes a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import Tensor

from heedful.generate import beam, speculative
from heedful.generate.draft import Drafter, DraftModel, PromptLookup
from heedful.generate.engine import Engine, Speaker
from heedful.generate.request import Request, Result, Sampling
from heedful.generate.sequence import Event
from heedful.generate.settings import ANSWERING, SEARCH, Settings, same_tokens, searching
from heedful.kernels.pack import pack
from heedful.kernels.packed import Kind
from heedful.models.base import DecoderModel, GenerativeModel, Model
from heedful.models.encoder import EncoderModel
from heedful.models.image_gpt import ImageGPT
from heedful.observe.capture import Activations, Edit, capture
from heedful.observe.fill import Filled, fill
from heedful.observe.several import fill_by
from heedful.observe.template import parse
from heedful.tasks import classify as tasks
from heedful.tasks.classify import Label, Span
from heedful.tasks.embed import Pooling, embed
from heedful.text.chat import Messages
from heedful.text.tokenizer import Tokenizer
from heedful.weights.adapted import base_of, is_adapter, with_adapter
from heedful.weights.folder import load_folder
from heedful.weights.manifest import is_run
from heedful.weights.resolve import is_local, reject_pickle, resolve, shipped_models
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


BEAMS = 4  # of a translation: Vaswani et al. 2017, section 6.1


class Loaded:
    """A model with its tokenizer (None if it has none) and its name."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.pooling = Pooling()  # how `embed` makes one vector of a text

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
        raise AttributeError(f"a loaded model has no {name!r}; it has model, tokenizer, name and its abilities")

    @property
    def continues(self) -> bool:
        """True if it goes on with its prompt; an encoder-decoder answers it."""
        return isinstance(self.model, DecoderModel)

    @overload
    def generate(self, prompt: str, **settings: Unpack[Settings]) -> str: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **settings: Unpack[Settings]) -> list[str]: ...
    def generate(self, prompt: str | list[str] | tuple[str, ...], **settings: Unpack[Settings]) -> str | list[str]:
        """What the model writes after the prompt, or in answer to it; of several prompts, all at once.

        Temperature 0 is greedy, a seed repeats its text, `beams` search for a likely one, a `draft` gets there sooner;
        `complete` has the other settings of a request.
        """
        self._refuse("generate", settings)
        texts = [result.choices[0].text for result in self.complete(prompt, **settings)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Iterator[str]:
        """The same piece by piece, as it is written; a piece never splits a character."""
        self._refuse("stream", settings)
        if searching(settings):
            raise ValueError("beam search knows its answer at the end and cannot stream: use generate or complete")
        engine, (request,) = self._engine(), self._requests([prompt], settings)
        drafter = self._drafter(settings.get("draft"))
        events = engine.stream(request) if drafter is None else self._speculate([request], drafter)
        return (event.piece for event in events if event.piece)

    def complete(self, prompt: Prompt | Sequence[str], **settings: Unpack[Settings]) -> list[Result]:
        """All there is to know of the answers to one prompt or several: see `heedful.generate.request.Result`."""
        one = isinstance(prompt, str) or any(isinstance(turn, Mapping) for turn in prompt)
        prompts = [cast(Prompt, prompt)] if one else list(cast(Sequence[str], prompt))
        engine, requests = self._engine(), self._requests(prompts, settings)
        if search := searching(settings):
            model = cast(GenerativeModel[Any], self.model)
            return beam.run_beam_search(model, engine.tokenizer, requests, never=self.never, **search)
        drafter = self._drafter(settings.get("draft"))
        if drafter is None:
            return engine.run(requests)
        found = {event.id: event.result for event in self._speculate(requests, drafter)}
        return [cast(Result, found[i]) for i in range(len(requests))]  # the last event of each has it

    @overload
    def translate(self, text: str, **settings: Unpack[Settings]) -> str: ...
    @overload
    def translate(self, text: list[str] | tuple[str, ...], **settings: Unpack[Settings]) -> list[str]: ...
    def translate(self, text: str | list[str] | tuple[str, ...], **settings: Unpack[Settings]) -> str | list[str]:
        """`generate` as the model's authors do it: with the beams, length penalty and longest answer that its files
        name (`model.generation`), with 4 beams where they name none. `beams=1` is greedy.

        T5 wants to read what to do: "translate English to German: ...".
        """
        return self.generate(text, **self.translating(**settings))

    def translating(self, **settings: Unpack[Settings]) -> Settings:
        """The settings of `translate`, for `complete`; those given come first."""
        self.require("translate")
        theirs = self.model.generation
        usual: dict[str, Any] = {"beams": theirs.get("num_beams") or BEAMS}
        longest = theirs.get("max_new_tokens") or (theirs.get("max_length") or 1) - 1  # its first token counts
        usual |= {"max_tokens": longest} if longest else {}
        if settings.get("beams", usual["beams"]) > 1:
            names = ("length_penalty", "early_stopping")
            usual |= {name: theirs[name] for name in names if theirs.get(name) is not None}
        else:
            usual["temperature"] = 0
        return cast(Settings, usual | settings)

    @property
    def never(self) -> list[int]:
        """The tokens that the model's authors do not let it say, as Marian's padding."""
        return [ids[0] for ids in self.model.generation.get("bad_words_ids") or () if len(ids) == 1]

    def _drafter(self, draft: Literal["lookup"] | Loaded | None) -> Drafter | None:
        """What guesses ahead; a model must have the same tokens, and read as this one does."""
        assert self.tokenizer is not None
        if draft is None:
            return None
        if draft == "lookup":
            return PromptLookup(in_source=self.tokenizer.target is self.tokenizer)
        if not isinstance(draft, Loaded):
            raise ValueError(f'draft is {draft!r}: it must be "lookup" or a loaded model')
        draft.require("generate")
        if draft.tokenizer is None or not same_tokens(self.tokenizer, draft.tokenizer):
            raise ValueError(f"{draft.name} cannot draft for {self.name}: their tokenizers differ")
        if draft.continues != self.continues or draft.model.device != self.model.device:
            raise ValueError(
                f"{draft.name} cannot draft for {self.name}: both must continue a prompt or both answer a source, "
                f"on one device, not on {draft.model.device} and {self.model.device}"
            )
        return DraftModel(cast(Speaker, draft.model))

    def _speculate(self, requests: Sequence[Request], drafter: Drafter) -> Iterator[Event]:
        assert self.tokenizer is not None
        return speculative.run_speculative(cast(Speaker, self.model), self.tokenizer.target, requests, drafter)

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
        rest = {name: value for name, value in rest.items() if name not in SEARCH and name != "draft"}
        if self.never:
            rest["logit_bias"] = dict.fromkeys(self.never, -100.0) | rest.get("logit_bias", {})
        how = Sampling(**rest)
        more["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        more["stop_ids"] = frozenset(self.eos_ids)
        return [Request(*self.read(p, chat), max_tokens, how, **more) for p in prompts]

    def read(self, prompt: Prompt, chat: bool = False) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What the decoder continues, and what the encoder reads."""
        assert self.tokenizer is not None
        if chat:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = self.tokenizer.chat(turns)
        elif not isinstance(prompt, str):
            raise ValueError("a conversation needs chat=True")
        else:
            ids = self.tokenizer.encode(prompt, add_special=True)
        ids = ids or self._start()
        if not ids:
            raise ValueError("the prompt is empty, and this model has no token to begin a text with")
        return (tuple(ids), None) if self.continues else ((), tuple(ids))

    def _start(self) -> list[int]:
        """What stands before a text: the token for it, else that of the end, else a line break, as in nanoGPT."""
        assert self.tokenizer is not None
        special = [i for i in (self.bos_id, *self.eos_ids) if i is not None]
        line = self.tokenizer.encode("\n")
        return special[:1] or (line if self.tokenizer.decode(line) == "\n" else [])

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pool: Literal["mean", "first", "last"] | None = None,
        normalize: bool | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """The vector of a text (E,), or those of several (N, E), in float32.

        What is not given is as the model's folder says, see `heedful.tasks.embed`; `max_tokens` cuts longer texts.
        """
        self.require("embed")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: its hidden states of token ids are model.hidden's")
        given = {"pool": pool, "normalize": normalize, "max_tokens": max_tokens}
        how = replace(self.pooling, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        vectors = embed(self.model, self.tokenizer, [texts] if isinstance(texts, str) else texts, how)
        return vectors[0] if isinstance(texts, str) else vectors

    def capture(
        self, patterns: str | Sequence[str] = (), edit: Mapping[str, Edit] | None = None
    ) -> AbstractContextManager[Activations]:
        """See and change what the model computes: `with loaded.capture("*.weights") as acts`; heedful.observe."""
        self.require("capture")
        return capture(self.model, patterns, edit)

    def fill(self, template: str, *, words: Sequence[str] | None = None, n: int | None = 30) -> Filled:
        """What fills the blank of "In [Texas|New York], they like to buy _.", see heedful.observe.fill. Models that a
        first bracket names, "[bert-books|shakespeare]: My lord, _", fill it in this one's place."""
        self.require("fill")
        found = parse(template, is_local, shipped_models())
        if not found.models:
            return fill(self.model, self._text_tokenizer, found, words=words, n=n)
        dtype = next(self.model.parameters()).dtype
        device, models = self.model.device, {}
        for name in found.models:
            other = self if name == self.name else load(name, device=device, dtype=dtype)
            other.require("fill")
            models[name] = (other.model, other._text_tokenizer)
        return fill_by(found, models, words=words, n=n)

    def classify(self, what: str | Tensor, second: str | None = None) -> list[Label]:
        """The labels of a text, of two, or of an image (C, height, width) from -1 to 1, likeliest first."""
        self.require("classify")
        return tasks.classify(self.model, self.tokenizer, what, second)

    def answer(self, question: str, passage: str) -> Span:
        """The piece of a passage that answers a question."""
        self.require("answer")
        return tasks.answer(cast(EncoderModel, self.model), self._text_tokenizer, question, passage)

    def tag(self, text: str) -> list[Span]:
        """The entities of a text."""
        self.require("tag")
        return tasks.tag(cast(EncoderModel, self.model), self._text_tokenizer, text)

    def complete_image(self, begun: Tensor, n: int = 1, *, temperature: float = 1.0, seed: int | None = 0) -> Tensor:
        """Ways to go on with an image's first pixels (N,): whole images as colours (n, pixels)."""
        self.require("complete_image")
        return tasks.complete_image(cast(ImageGPT, self.model), begun, n, temperature=temperature, seed=seed)

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, and reads no text")
        return self.tokenizer

    def save(self, folder: str | Path, *, max_shard: int = MAX_SHARD, overwrite: bool = False) -> None:
        """Write a folder that `load` and transformers' from_pretrained read."""
        also = self.pooling.files(self.model)
        save(self.model, folder, self.tokenizer, max_shard=max_shard, overwrite=overwrite, also=also)

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
    path = resolve(name)
    if path.is_dir():
        if not (path / "config.json").exists() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return _from_gguf(files[0], path.name, place, dtype)
        if is_adapter(path):
            model = with_adapter(_load(base_of(path), place, dtype).model, path)
        else:
            model = load_folder(path, device=place, dtype=dtype)
        has_tokenizer = any((path / file).exists() for file in TOKENIZER_FILES)
        tokenizer = Tokenizer.from_folder(path) if has_tokenizer else None
        loaded = Loaded(model, tokenizer, name_of(name, path))
        loaded.pooling = Pooling.from_folder(path)
        return loaded
    reject_pickle(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, path.stem, place, dtype)
    raise ValueError(f"{path} is a single file: give its folder (with config.json), or a .gguf file")


def _from_gguf(path: Path, name: str, device: torch.device, dtype: torch.dtype | None) -> Loaded:
    from heedful.weights.gguf import load_gguf

    model, fields = load_gguf(path, device=device, dtype=dtype)
    tokenizer = Tokenizer.from_gguf(fields) if "tokenizer.ggml.model" in fields else None
    return Loaded(model, tokenizer, name)


def name_of(given: str | Path, path: Path) -> str:
    """What to call it: the name it was asked for by, a folder's own name for a path (a run's, not its checkpoint's)."""
    if "snapshots" in path.parts:
        return str(given)
    return (Path(given).expanduser() if is_run(Path(given).expanduser()) else path).resolve().name
