"""What an evaluation task is: it reads items from files, asks a model about them, and measures what it said.

A task is a frozen dataclass, and its fields are its settings. Of every item a record is kept, plain JSON; the metrics
are computed from the records alone, so that an evaluation can be resumed and two can be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from heedful.evaluate.bootstrap import Metric
from heedful.models.base import Model
from heedful.text.tokenizer import Tokenizer

Record = dict[str, Any]  # id, input, prediction, reference, score, and what the metrics need


class LoadedModel(Protocol):
    """A model with its tokenizer and what it can do, as `heedful.load` returns it."""

    model: Model
    tokenizer: Tokenizer | None
    name: str

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end one."""
        ...

    def require(self, ability: str) -> None:
        """ValueError unless it has the ability."""
        ...

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that the model has."""
        ...

    @property
    def generate(self) -> Any:
        """Continue a list of texts."""
        ...

    @property
    def translate(self) -> Any:
        """Translate a list of texts."""
        ...

    @property
    def classify(self) -> Any:
        """The labels of texts."""
        ...

    @property
    def answer(self) -> Any:
        """The answer to a question in a passage."""
        ...

    @property
    def embed(self) -> Any:
        """The embeddings of texts."""
        ...


@dataclass(frozen=True)
class Item:
    """What the model is asked, and the right answer; `shown` is what the record keeps of the input."""

    id: str
    input: Any
    reference: Any
    shown: str


@dataclass(frozen=True)
class Task(ABC):
    """A kind of evaluation; fields are its settings."""

    about: ClassVar[str]  # what is measured
    reads: ClassVar[str]  # which data
    batch_size: ClassVar[int] = 32  # items that are asked at once; records are written after each batch
    n_files: ClassVar[tuple[int, int]] = (1, 1)  # at least, at most

    def resolved(self, loaded: LoadedModel) -> Task:
        """The task with the settings that follow from the model; ValueError if the model cannot do it."""
        return self

    @abstractmethod
    def items(self, loaded: LoadedModel, paths: Sequence[Path]) -> Sequence[Item]:
        """The items in the data."""

    @abstractmethod
    def predict(self, loaded: LoadedModel, items: Sequence[Item]) -> list[Record]:
        """What the model says to each item: its prediction, score, and numbers that the metrics need."""

    @abstractmethod
    def metrics(self, records: Sequence[Record]) -> list[Metric]:
        """The metrics of these records, the most important first."""

    def details(self, records: Sequence[Record]) -> dict[str, Any]:
        """More about the result: signatures, a confusion matrix, as plain JSON."""
        return {}
