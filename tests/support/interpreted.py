"""The GPU's kernels on any machine where Triton is installed: `TRITON_INTERPRET=1` runs them in NumPy, without graphs.

`TRITON_INTERPRET=1 python -m pytest tests/kernels/test_cuda.py`. What it shows is what the kernels compute, not that
they compile, nor how fast they are.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch

from heedful.kernels import packed
from heedful.kernels.accelerate import accelerate
from heedful.kernels.cpu.decode import KernelStack
from heedful.kernels.cuda import decode_graphs, has_triton, supports_graphs
from heedful.models.base import DecoderModel
from heedful.nn.head import LanguageHead
from heedful.nn.paged import BlockPool

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
if INTERPRETED:
    from heedful.kernels.cuda import layers

    layers.DOT[torch.bfloat16] = layers.DOT[torch.float32]  # NumPy has no bfloat16: it would multiply their bits
    layers.attention_splits = lambda n_heads: 2 if n_heads > 1 else 1  # each program takes milliseconds
    layers.vector_blocks = lambda n_outputs, n_inputs, gated: (16, layers.triton.next_power_of_2(n_inputs), 4)


def accelerated(model: DecoderModel, precision: Any) -> DecoderModel:
    """`accelerate` for decoding by the GPU's kernels, on the device that stands for it."""
    if not INTERPRETED:
        return accelerate(model.cuda(), "inference", precision=precision)
    from heedful.kernels.cuda.decode import CudaHead, CudaStack

    with mock.patch.dict(packed.FASTER, clear=True), mock.patch.object(KernelStack, "replace"):
        accelerate(model, "inference", precision=precision)
    CudaStack.replace(model.decoder)
    if isinstance(model.head, LanguageHead):
        CudaHead.replace(model.head)
    return model


def graphs_of(model: DecoderModel, pool: BlockPool) -> Any:
    """`decode_graphs`, or steps that run as they are; None where there can be none."""
    if not INTERPRETED:
        return decode_graphs(model, pool)
    with mock.patch("heedful.kernels.cuda.is_on_gpu", return_value=True):
        if not supports_graphs(model):
            return None
    from heedful.kernels.cuda.graphs import DecodeGraphs, Recorded

    class Eager(DecodeGraphs):
        def _replay(self, recorded: Recorded) -> None:
            self._step(recorded)

        @staticmethod
        def _copy_to_host(chosen: torch.Tensor) -> tuple[Any, torch.Tensor]:
            return mock.Mock(), chosen.clone()

    return Eager(model, pool)
