"""Models in EleutherAI's lm-evaluation-harness (`lm_eval`), in this process.

    from lm_eval import simple_evaluate
    simple_evaluate(HarnessModel(heedful.load("shakespeare")), tasks=["lambada_openai"])

A context and its continuation are scored as one echoed prompt, the request that `lm_eval --model local-completions`
sends to a server: both give the same numbers. A text longer than the model's context is truncated on the left, as
lm_eval's own models do; here the last token needs a position too, as in a server, so the context is one token shorter
than with `lm_eval --model hf`. On a GPU, where a pass for each request would wait for its launches, they are scored in
padded batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import partial
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from heedful.data import tables
from heedful.evaluate.bootstrap import Metric, mean_metric
from heedful.evaluate.perplexity import score_continuations
from heedful.evaluate.task import Item, LoadedModel, Record, Task
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.models.base import DecoderModel, Model
from heedful.text.tokenizer import Tokenizer

try:
    import datasets
    import lm_eval
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.api.task import Task as HarnessTask
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml
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
        if not isinstance(model, DecoderModel) or "generate" not in model.abilities or tokenizer is None:
            raise ValueError("lm_eval needs a model that continues a text, and its tokenizer")
        self.model, self.text, self.add_special = model, tokenizer, add_special
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
        score = self._echoed if self.model.device.type == "cpu" else partial(score_continuations, self.model)
        for begin in range(0, len(requests), self.max_rows):
            part = requests[begin : begin + self.max_rows]
            scores = score([(self._joined(context, new), len(new)) for _, context, new in part])
            for (texts, _, _), one in zip(part, scores, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, one)
            found += scores
            bar.update(len(part))
        bar.close()
        return found

    def _joined(self, context: list[int], continuation: list[int]) -> list[int]:
        if not context or not 0 < len(continuation) < self.max_length:
            raise ValueError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)}: both need one or more, "
                f"and the continuation must be shorter than the model's {self.max_length}"
            )
        return (context + continuation)[-self.max_length :]

    def _echoed(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """The log-probability of the last n tokens of each text, and whether all are the likeliest, by the engine."""
        results = self.engine.run([Request(tuple(ids), max_tokens=0, echo=True, logprobs=1) for ids, _ in texts])
        found = []
        for (_, n), result in zip(texts, results, strict=True):
            assert result.prompt_scores is not None
            scores = [score for score in result.prompt_scores[-n:] if score is not None]
            likeliest = all(score.logprob == score.top[0][1] for score in scores)
            found.append((sum(score.logprob for score in scores), likeliest))
        return found

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
    """A row of PIQA; in OpenAI's evaluations the question has its prompt around it."""
    if "goal" in row:
        return dict(row)
    goal = row["query"].removeprefix("Question: ").removesuffix("\n")
    return {"goal": goal, "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}


def _winogrande(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of WinoGrande; in OpenAI's evaluations each option has the text before it, and the rest stands apart."""
    if "sentence" in row:
        return dict(row)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*row["context_options"], strict=False))
    before = "".join(character for character, _ in same)
    one, two = (text[len(before) :] for text in row["context_options"])
    return {
        "sentence": f"{before}_ {row['continuation']}",
        "option1": one,
        "option2": two,
        "answer": str(row["gold"] + 1),
    }


def _hellaswag(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "label": str(row["label"])}


# The folder of lm_eval's definition, the pattern of files with rows (.jsonl, perhaps compressed), and the function that
# gives a row the columns of the definition.
LOCAL_TASKS: dict[str, tuple[str, str, Any]] = {
    "lambada_openai": ("lambada", "lambada*", dict),
    "winogrande": ("winogrande", "winogrande*", _winogrande),
    "hellaswag": ("hellaswag", "hellaswag*", _hellaswag),
    "piqa": ("piqa", "piqa*", _piqa),
    "arc_easy": ("arc", "arc[_-]easy*", dict),
    "arc_challenge": ("arc", "arc[_-]challenge*", dict),
}


def local_file(name: str, path: Path) -> Path:
    """The file with the rows of a task: `path` itself, or the one in that folder that has the task's name."""
    if not path.is_dir():
        return path
    _, pattern, _ = LOCAL_TASKS[name]
    found = sorted(p for p in path.iterdir() if fnmatch(p.name.lower(), pattern) and tables.file_kind(p) == "jsonl")
    if not found:
        raise ValueError(f"{path} has no file {pattern}.jsonl(.gz) with the rows of {name}")
    return found[0]


def local_task(name: str, path: Path) -> HarnessTask:
    """lm_eval's task of this name (a key of LOCAL_TASKS) from its own registry, with its rows read from a file, or from
    the one in the folder `path`."""
    folder, _, prepare = LOCAL_TASKS[name]
    rows = [prepare(row.cells) for row in tables.read_rows(local_file(name, path), named=True)]
    dataset = datasets.Dataset.from_list(rows)
    registry = TaskManager(include_path=str(Path(lm_eval.__file__).parent / "tasks" / folder), include_defaults=False)
    config = load_yaml(registry.task_index[name].yaml_path)
    split = config.get("test_split") or config["validation_split"]
    for key in ("tag", "dataset_path", "dataset_name", "training_split", "validation_split", "test_split"):
        config.pop(key, None)
    config["test_split"] = split
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: {split: dataset}})


