"""The programs that benchmarks/generation.py compares: each loads its model and returns a function that writes n tokens
for each of so many rows, greedily, as its users would have it.

What a program must convert first it keeps in the folder `converted` of the model's own. Of LitGPT, whose python may be
another one, and of onnxruntime, whose graph has a file of its own, more is said below.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PROMPT = 128
Speak = Callable[[int, int], object]  # rows, new tokens


def prompts(rows: int) -> Any:
    import torch

    return torch.randint(5, 5000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))


def converted(folder: str, name: str, convert: Callable[[Path, Path], object]) -> Path:
    """A folder of what `convert` made, in a process of its own, so that the memory it took is given back."""
    place = Path(folder) / "converted" / name
    if not place.exists():
        part = place.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            apart.submit(convert, Path(folder), part).result()
        part.rename(place)
    return place


def step_by_step(rows: int, n: int, step: Callable[[Any, Any, int], Any]) -> Any:
    """Greedy, for the programs that leave the loop to their users: tokens, positions, length so far -> next tokens."""
    import numpy as np

    tokens, out = prompts(rows).numpy(), []
    positions = np.arange(PROMPT)[None].repeat(rows, 0)
    for total in range(PROMPT, PROMPT + n):
        tokens = step(tokens, positions, total)
        out.append(tokens)
        positions = np.full((rows, 1), total)
    return np.concatenate(out, 1)


def heedful(folder: str, precision: str) -> Speak:
    import heedful
    from heedful.generate.batch import greedy_batch
    from heedful.models.base import Batch

    loaded = heedful.load(folder, quantize=precision)
    return lambda rows, n: greedy_batch(loaded.model, Batch(prompts(rows)), n)


def transformers(folder: str, precision: str) -> Speak:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    def speak(rows: int, n: int) -> object:
        prompt = prompts(rows)
        limits = {"min_new_tokens": n, "max_new_tokens": n, "pad_token_id": 0}
        with torch.inference_mode():
            return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **limits)

    return speak


def ctranslate2(folder: str, precision: str) -> Speak:
    import ctranslate2

    place = converted(folder, f"ctranslate2-{precision}", partial(ctranslate2_convert, precision))
    model = ctranslate2.Generator(str(place), device="cpu", intra_threads=2, compute_type=precision)
    words = json.loads((place / "vocabulary.json").read_text())

    def speak(rows: int, n: int) -> object:
        prompt = [[words[i] for i in row] for row in prompts(rows).tolist()]
        limits = {"max_length": n, "min_length": n, "end_token": []}
        return model.generate_batch(prompt, sampling_topk=1, include_prompt_in_result=False, **limits)

    return speak


def ctranslate2_convert(precision: str, folder: Path, place: Path) -> None:
    import ctranslate2

    converter = ctranslate2.converters.TransformersConverter(str(folder))
    converter.convert(str(place), quantization=None if precision == "float32" else precision, force=True)


def nanogpt(folder: str, precision: str) -> Speak:
    import torch

    if "NANOGPT" not in os.environ:
        raise RuntimeError("no --nanogpt")
    if json.loads((Path(folder) / "config.json").read_text())["model_type"] != "gpt2":
        raise RuntimeError("it has GPT-2 only")
    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(dropout=0.0)).eval().to(getattr(torch, precision))
    return lambda rows, n: model.generate(prompts(rows), n, top_k=1)


# --- LitGPT ----------------------------------------------------------------------------------------------------------


def litgpt(folder: str, precision: str) -> Speak:
    """Its own loops, `generate_fn` for one row and `batched_generate_fn` for more, with the cache as long as needed.

    A model that LitGPT lists (SmolLM2, say) is converted by its own script. GPT-2 it does not have: no learned
    positions. The same shape is built with its GPT-NeoX parts, unrotated, with random weights; every matrix is there.
    """
    import torch
    from litgpt import GPT  # type: ignore[import-not-found]
    from litgpt.generate.base import batched_generate_fn, generate_fn  # type: ignore[import-not-found]

    config = litgpt_config(json.loads((Path(folder) / "config.json").read_text()))
    with torch.device("meta" if config.name else "cpu"):
        model = GPT(config)
    if config.name:
        place = converted(folder, "litgpt", litgpt_convert)
        weights = torch.load(place / "lit_model.pth", mmap=True)
        model = model.to_empty(device="cpu")
        model.load_state_dict({"lm_head.weight": weights["transformer.wte.weight"], **weights})
        model.reset_parameters()
    model = model.to(getattr(torch, precision)).eval()

    def speak(rows: int, n: int) -> object:
        whole = PROMPT + n
        model.max_seq_length = whole
        model.clear_kv_cache()
        model.set_kv_cache(rows, dtype=getattr(torch, precision))
        kept = {"include_prompt": False, "include_eos": False}
        if rows == 1:
            return list(generate_fn(model, prompts(1)[0], whole, temperature=0.0, **kept))
        return list(batched_generate_fn(model, prompts(rows), whole, sample_args={"temperature": 0.0}, **kept))

    return speak


def litgpt_config(hub: dict[str, Any]) -> Any:
    from litgpt.config import Config, configs  # type: ignore[import-not-found]

    if hub["model_type"] == "gpt2":
        shape = {name: hub[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
        return Config(
            **shape, padded_vocab_size=hub["vocab_size"], block_size=hub["n_positions"], rotary_percentage=0.0,
            parallel_residual=False, bias=True, attn_bias=True, gelu_approximate="tanh",
        )  # fmt: skip
    names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
    names |= {"padded_vocab_size": "vocab_size", "intermediate_size": "intermediate_size"}
    for known in configs:
        if all(known.get(ours) == hub[theirs] for ours, theirs in names.items()):
            return Config.from_name(known["name"])
    raise RuntimeError("LitGPT lists no model of this shape")


def litgpt_convert(folder: Path, place: Path) -> None:
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint  # type: ignore[import-not-found]

    (place / "model.safetensors").symlink_to((folder / "model.safetensors").resolve())
    name = litgpt_config(json.loads((folder / "config.json").read_text())).name
    convert_hf_checkpoint(place, model_name=name)


# --- onnxruntime -----------------------------------------------------------------------------------------------------


def onnxruntime(folder: str, precision: str) -> Speak:
    """A graph of fused operators (onnx_decoder.py), caches bound in place; int8 by quantize_dynamic."""
    import numpy as np
    import onnxruntime

    place = converted(folder, f"onnx-{precision}", onnx_int8 if precision == "int8" else onnx_float32)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(place / "model.onnx", settings, providers=["CPUExecutionProvider"])
    caches = [put for put in session.get_inputs() if put.name.startswith("past")]

    def speak(rows: int, n: int) -> object:
        binding = session.io_binding()
        binding.bind_output("next", "cpu")
        for put in caches:
            room = np.zeros((rows, put.shape[1], PROMPT + n, put.shape[3]), np.float32)
            cache = onnxruntime.OrtValue.ortvalue_from_numpy(room)
            binding.bind_ortvalue_input(put.name, cache)
            binding.bind_ortvalue_output(put.name.replace("past", "present"), cache)

        def step(tokens: Any, positions: Any, total: int) -> Any:
            binding.bind_cpu_input("input_ids", tokens)
            binding.bind_cpu_input("position_ids", positions)
            binding.bind_cpu_input("last", np.full(rows, total - 1, np.int32))
            binding.bind_cpu_input("total", np.array(total, np.int32))
            session.run_with_iobinding(binding)
            return binding.get_outputs()[0].numpy().copy()

        return step_by_step(rows, n, step)

    return speak


def onnx_float32(folder: Path, place: Path) -> None:
    from onnx_decoder import build

    build(folder, place / "model.onnx")


def onnx_int8(folder: Path, place: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = converted(str(folder), "onnx-float32", onnx_float32)
    quantize_dynamic(
        plain / "model.onnx",
        place / "model.onnx",
        op_types_to_quantize=["MatMul"],
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": 1},  # float: it does not know the types of onnxruntime's operators
    )


# --- OpenVINO --------------------------------------------------------------------------------------------------------


def openvino(folder: str, precision: str) -> Speak:
    """transformers' model, converted and made stateful as optimum-intel does; int8 weights by nncf, its defaults."""
    import numpy as np
    import openvino

    convert = openvino_int8 if precision == "int8" else openvino_float32  # bfloat16 is made when it is compiled
    place = converted(folder, convert.__name__, convert)
    settings = {"INFERENCE_NUM_THREADS": 2, "PERFORMANCE_HINT": "LATENCY"}
    kind = {"float32": "f32", "bfloat16": "bf16"}.get(precision)
    if kind:
        settings |= {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    request = openvino.Core().compile_model(place / "model.xml", "CPU", settings).create_infer_request()

    def speak(rows: int, n: int) -> object:
        request.reset_state()

        def step(tokens: Any, positions: Any, total: int) -> Any:
            given = {"input_ids": tokens, "position_ids": positions, "beam_idx": np.arange(rows)}
            request.infer(given, share_inputs=True)
            return request.get_output_tensor(0).data.copy()

        return step_by_step(rows, n, step)

    return speak


def openvino_float32(folder: Path, place: Path) -> None:
    import openvino
    from openvino_decoder import build

    openvino.save_model(build(folder), place / "model.xml", compress_to_fp16=False)


def openvino_int8(folder: Path, place: Path) -> None:
    import nncf
    import openvino
    from openvino_decoder import build

    model = nncf.compress_weights(build(folder), mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(model, place / "model.xml", compress_to_fp16=False)


# --- llama.cpp -------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """llama.cpp through its own batched benchmark; it says itself how long prompt and answer took."""

    KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8_0"}  # noqa: RUF012

    def __init__(self, precision: str, folder: Path, sources: str | None, build: str = "build") -> None:
        if not sources:
            raise RuntimeError("no --llama-cpp")
        self.program = Path(sources) / build / "bin" / "llama-batched-bench"
        self.file = folder / "converted" / f"llama-{self.KINDS[precision]}.gguf"
        if not self.file.exists():
            self.file.parent.mkdir(exist_ok=True)
            part = self.file.with_suffix(".part")
            convert = [sys.executable, str(Path(sources) / "convert_hf_to_gguf.py"), str(folder)]
            convert += ["--outtype", self.KINDS[precision], "--outfile", str(part)]
            done = subprocess.run(convert, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            part.rename(self.file)

    def round(self, rows: int, n: int) -> tuple[float, float]:
        command = [str(self.program), "-m", str(self.file), "-t", "2", "-tb", "2", "-c", str(4096)]
        command += ["-npp", str(PROMPT), "-ntg", str(n), "-npl", str(rows), "--output-format", "jsonl"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        return row["t_pp"], row["t_pp"] + row["t_tg"]


# --- all of them -----------------------------------------------------------------------------------------------------

WORKERS: dict[str, Callable[[str, str], Speak]] = {
    "heedful": heedful,
    "transformers": transformers,
    "ctranslate2": ctranslate2,
    "litgpt": litgpt,
    "nanogpt": nanogpt,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}
PRECISIONS = {
    "float32": [
        "heedful", "transformers", "ctranslate2", "litgpt", "nanogpt", "onnxruntime", "openvino", "llama.cpp",
    ],
    "bfloat16": ["heedful", "transformers", "litgpt", "openvino", "llama.cpp"],
    "float16": ["heedful", "llama.cpp"],  # transformers' products in it take minutes on a CPU
    "int8": ["heedful", "ctranslate2", "onnxruntime", "openvino", "llama.cpp"],
    "int4": ["heedful"],
}  # fmt: skip
CONTENDERS = [(name, precision) for precision, names in PRECISIONS.items() for name in names]


def work(name: str, precision: str, folder: str) -> None:
    """In the worker's process: load, then answer each line "rows n" with the seconds it took."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some programs print
    torch.set_num_threads(2)
    speak = WORKERS[name](folder, precision)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        rows, n = map(int, line.split())
        begin = time.perf_counter()
        speak(rows, n)
        print(time.perf_counter() - begin, file=answers, flush=True)


if __name__ == "__main__":
    work(*sys.argv[1:])
