"""The instruction sets that the C kernels are compiled for, each into a library of its own.

The sources are the same: `csrc/vector.h` chooses by what the compiler may use. A target's name is that of its library
in `prebuilt/`, and what HEEDFUL_KERNELS=NAME chooses. Standard library alone, but for PyTorch's answer to what this
processor has: `hatch_build.py` reads the table where PyTorch is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An instruction set: the compiler's flags, and what a processor must have (`torch.cpu.get_capabilities`)."""

    name: str
    architecture: str  # as compilers name it
    instructions: str  # for people
    flags: tuple[str, ...]
    needs: frozenset[str]


# Capability: flag. Every processor with AVX2 has the others of the first list, but a virtual machine may hide some.
_AVX2 = {
    "avx2": "-mavx2", "fma3": "-mfma", "f16c": "-mf16c", "bmi": "-mbmi", "bmi2": "-mbmi2", "lzcnt": "-mlzcnt",
    "popcnt": "-mpopcnt",
}  # fmt: skip
_AVX512 = _AVX2 | {
    "avx512_f": "-mavx512f", "avx512_bw": "-mavx512bw", "avx512_dq": "-mavx512dq", "avx512_vl": "-mavx512vl",
}  # fmt: skip
_VNNI_BF16 = _AVX512 | {"avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16"}
_NEON = frozenset({"neon", "dot", "fp16_arith"})


def _x86(name: str, instructions: str, capabilities: dict[str, str]) -> Target:
    return Target(name, "x86_64", instructions, tuple(capabilities.values()), frozenset(capabilities))


TARGETS = (  # the best of an architecture first
    _x86("avx512-vnni-bf16", "AVX-512 with VNNI and BF16", _VNNI_BF16),
    _x86("avx512", "AVX-512", _AVX512),
    _x86("avx2", "AVX2", _AVX2),
    Target(
        "neon-i8mm", "aarch64", "NEON with int8 matrix products and BF16", ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",),
        _NEON | {"i8mm", "bf16"},
    ),
    Target("neon", "aarch64", "NEON with dot products", ("-march=armv8.2-a+fp16+dotprod",), _NEON),
)  # fmt: skip


def supported_targets() -> list[Target]:
    """The targets that this processor and its operating system can run, the best first."""
    import torch

    here = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    return [target for target in TARGETS if target.needs <= here]
