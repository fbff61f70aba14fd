"""On a GPU: tokens per second of heedful and of the peers that are found, with random weights of real shapes.

    python benchmarks/gpu.py [--nanogpt FOLDER]                      all parts, each at most ten minutes
    python benchmarks/gpu.py decode [--models gpt2 gpt2-xl llama-1b] [--rows 1 32 64] [--precisions bfloat16 int8 int4]
                                    [--temperature 0.8 --top-p 0.9]
    python benchmarks/gpu.py peers [--models gpt2] [--rows 1 32]     transformers, as it is and compiled (static cache)
    python benchmarks/gpu.py divergence                              of bfloat16 from float32, in nats per token
    python benchmarks/gpu.py profile [--models gpt2] [--rows 1]      the kernels of a step, longest first

All parts are these, serving_gpu.py and training_gpu.py. A prompt of 128 tokens and 256 new ones for each row, greedy
unless a temperature is given; the best of three runs counts, without the prefill. The limit is the bytes of the weights
over the memory's bandwidth, measured by a copy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from heedful import create
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate, n_bytes
from heedful.kernels.cuda import decode_graphs
from heedful.models.base import Batch, DecoderModel
from heedful.models.llama import Llama, LlamaConfig
from heedful.nn.paged import BlockPool, PagedState

PROMPT, NEW = 128, 256
GREEDY = Sampling(temperature=0)
LLAMA = dict(d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, d_head=64, d_ff=8192, vocab_size=128256)


def build(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> DecoderModel:
    """Ours, of a published shape."""
    torch.manual_seed(0)
    if name == "llama-1b":  # the shape of LLaMA 3.2 1B
        model: Any = Llama.create(LlamaConfig(**LLAMA, max_len=4096, theta=500000.0, tied=True), device=device)
    else:
        model = create(name, dropout=0.0)
    return model.to(device, dtype).eval()


def hub_model(name: str, device: str = "cuda") -> Any:
    """That of transformers."""
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers import LlamaConfig as HubLlama

    if name == "llama-1b":
        config: Any = HubLlama(
            hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
            intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True,
        )  # fmt: skip
    else:
        config = GPT2Config() if name == "gpt2" else GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y, times = torch.empty_like(x), []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * x.nbytes / median(times)


def requests(n_rows: int, new: int, sampling: Sampling = GREEDY) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5000, (n_rows, PROMPT), generator=draw).tolist()
    return [Request(tuple(row), max_tokens=new, sampling=sampling) for row in rows]


def engine_seconds(engine: Engine, n_rows: int, sampling: Sampling) -> float:
    """Of the new tokens but the first: from the first event of the last row to the end."""
    for request in requests(n_rows, NEW, sampling):
        engine.add(request)
    begun: set[int] = set()
    start = 0.0
    while engine.busy:
        begun |= {event.id for event in engine.step()}
        if not start and len(begun) == n_rows:
            start = time.perf_counter()
    return time.perf_counter() - start


def decode(options: argparse.Namespace) -> None:
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {speed / 1e12:.2f} TB/s")
    for name in options.models:
        for precision in options.precisions:
            model = accelerate(build(name), "inference", precision=precision)
            limit = speed / (n_bytes(model) - model.embed.weight.nbytes * (precision not in ("float32", "bfloat16")))
            for n_rows in options.rows:
                engine = Engine(model, max_rows=n_rows, chunk=n_rows * PROMPT)
                sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=0)
                seconds = min(engine_seconds(engine, n_rows, sampling) for _ in range(3))
                rate = n_rows * (NEW - 1) / seconds
                print(
                    f"{name:9} {precision:9} {n_rows:3} rows: {rate:8,.0f} tokens/s, limit {limit * n_rows:9,.0f}",
                    flush=True,
                )
                del engine
            del model
            torch.cuda.empty_cache()


def peers(options: argparse.Namespace) -> None:
    import transformers

    for name in options.models:
        model = hub_model(name)
        for n_rows in options.rows:
            ids = torch.tensor([r.prompt for r in requests(n_rows, NEW)], device="cuda")
            for how, more in ("as it is", {}), ("compiled", {"cache_implementation": "static"}):
                took = []
                for new in (1, NEW, 1, NEW, 1, NEW):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                                   do_sample=False, pad_token_id=0, **more)  # fmt: skip
                    torch.cuda.synchronize()
                    took.append(time.perf_counter() - start)
                rate = n_rows * (NEW - 1) / (took[-1] - took[-2])
                print(
                    f"{name:9} {n_rows:3} rows, transformers {transformers.__version__} {how}: {rate:8,.0f}", flush=True
                )


def divergence(options: argparse.Namespace) -> None:
    """KL(float32 || bfloat16) of next tokens, of the engine's decode steps and of transformers' forward pass."""
    with torch.inference_mode():
        plain = build("llama-1b", torch.float32)
        for (
            p
        ) in plain.parameters():  # both from the same weights in bfloat16, larger than at first: sharper predictions
            p.copy_((p * 2).bfloat16())
        tokens = torch.randint(0, 5000, (1, 160), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        exact = plain(Batch(tokens)).logits[0].log_softmax(-1)[31:]
        weights = {name: p.clone() for name, p in plain.named_parameters()}
        fast = build("llama-1b")
        fast.load_state_dict({n: p.bfloat16() for n, p in weights.items()}, strict=False)
        whole = fast(Batch(tokens)).logits[0].float().log_softmax(-1)[31:]
        accelerate(fast, "inference")
        pool = BlockPool(64, 16)
        state = PagedState(pool, len(fast.decoder.blocks), 1)
        first, _ = fast.start(Batch(tokens[:, :32]), state=state)
        graphs, found = decode_graphs(fast, pool), [first[0].float()]
        assert graphs is not None
        found += [graphs.logits([int(token)], state)[0].float().clone() for token in tokens[0, 32:]]
        steps = torch.stack(found).log_softmax(-1)
        for name, logs in ("plain modules in bfloat16, one pass", whole), ("decode steps", steps):
            kl = (exact.exp() * (exact - logs)).sum(-1)
            print(f"{name}: {kl.mean().item():.2e} nats, highest {kl.max().item():.2e}")


def profile(options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for name in options.models:
        model = accelerate(build(name), "inference")
        for n_rows in options.rows:
            engine = Engine(model, max_rows=n_rows, chunk=n_rows * PROMPT)
            engine.run(requests(n_rows, 32))
            with record(activities=[ProfilerActivity.CUDA]) as profiled:
                engine.run(requests(n_rows, 32))
            found: dict[str, list[float]] = {}
            for event in profiled.events():
                if event.device_time_total and not event.name.startswith("cuda"):
                    found.setdefault(event.name[:60], []).append(event.device_time_total)
            print(f"{name}, {n_rows} rows, prefill and 32 tokens")
            for kernel, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:12]:
                print(f"  {kernel:60} {len(times):5} x {median(times):7.2f} us = {sum(times):9.0f} us")


def all_parts(nanogpt: str | None) -> None:
    """Each part in a process of its own, with what it prints."""
    every, few = ["--rows", "1", "32", "64"], ["--models", "gpt2", "llama-1b", "--rows", "1", "32"]
    parts = [
        ["gpu.py", "decode", *every],
        ["gpu.py", "decode", "--rows", "1", "--precisions", "int8", "int4"],
        ["gpu.py", "decode", *few, "--temperature", "0.8", "--top-p", "0.9"],
        ["gpu.py", "peers", *few],
        ["gpu.py", "divergence"],
        ["gpu.py", "profile", *few],
        ["serving_gpu.py"],
        ["training_gpu.py", *(["--nanogpt", nanogpt] if nanogpt else ["--only", "heedful"])],
    ]
    for name, *arguments in parts:
        print("$ python", f"benchmarks/{name}", *arguments, flush=True)
        command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
        try:
            subprocess.run(command, timeout=600, check=True)
        except subprocess.SubprocessError as problem:
            print(f"not finished: {problem}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["decode", "peers", "divergence", "profile"])
    parser.add_argument("--nanogpt", metavar="FOLDER", help="a folder with nanoGPT's model.py")
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama-1b", "gpt2-xl"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--precisions", nargs="+", default=["bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here that PyTorch can use")
    if options.part is None:
        return all_parts(options.nanogpt)
    {"decode": decode, "peers": peers, "divergence": divergence, "profile": profile}[options.part](options)


if __name__ == "__main__":
    main()
