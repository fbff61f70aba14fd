"""`heedful.load` and what it returns: a model with its tokenizer, and as methods what it can do.

Each method is a few lines that call the package that does the work: generate, observe or tasks. Which of them a model
has follows from its family and head (`Model.abilities`); the others raise a ValueError that says what the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import Tensor

from heedful.evaluate.bias_report import BiasReport, bias_report
from heedful.evaluate.bias_tests import BiasTest, make_test
from heedful.evaluate.evaluation import Evaluation, evaluate
from heedful.generate import beam, speculative
from heedful.generate.defaults import default_options
from heedful.generate.engine import Engine
from heedful.generate.model_with_tokenizer import ModelWithTokenizer, Prompt
from heedful.generate.options import (
    GenerationOptions,
    beam_arguments,
    build_requests,
    make_drafter,
    prompt_options,
    refuse_result_options,
    warn_beyond_context,
)
from heedful.generate.request import Choice, Request, Result
from heedful.kernels.accelerate import accelerate
from heedful.kernels.device import choose_device
from heedful.kernels.packed import Precision
from heedful.models.base import GenerativeModel, Model
from heedful.models.encoder import EncoderModel
from heedful.models.image_gpt import ImageGPT
from heedful.nn.int8_cache import CacheType
from heedful.observe.capture import Activations, Edit, capture
from heedful.observe.compare_models import fill_by_models
from heedful.observe.fill import Filled, fill_template
from heedful.observe.template import parse_template
from heedful.tasks.answer import AnswerSpan, extract_answers
from heedful.tasks.classify import Label, predict_labels
from heedful.tasks.complete_image import complete_image
from heedful.tasks.embed import Pooling, embed_texts
from heedful.tasks.neighbours import Neighbour, word_vectors
from heedful.tasks.tag import TaggedSpan, tag_texts
from heedful.tasks.translate import limit_request, restore_ends, sentence_end, split_end
from heedful.text.blank import is_blank
from heedful.text.tokenizer import Tokenizer
from heedful.weights.adapter import base_of, is_adapter, with_adapter
from heedful.weights.compressed import Quantized
from heedful.weights.folder import has_tokenizer, load_folder
from heedful.weights.gguf import load_gguf
from heedful.weights.gguf_save import FileDtype, save_gguf
from heedful.weights.resolve import is_local, model_name, reject_pickle, resolve_model, shipped_models
from heedful.weights.save import MAX_SHARD
from heedful.weights.save import save as save_model


class Loaded(ModelWithTokenizer):
    """A model with its tokenizer (None if it has none) and its name, and what it can do."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, name: str) -> None:
        super().__init__(model, tokenizer, name)
        self.pooling = Pooling()  # how `embed` makes one vector of a text
        self.folder: Path | None = None  # where its files are, if they are in a folder

    def __repr__(self) -> str:
        count = f"{self.model.n_parameters() / 1e6:.1f}M parameters"
        return f"Loaded({self.name}: {type(self.model).__name__}, {count}, on {self.model.device})"

    def save(
        self,
        folder: str | Path,
        *,
        max_shard: int = MAX_SHARD,
        overwrite: bool = False,
        quantize: Quantized | None = None,
    ) -> None:
        """Write a folder that `load` and transformers' from_pretrained read; `quantize` "int8" or "int4" makes it a
        quarter or a seventh of float32's size."""
        save(self, folder, max_shard=max_shard, overwrite=overwrite, quantize=quantize)

    def save_gguf(self, file: str | Path, *, dtype: FileDtype | None = None, **how: Any) -> None:
        """Write a GGUF file, which `load` and llama.cpp read; `how` are further arguments of `weights.gguf_save`."""
        save_gguf(self.model, file, self.tokenizer, dtype=dtype, **{"name": self.name, **how})

    # --- generation --------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerationOptions]) -> str: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerationOptions]) -> list[str]: ...
    def generate(
        self, prompt: str | list[str] | tuple[str, ...], **options: Unpack[GenerationOptions]
    ) -> str | list[str]:
        """The continuation of a prompt, or an encoder-decoder's answer to it; of several prompts, all in one batch.

        Temperature 0 is greedy, a seed repeats its text, `beams` is beam search, `draft` speculative decoding;
        `complete` has the other options of a request. By default a decoder samples and an encoder-decoder searches with
        4 beams; the model's generation_config.json comes before that (heedful.generate.defaults).
        """
        refuse_result_options("generate", options)
        texts = [result.choices[0].text for result in self.complete(prompt, **options)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """`generate` piece by piece, as tokens are sampled; a piece never splits a character. By default an
        encoder-decoder is greedy here: beam search has no pieces."""
        refuse_result_options("stream", options)
        if beam_arguments(options):
            raise ValueError("beam search knows its answer at the end and cannot stream: use generate or complete")
        engine = self._engine()
        if self._has_no_source(prompt):
            return iter(())
        (request,) = self._requests([prompt], options, stream=True)
        drafter = make_drafter(self, options.get("draft"))
        if drafter is None:
            events = engine.stream(request)
        else:
            events = speculative.run_speculative(engine.model, engine.tokenizer, [request], drafter)
        return (event.piece for event in events if event.piece)

    def complete(self, prompt: Prompt | Sequence[str], **options: Unpack[GenerationOptions]) -> list[Result]:
        """The whole result of one prompt or several: texts, tokens, log-probabilities, finish reasons."""
        one = isinstance(prompt, str) or any(isinstance(turn, Mapping) for turn in prompt)
        prompts = [cast(Prompt, prompt)] if one else list(cast(Sequence[str], prompt))
        found = iter(self._complete([p for p in prompts if not self._has_no_source(p)], options))
        nothing = Result([Choice(i, [], "", "stop") for i in range(options.get("n", 1))])
        return [nothing if self._has_no_source(p) else next(found) for p in prompts]

    def _complete(self, prompts: Sequence[Prompt], options: GenerationOptions) -> list[Result]:
        self.require("generate")
        return self._run(self._requests(prompts, options), options)

    def _run(self, requests: Sequence[Request], options: GenerationOptions) -> list[Result]:
        engine = self._engine()
        if arguments := beam_arguments(self.generation_options(**options)):
            model = cast(GenerativeModel[Any], self.model)
            return beam.run_beam_search(model, engine.tokenizer, requests, never=self.banned_ids, **arguments)
        drafter = make_drafter(self, options.get("draft"))
        if drafter is None:
            return engine.run(requests)
        events = speculative.run_speculative(engine.model, engine.tokenizer, requests, drafter)
        results = {event.id: event.result for event in events}  # the last event of each request has its result
        return [cast(Result, results[i]) for i in range(len(requests))]

    @overload
    def chat(
        self,
        messages: Prompt,
        *,
        system: str | None = None,
        stream: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> Iterator[str]: ...
    @overload
    def chat(
        self,
        messages: Prompt,
        *,
        system: str | None = None,
        stream: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> str: ...
    def chat(
        self, messages: Prompt, *, system: str | None = None, stream: bool = False, **options: Unpack[GenerationOptions]
    ) -> str | Iterator[str]:
        """The answer to a message, or to a conversation ([{"role": "user", "content": "Hello"}, ...]), in the model's
        chat template; with `stream` piece by piece. `system` is a first message that says how to answer."""
        refuse_result_options("chat", options)
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        turns = turns if system is None else [{"role": "system", "content": system}, *turns]
        options["chat"] = True
        return self.stream(turns, **options) if stream else self.complete(turns, **options)[0].choices[0].text

    @overload
    def translate(self, text: str, **options: Unpack[GenerationOptions]) -> str: ...
    @overload
    def translate(self, text: list[str] | tuple[str, ...], **options: Unpack[GenerationOptions]) -> list[str]: ...
    def translate(
        self, text: str | list[str] | tuple[str, ...], **options: Unpack[GenerationOptions]
    ) -> str | list[str]:
        """`generate` of an encoder-decoder, limited in length and repetition by the source (heedful.tasks.translate).
        The translation of an empty text is empty. `beams=1` is greedy.

        T5 needs to be told what to do: "translate English to German: ...".
        """
        refuse_result_options("translate", options)
        texts = [text] if isinstance(text, str) else text
        translations = [result.choices[0].text for result in self.complete_translation(texts, **options)]
        return translations[0] if isinstance(text, str) else translations

    def complete_translation(self, texts: Sequence[str], **options: Unpack[GenerationOptions]) -> list[Result]:
        """The whole results of `translate`. Their tokens are the model's own, with an end that the text has lost."""
        self.require("translate")
        end = sentence_end(self.model)
        sources, replacements = zip(*(split_end(text, end) for text in texts), strict=True) if texts else ((), ())
        longest = default_options(self.model, {}).get("max_tokens")
        requests = [
            limit_request(request, options, longest)
            for request in self._requests([text for text in sources if not is_blank(text)], options)
        ]
        results = iter(self._run(requests, options))
        nothing = Result([Choice(i, [], "", "stop") for i in range(options.get("n", 1))])
        found = [nothing if is_blank(text) else next(results) for text in sources]
        return restore_ends(found, end, replacements)

    def generation_options(self, *, stream: bool = False, **options: Unpack[GenerationOptions]) -> GenerationOptions:
        """The options given, and this model's defaults for the others; `stream` is for `stream`, without beams."""
        return default_options(self.model, options, stream=stream)

    def _requests(self, prompts: Sequence[Prompt], given: GenerationOptions, *, stream: bool = False) -> list[Request]:
        options = self.generation_options(stream=stream, **given)
        how = prompt_options(options, self.model.context_length)
        encoded = [self.encode_prompt(prompt, **how) for prompt in prompts]
        ends = self.chat_eos_ids if options.get("chat") else self.eos_ids
        requests = build_requests(encoded, options, stop_ids=ends, banned_ids=self.banned_ids)
        longest = self.model.context_length
        if "max_tokens" in given and longest is not None:  # the default may be more than there is room for
            warn_beyond_context(longest, requests)
        return requests

    def _engine(self) -> Engine:
        self.require("generate")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: use heedful.generate.engine with its token ids")
        # No other request waits for the next token: long prompts are read in one pass, short ones in one batch.
        return Engine(cast(GenerativeModel[Any], self.model), self.tokenizer.target, chunk=4096)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pool: Literal["mean", "first", "last"] | None = None,
        normalize: bool | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """The embedding of a text (E,), or of several (N, E), in float32.

        The defaults are those of the model's folder, see `heedful.tasks.embed`; `max_tokens` truncates longer texts.
        """
        self.require("embed")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: its hidden states of token ids are model.hidden's")
        given = {"pool": pool, "normalize": normalize, "max_tokens": max_tokens}
        if max_tokens is not None:
            given["truncate"] = False  # to the context: it is to max_tokens instead, without a warning
        pooling = replace(self.pooling, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        vectors = embed_texts(self.model, self.tokenizer, [texts] if isinstance(texts, str) else texts, pooling)
        return vectors[0] if isinstance(texts, str) else vectors

    @overload
    def classify(self, what: str | Tensor, second: str | None = None) -> list[Label]: ...
    @overload
    def classify(self, what: list[str] | tuple[str, ...], second: Sequence[str] | None = None) -> list[list[Label]]: ...
    def classify(
        self, what: str | list[str] | tuple[str, ...] | Tensor, second: str | Sequence[str] | None = None
    ) -> list[Label] | list[list[Label]]:
        """The labels of a text, of a pair of texts, or of an image (C, height, width), likeliest first; of several
        texts or pairs, a list of such lists.

        An image has floats from -1 to 1, or uint8. A text that is longer than the context is cut, with a warning.
        """
        self.require("classify")
        return predict_labels(self.model, self.tokenizer, what, second)

    @overload
    def answer(self, question: str, passage: str) -> AnswerSpan: ...
    @overload
    def answer(self, question: list[str] | tuple[str, ...], passage: Sequence[str]) -> list[AnswerSpan]: ...
    def answer(
        self, question: str | list[str] | tuple[str, ...], passage: str | Sequence[str]
    ) -> AnswerSpan | list[AnswerSpan]:
        """The span of a passage that answers a question; of several questions, each with its passage, a list."""
        self.require("answer")
        model, tokenizer = cast(EncoderModel, self.model), self._text_tokenizer
        if isinstance(question, str) and isinstance(passage, str):
            return extract_answers(model, tokenizer, [question], [passage])[0]
        if isinstance(question, str) or isinstance(passage, str):
            raise ValueError("for several questions give two lists: the questions, and the passage of each")
        return extract_answers(model, tokenizer, question, passage)

    @overload
    def tag(self, text: str) -> list[TaggedSpan]: ...
    @overload
    def tag(self, text: list[str] | tuple[str, ...]) -> list[list[TaggedSpan]]: ...
    def tag(self, text: str | list[str] | tuple[str, ...]) -> list[TaggedSpan] | list[list[TaggedSpan]]:
        """The entities of a text; of several texts, a list for each."""
        self.require("tag")
        found = tag_texts(
            cast(EncoderModel, self.model), self._text_tokenizer, [text] if isinstance(text, str) else text
        )
        return found[0] if isinstance(text, str) else found

    @overload
    def neighbours(self, word: str, n: int = 10, *, layer: int | None = None) -> list[Neighbour]: ...
    @overload
    def neighbours(
        self, word: list[str] | tuple[str, ...], n: int = 10, *, layer: int | None = None
    ) -> list[list[Neighbour]]: ...
    def neighbours(
        self, word: str | list[str] | tuple[str, ...], n: int = 10, *, layer: int | None = None
    ) -> list[Neighbour] | list[list[Neighbour]]:
        """The n words nearest to a word or to an expression of words ("king - man + woman", "man:king::woman:?") among
        the model's input embeddings, or with `layer` among that layer's outputs; see heedful.tasks.neighbours."""
        self.require("neighbours")
        texts = [word] if isinstance(word, str) else word
        vectors = word_vectors(self.model, self._text_tokenizer, layer)
        found = [vectors.nearest(text, n) for text in texts]
        return found[0] if isinstance(word, str) else found

    def complete_image(self, begun: Tensor, n: int = 1, *, temperature: float = 1.0, seed: int | None = 0) -> Tensor:
        """n completions of an image's first rows (C, rows, W): images (n, C, H, W), -1 to 1, in the model's palette. Of
        its first pixels as colour ids (N,): images as colour ids (n, pixels)."""
        self.require("complete_image")
        return complete_image(cast(ImageGPT, self.model), begun, n, temperature=temperature, seed=seed)

    def evaluate(self, task: str, data: str | Path | Sequence[str | Path] = (), **options: Any) -> Evaluation:
        """The scores on a task's data with 95 % intervals, as `evaluate("perplexity", "book.txt", window=512)`;
        the options are those of heedful.evaluate.evaluation.evaluate."""
        return evaluate(self, task, data, **options)

    def bias(self, *templates: str | BiasTest, **options: Any) -> BiasReport:
        """What the model makes of sentences that differ in a group alone, with 95 % intervals: `bias("My friend {NAME}
        is a {JOB}.", groups={"women": ["Mary", "Anna"], "men": ["John"]}, fill={"JOB": ["nurse", "judge"]})`. The
        options are those of heedful.evaluate.bias_tests.BiasTest; tests may be given instead; without either, those
        that ship. `.save("report.html")` writes a page."""
        tests = [test for test in templates if isinstance(test, BiasTest)]
        texts = [text for text in templates if isinstance(text, str)]
        return bias_report(self, [*tests, make_test({"templates": texts, **options})] if texts or options else tests)

    # --- looking inside ----------------------------------------------------------------------------------------------

    def capture(
        self, patterns: str | Sequence[str] = (), edit: Mapping[str, Edit] | None = None
    ) -> AbstractContextManager[Activations]:
        """Record and change activations: `with loaded.capture("*.weights") as acts`; see heedful.observe.capture."""
        self.require("capture")
        return capture(self.model, patterns, edit)

    def fill(self, template: str, *, words: Sequence[str] | None = None, n: int | None = 30) -> Filled:
        """The likeliest words for the blank of "In [Texas|New York], they like to buy _.", see heedful.observe.fill.
        Models that a first bracket names, "[bert-books|shakespeare]: My lord, _", fill it in place of this one."""
        self.require("fill")
        parsed = parse_template(template, is_local, shipped_models())
        if not parsed.models:
            return fill_template(self.model, self._text_tokenizer, parsed, words=words, n=n)
        dtype = next(self.model.parameters()).dtype
        device, models = self.model.device, {}
        for name in parsed.models:
            other = self if name == self.name else load(name, device=device, dtype=dtype)
            other.require("fill")
            models[name] = (other.model, other._text_tokenizer)
        return fill_by_models(parsed, models, words=words, n=n)


def save(
    model: Model | Loaded,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard: int = MAX_SHARD,
    overwrite: bool = False,
    quantize: Quantized | None = None,
) -> None:
    """Write a model with its tokenizer as a folder that `load` and transformers' from_pretrained read: config.json,
    generation_config.json, the weights in safetensors files of at most `max_shard` bytes, the tokenizer, a card.

    A model that `load` returned has its tokenizer; another one may be given instead. A folder that holds something is
    kept unless `overwrite` says that all of it may go. `quantize` "int8" or "int4" makes the weights a quarter or a
    seventh of float32's size.
    """
    how: dict[str, Any] = {"max_shard": max_shard, "overwrite": overwrite, "quantize": quantize}
    if isinstance(model, Loaded):
        how |= {"also": model.pooling.files(model.model), "name": model.name, "source": model.folder}
        save_model(model.model, folder, tokenizer or model.tokenizer, **how)
    else:
        save_model(model, folder, tokenizer, **how)


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: Precision | None = None,
    kv_cache: CacheType | None = None,
    context_length: int | None = None,
    tensor_parallel: bool = False,
) -> Loaded:
    """Load a model that ships with heedful, a folder in the hub's layout, a GGUF file, or a model of the hub
    ("org/name", downloaded once).

    `device` is the CPU unless given, "auto" a GPU where there is one; `dtype` None keeps the type of the stored
    weights. `quantize` packs them for inference: "float32" as they are, "bfloat16" and "float16" in half the memory,
    "int8" and "int4" in less.
    `kv_cache` "int8" stores keys and values in 8 bits while it generates, about a quarter of float32's memory.
    `context_length` lets a model with rotary positions read more tokens than it was trained for, or fewer.
    `tensor_parallel` divides it over the processes of torchrun (heedful.kernels.tensor_parallel).
    """
    how: dict[str, Any] = {"device": choose_device(device or "cpu"), "dtype": dtype}
    how["integers"] = quantize in ("int8", "int4")
    if tensor_parallel and quantize is not None:
        raise ValueError("a model that is divided over processes is not packed: leave out quantize or tensor_parallel")
    if tensor_parallel:
        from heedful.kernels.tensor_parallel import parallelize, process_mesh

        mesh = process_mesh(device)
        how |= {"device": torch.device(mesh.device_type), "prepare": partial(parallelize, mesh=mesh)}
    loaded = _load(name, how)
    if context_length is not None:
        loaded.model.set_context_length(context_length)
    if kv_cache is not None:
        loaded.model.set_kv_cache(kv_cache)
    if quantize is not None:
        accelerate(loaded.model, "inference", precision=quantize)
    return loaded


def _load(name: str | Path, how: dict[str, Any]) -> Loaded:
    path = resolve_model(name)
    if path.is_dir():
        if not (path / "config.json").exists() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return Loaded(*load_gguf(files[0], **how), path.name)
        if is_adapter(path) and "prepare" in how:
            raise ValueError(f"{path} is an adapter: for tensor_parallel merge it into its model (heedful export)")
        if is_adapter(path):  # peft writes an adapter without its model's tokenizer
            loaded = _load(base_of(path), how)
            loaded.model, loaded.name = with_adapter(loaded.model, path), model_name(name, path)
        else:
            loaded = Loaded(load_folder(path, **how), None, model_name(name, path))
        if has_tokenizer(path):
            loaded.tokenizer = Tokenizer.from_folder(path)
        if (path / "modules.json").exists():
            loaded.pooling = Pooling.from_folder(path)
        loaded.folder = path
        return loaded
    reject_pickle(path)
    if path.suffix == ".gguf":
        return Loaded(*load_gguf(path, **how), path.stem)
    raise ValueError(f"{path} is a single file: give its folder (with config.json), or a .gguf file")
