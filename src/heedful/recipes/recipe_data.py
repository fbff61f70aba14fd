"""What a recipe's data is: datasets, and what they imply for the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heedful.data.dataset import Dataset


@dataclass
class RecipeData:
    """A recipe's datasets, and what they imply for the model."""

    train: Dataset
    validation: Dataset | None
    n_tokens: int = 0  # of training text, to choose a model size by
    settings: dict[str, Any] = field(default_factory=dict)  # entries that the data implies for the model's config
    bytes_per_token: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)  # reference losses in nats
    counts: np.ndarray | None = None  # of each token id in a text, for a model that begins with them
    notes: list[str] = field(default_factory=list)
    preprocessor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json of a model for images
    generation: dict[str, Any] = field(default_factory=dict)  # entries of generation_config.json
    answers: list[str] = field(default_factory=list)  # that a reward compares with, by the number of the prompt
