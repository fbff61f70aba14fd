"""Settings for all tests."""

import os
from pathlib import Path

import torch

import support.real  # noqa: F401  looks for real weights before they are hidden

torch.set_num_threads(1)  # the models are tiny and two tests run side by side
os.environ["HEEDFUL_MODELS"] = str(Path(__file__).parent / "none")  # what the user has pulled changes no test