def hub_task(name: str) -> HarnessTask:
    """lm_eval's task of any name; its data is downloaded from the hub."""
    registry = TaskManager()
    if name not in registry.all_subtasks:
        raise ValueError(f"{name} is no task of lm_eval; `lm_eval ls tasks` lists them")
    try:
        return registry.load([name])["tasks"][name]
    except ConnectionError as problem:
        instead = ": give a file or a folder with its rows as .jsonl" if name in LOCAL_TASKS else ""
        raise ValueError(f"{problem}{instead}") from None


# --- a task of ours ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageModelTask(Task):
    """A task of lm_eval, with its own prompts, filters and metrics."""

    about: ClassVar[str] = "a task of lm-evaluation-harness"
    reads: ClassVar[str] = "a folder with its rows as .jsonl or .jsonl.gz, or such a file; without it, the hub's"
    batch_size: ClassVar[int] = 16
    n_files: ClassVar[tuple[int, int]] = (0, 1)

    name: str = ""  # lm_eval's

    def resolved(self, loaded: LoadedModel) -> Task:
        """The same; the model must continue a text."""
        model = loaded.model
        if not isinstance(model, DecoderModel) or "generate" not in model.abilities or loaded.tokenizer is None:
            raise ValueError(f"{self.name} is for models that continue a text; {loaded.name} is a {model.family}")
        return self

    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> list[Item]:
        """An example of the task each, with lm_eval's requests for it."""
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        model = HarnessModel(loaded)
        task = local_task(self.name, paths[0]) if paths and self.name in LOCAL_TASKS else hub_task(self.name)
        with redirect_stderr(StringIO()):  # its progress bar
            task.build_all_requests()
        requests: dict[int, list[Instance]] = {}
        for request in task.instances:
            requests.setdefault(request.doc_id, []).append(request)
        return [
            Item(str(i), (model, task, doc, requests[i]), _plain(task.doc_to_target(doc)), str(requests[i][0].args[0]))
            for i, doc in task.doc_iterator()
        ]

    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """The log-probabilities or texts of an item's requests, and lm_eval's metrics of it."""
        model, task = items[0].input[:2]
        return run_requests(model, task, [item.input[2:] for item in items])

    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """lm_eval's metrics: means, or perplexities of log-probabilities."""
        found = [_metric(name, [r["metrics"][name] for r in records]) for name in records[0]["metrics"]]
        known = [metric for metric in found if metric is not None]
        if not known:
            raise ValueError(f"{self.name} has metrics that are no means: run it by lm_eval's own command")
        return sorted(known, key=lambda metric: metric.unit == "")


def run_requests(model: Any, task: HarnessTask, docs: Sequence[tuple[Any, list[Instance]]]) -> list[Record]:
    """Give a model of lm_eval the requests of some examples, and evaluate the responses as lm_eval does."""
    by_type: dict[str, list[Instance]] = {}
    for _, requests in docs:
        for request in requests:
            request.resps, request.filtered_resps = [], {}
            by_type.setdefault(request.request_type, []).extend([request] * request.repeats)
    for kind, requests in by_type.items():
        for request, response in zip(requests, getattr(model, kind)(requests, disable_tqdm=True), strict=True):
            request.resps.append(response)
    task._instances = [request for _, requests in docs for request in requests]
    task.apply_filters()
    records = []
    for doc, requests in docs:
        first = next(iter(requests[0].filtered_resps))
        responses = [request.filtered_resps[first] for request in sorted(requests, key=lambda r: r.idx)]
        metrics = {name: _plain(value) for name, value in task.process_results(doc, responses).items()}
        score = metrics.get("acc", next(iter(metrics.values())))
        records.append({"prediction": _plain(responses), "score": score, "metrics": metrics})
    return records


def _metric(name: str, values: list[Any]) -> Metric | None:
    """lm_eval's aggregation of a metric by its name; None for one that is neither a mean nor a perplexity."""
    numbers = (
        np.asarray(values, dtype=float) if all(np.shape(v) == np.shape(values[0]) for v in values) else np.empty(0)
    )
    if name == "perplexity" and numbers.ndim == 1:
        return Metric(name, lambda counts: np.exp(-(counts @ numbers) / counts.sum(axis=1)), "", higher_is_better=False)
    if name in ("word_perplexity", "byte_perplexity", "bits_per_byte") and numbers.ndim == 2:
        return Metric(name, lambda counts: _per_unit(name, counts @ numbers), "", higher_is_better=False)
    return mean_metric(name, numbers.tolist()) if numbers.ndim == 1 and len(numbers) else None


def _per_unit(name: str, sums: np.ndarray) -> np.ndarray:
    nats = -sums[:, 0] / sums[:, 1]
    return nats / np.log(2) if name == "bits_per_byte" else np.exp(nats)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
