"""The device that a model runs on: a CUDA GPU, Apple's GPU ("mps"), or the CPU.

Kernels of our own are for the CPU and for CUDA; on any other device PyTorch's operators compute everything.
"""

from __future__ import annotations

import torch

NAMES = "auto, cpu, cuda, cuda:N or mps"


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device of this name; "auto" is a CUDA GPU where there is one, else Apple's, else the CPU. ValueError for a
    device that this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"the device is {name!r}: it is {NAMES}") from None
    if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
        have = f"{there} that PyTorch can use" if there else "none that PyTorch can use"
        raise ValueError(f"the device is {name}, and of such GPUs this machine has {have}: use {NAMES}")
    if device.type == "mps" and not has_mps():
        raise ValueError(f"the device is mps, an Apple GPU, and PyTorch can use none here: use {NAMES}")
    return device


def has_mps() -> bool:
    """Whether PyTorch can use an Apple GPU here."""
    return torch.backends.mps.is_available()


def choose_process_device(name: str | torch.device, local_rank: int) -> torch.device:
    """The device of one of torchrun's processes: each has a CUDA GPU of its own, or all are on the CPU."""
    device = choose_device(name)
    if device.type == "mps":  # PyTorch has no collectives there
        if name == "auto":
            return torch.device("cpu")
        raise ValueError("an Apple GPU is for a single process: start without torchrun, or use the device cpu")
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(f"the device is {name}, but each process takes the GPU of its own number: use cuda")
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise ValueError(
            f"process {local_rank} of this machine has no GPU, there are {there}: start torchrun with "
            f"--nproc-per-node {there}, or use the device cpu"
        )
    return torch.device("cuda", local_rank)
