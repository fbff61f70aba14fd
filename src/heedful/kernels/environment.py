"""The runtime environment: versions, devices, kernels, threads and the cache folder."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from heedful.kernels.cpu.library import status
from heedful.kernels.cuda import has_triton
from heedful.kernels.device import choose_device, has_mps
from heedful.paths import cache_folder


def describe_environment() -> str:
    """One line each for versions, devices, kernels, threads and cache folder."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    apple = ["mps (an Apple GPU, by PyTorch's operators)"] if has_mps() else []
    triton = "Triton's and CUDA graphs" if has_triton() else "PyTorch's alone, since Triton is not installed"
    lines = {
        "heedful": f"{version('heedful')}, Python {platform.python_version()}, PyTorch {torch.__version__}",
        "devices": f"{', '.join(['cpu', *gpus, *apple])}; auto is {choose_device()}",
        "C kernels": str(status()).removeprefix("C kernels: "),
        "GPU kernels": triton if gpus else "none, since there is no CUDA device",
        "threads": str(torch.get_num_threads()),
        "cache": str(cache_folder()),
    }
    return "\n".join(f"{name:13}{value}" for name, value in lines.items())
