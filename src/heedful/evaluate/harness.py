"""Models in EleutherAI's lm-evaluation-harness (`lm_eval`), in this process.

    from lm_eval import simple_evaluate
    simple_evaluate(HarnessModel(heedful.load("shakespeare")), tasks=["lambada_openai"])

A context and its continuation are scored as one echoed prompt, the request that `lm_eval --model local-completions`
sends to a server: both give the same numbers. A text longer than the model's context is truncated on the left, as
lm_eval's own models do; here the last token needs a position too, as in a server, so the context is one token shorter
than with `lm_eval --model hf`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.models.base import DecoderModel, Model
from heedful.text.tokenizer import Tokenizer

try:
    import lm_eval
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import ConfigurableTask, Task
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError as missing:
    raise ImportError("lm_eval is not installed: pip install 'heedful[harness]'") from missing

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # the texts (for a cache), and their tokens
SAMPLING_OPTIONS = {field.name for field in fields(Sampling)}


class LoadedDecoder(Protocol):
    """A decoder with its tokenizer, as `heedful.load` returns it."""

    model: Model
    tokenizer: Tokenizer | None

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end one."""
        ...


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A loaded decoder with lm_eval's interface.

    `max_length` is the most tokens of a context and its continuation, by default the model's context length;
    `add_special` adds the tokenizer's special tokens (LLaMA's <s>), as `lm_eval --model hf` does.
    """

    def __init__(
        self,
        loaded: LoadedDecoder,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_special: bool = True,
        max_rows: int = 64,
        chunk: int = 256,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        model, tokenizer = loaded.model, loaded.tokenizer
        if not isinstance(model, DecoderModel) or tokenizer is None:
            raise ValueError("lm_eval needs a model that continues a text, and its tokenizer")
        self.text, self.add_special = tokenizer, add_special
        self.max_length = max_length or model.context_length or 2048
        self.max_gen_toks, self.seed = max_gen_toks, seed
        self.bos_id, self.eos_ids = loaded.bos_id, loaded.eos_ids
        self.max_rows = max_rows
        try:
            self.engine = Engine(model, tokenizer, max_rows=max_rows, chunk=chunk, state="paged")
        except ValueError:  # a KV cache that cannot be paged
            self.engine = Engine(model, tokenizer, max_rows=max_rows, chunk=chunk)

    # --- text and tokens -------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        if not self.eos_ids:
            raise ValueError("this model has no token that ends a text, and this task needs one")
        return self.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self.eot_token_id if self.bos_id is None else self.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """The token ids of a text."""
        add = self.add_special if add_special_tokens is None else add_special_tokens
        return self.text.encode(string, add_special=add)

    # --- scores ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would give it."""
        found: list[tuple[float, bool]] = []
        bar = tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm)
        for begin in range(0, len(requests), self.max_rows):
            part = requests[begin : begin + self.max_rows]
            results = self.engine.run(
                [self._scoring_request(context, continuation) for _, context, continuation in part]
            )
            for (texts, _, continuation), result in zip(part, results, strict=True):
                assert result.prompt_scores is not None
                scores = [score for score in result.prompt_scores[-len(continuation) :] if score is not None]
                likeliest = all(score.logprob == score.top[0][1] for score in scores)
                found.append((sum(score.logprob for score in scores), likeliest))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, found[-1])
            bar.update(len(part))
        bar.close()
        return found

    def _scoring_request(self, context: list[int], continuation: list[int]) -> Request:
        if not context or not 0 < len(continuation) < self.max_length:
            raise ValueError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)}: both need one or more, "
                f"and the continuation must be shorter than the model's {self.max_length}"
            )
        tokens = (context + continuation)[-self.max_length :]
        return Request(tuple(tokens), max_tokens=0, echo=True, logprobs=1)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in consecutive windows; every token is scored once."""
        totals = []
        for request in tqdm(requests, desc="Scoring", disable=disable_tqdm):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs: list[Pair] = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    # --- texts -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The completion of each context, up to its first stop text."""
        prompts = [self._generation_request(*request.args) for request in requests]
        texts = [result.choices[0].text for result in self.engine.run(prompts)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generation_request(self, context: str, settings: Mapping[str, Any]) -> Request:
        rest: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        until, n = rest.pop("until"), rest.pop("max_gen_toks")
        if not rest.pop("do_sample"):
            rest["temperature"] = 0.0
        if unknown := sorted(set(rest) - SAMPLING_OPTIONS):
            raise ValueError(
                f"{', '.join(unknown)}: unknown in generation_kwargs; known: {', '.join(SAMPLING_OPTIONS)}"
            )
        if n >= self.max_length:
            raise ValueError(f"max_gen_toks is {n}: it must be less than the model's {self.max_length}")
        tokens = self.tok_encode(context)[n - self.max_length :] or [self.prefix_token_id]
        return Request(
            tuple(tokens),
            max_tokens=n,
            sampling=Sampling(**{"seed": self.seed, **rest}),
            stop=tuple(text for text in until if text),
            stop_ids=frozenset(self.eos_ids),
        )


# --- tasks without the network --------------------------------------------------------------------------------------


def _piqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of OpenAI's evaluations, where the question has its prompt around it."""
    goal = row["query"].removeprefix("Question: ").removesuffix("\n")
    return {"goal": goal, "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}


# lm_eval's definition, the file of rows, and the function that gives a row the columns of the definition.
TASKS: dict[str, tuple[str, str, Any]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_test_openai.jsonl.gz", dict),
    "piqa": ("piqa/piqa.yaml", "piqa.jsonl.gz", _piqa),
}


def local_task(name: str, folder: Path) -> Task:
    """lm_eval's task of this name (a key of TASKS), with its rows read from a file in `folder`."""
    import datasets
    import yaml

    definition, file, prepare = TASKS[name]
    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / definition).read_text())
    with gzip.open(folder / file, "rt", encoding="utf-8") as lines:
        rows = datasets.Dataset.from_list([prepare(json.loads(line)) for line in lines])
    for key in ("tag", "dataset_path", "dataset_name", "training_split"):
        config.pop(key, None)
    split = config["test_split"] or config["validation_split"]
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: {split: rows}})
