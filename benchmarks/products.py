"""Speed of matrix products with packed weights: each kernel, shape and batch, in GB/s of weights and in µs.

    python benchmarks/products.py [--threads 2] [--shapes 768x2304 ...] [--batch 1 8] [--runs 9]

Decoding reads all weights for every token, so that memory bandwidth is the limit: the first line is the bandwidth of a
memory copy. Every kernel has more matrices than fit into the caches, and runs alternate between the kernels. Times are
medians of calls from Python, including the quantization of activations where the kernel needs it. The rows are our C
kernels (kernels/cpu) and the alternatives in PyTorch; a kernel that cannot run here is listed with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels import packed

# GPT-2 124M: query, key and value; up; down; head. SmolLM2-135M: the same, its gate with up.
SHAPES = ("2304x768", "3072x768", "768x3072", "50257x768", "960x576", "3072x576", "576x1536", "49152x576")
CACHES = 64e6  # bytes, more than the caches hold

Product = Callable[[Tensor], Tensor]


def packed_kernel(
    implementation: type[packed.Packed], kind: packed.Precision
) -> tuple[Callable[[Tensor], Product], torch.dtype, float]:
    dtype = packed.FLOATS.get(kind, torch.float32)

    def make(weight: Tensor) -> Product:
        if not implementation.fits(*weight.shape):
            raise ValueError("shape does not fit")
        return implementation(weight.to(dtype), None)

    return make, packed.activations("cpu", kind), {"int8": 1, "int4": 0.625}.get(kind, dtype.itemsize)


def linear(dtype: torch.dtype) -> Callable[[Tensor], Product]:
    def make(weight: Tensor) -> Product:
        converted = weight.to(dtype)
        return lambda x: F.linear(x, converted)

    return make


def weight_only_int8(weight: Tensor) -> Product:
    ints, scales = packed.quantize_rows(weight)
    narrow = scales.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, ints, narrow)


def dynamic_int8(engine: str) -> Callable[[Tensor], Product]:
    """PyTorch's dynamic quantization: one scale for all of x, so that rows depend on each other."""

    def make(weight: Tensor) -> Product:
        ints, scales = packed.quantize_rows(weight)
        before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(ints, scales.double(), zeros, 0)
        prepacked = torch.ops.quantized.linear_prepack(tensor, None)
        torch.backends.quantized.engine = before
        return lambda x: torch.ops.quantized.linear_dynamic(x, prepacked, False)

    return make


KERNELS: dict[str, tuple[Callable[[Tensor], Product], torch.dtype, float]] = {
    "linear float32": (linear(torch.float32), torch.float32, 4),
    "our float32": packed_kernel(packed.Float32Panels, "float32"),
    "packed float32": packed_kernel(packed.OneDnn, "float32"),
    "linear bfloat16": (linear(torch.bfloat16), torch.bfloat16, 2),
    "our bfloat16": packed_kernel(packed.BFloat16Panels, "bfloat16"),
    "packed bfloat16": packed_kernel(packed.OneDnn, "bfloat16"),
    "our float16": packed_kernel(packed.Float16Panels, "float16"),
    "packed float16": packed_kernel(packed.Float16Fbgemm, "float16"),
    "our int8": packed_kernel(packed.Int8Panels, "int8"),
    "dynamic int8, fbgemm": (dynamic_int8("fbgemm"), torch.float32, 1),
    "dynamic int8, onednn": (dynamic_int8("onednn"), torch.float32, 1),
    "weight-only int8": (weight_only_int8, torch.bfloat16, 1),
    "our int4": packed_kernel(packed.Int4Panels, "int4"),
    "packed int4": packed_kernel(packed.Int4Aten, "int4"),
}


def copy_bandwidth(runs: int) -> float:
    """Bytes read and written per second by a memory copy."""
    source = torch.ones(int(CACHES) // 4)
    target = torch.empty_like(source)
    took = []
    for _ in range(runs):
        begin = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(took)


def build(shape: tuple[int, int]) -> dict[str, list[Product]]:
    """For every kernel, more copies of a random weight than fit into the caches."""
    weight = 0.02 * torch.randn(shape)
    products: dict[str, list[Product]] = {}
    for name, (make, dtype, size) in KERNELS.items():
        try:
            make(weight)(torch.randn(2, shape[1]).to(dtype))
        except (RuntimeError, ValueError, AttributeError) as problem:
            print(f"{shape[0]}x{shape[1]:<6} {'any':>5}  {name:22} {str(problem).splitlines()[0][:60]}")
            continue
        n_copies = max(2, int(CACHES // (weight.numel() * size)) + 1)
        products[name] = [make(weight.clone()) for _ in range(n_copies)]
    return products


def measure(shape: tuple[int, int], batch: int, products: dict[str, list[Product]], runs: int) -> None:
    times: dict[str, list[float]] = {}
    for _ in range(runs + 1):  # the first is a warm-up
        for name, each in products.items():
            x = torch.randn(batch, shape[1]).to(KERNELS[name][1])
            begin = time.perf_counter()
            for product in each:
                product(x)
            times.setdefault(name, []).append((time.perf_counter() - begin) / len(each))
    for name, took in times.items():
        median = statistics.median(took[1:])
        n_bytes = shape[0] * shape[1] * KERNELS[name][2]
        print(f"{shape[0]}x{shape[1]:<6} {batch:>5}  {name:22} {n_bytes / median / 1e9:6.1f} {median * 1e6:9.1f}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTPUTSxINPUTS")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"{arguments.threads} threads, torch {torch.__version__}, copy {copy_bandwidth(arguments.runs) / 1e9:.1f} GB/s"
    )
    print(f"{'weights':12} {'batch':>5}  {'kernel':22} {'GB/s':>6} {'us':>9}")
    for shape in arguments.shapes:
        n_outputs, n_inputs = map(int, shape.split("x"))
        products = build((n_outputs, n_inputs))
        for batch in arguments.batch:
            measure((n_outputs, n_inputs), batch, products, arguments.runs)


if __name__ == "__main__":
    main()
