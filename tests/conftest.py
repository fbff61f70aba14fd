"""Settings for all tests."""

import os
from collections import Counter
from pathlib import Path

import heedful  # noqa: F401  # isort: skip  before PyTorch: it sets how threads share the cores
import torch

import support.real  # noqa: F401  looks for real weights before they are hidden

torch.set_num_threads(1)  # the models are tiny and two tests run side by side
os.environ["HEEDFUL_MODELS"] = str(Path(__file__).parent / "none")  # what the user has pulled changes no test


def pytest_terminal_summary(terminalreporter):
    """How much of the documents was executed (tests/docs), also where other processes did it."""
    done, pages = Counter(), 0
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else []:
            if name == "documents":
                done.update(value)
                pages += 1
    if pages:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(done.items()))
        terminalreporter.write_line(f"documents: {pages} pages, {counts}")
