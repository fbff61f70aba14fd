"""The runtime environment: versions, devices, C kernels, threads and the cache folder."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from heedful.kernels.cpu.library import status
from heedful.paths import cache_folder


def describe_environment() -> str:
    """One line each for versions, devices, C kernels, threads and cache folder."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "heedful": f"{version('heedful')}, Python {platform.python_version()}, PyTorch {torch.__version__}",
        "devices": ", ".join(["cpu", *gpus]),
        "C kernels": str(status()).removeprefix("C kernels: "),
        "threads": str(torch.get_num_threads()),
        "cache": str(cache_folder()),
    }
    return "\n".join(f"{name:11}{value}" for name, value in lines.items())
