"""GPT-2 and LLaMA decoders as ONNX graphs, of the operators that onnxruntime's own model builder uses.

The graph takes tokens and their positions, extends the caches of keys and values where they lie (the same buffer is
bound as past and as present), and gives the most likely next token of each row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

MICROSOFT = "com.microsoft"


class Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: np.ndarray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, kind: str, *inputs: Any, out: tuple[str, ...] = ("",), domain: str = "", **attributes: Any) -> Any:
        """One operator; inputs are names or arrays. An output "" gets a name, an output "-" is not wanted."""
        names = [self.constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
        place = len(self.nodes)
        outs = ["" if o == "-" else o or f"x{place}_{i}" for i, o in enumerate(out)]
        self.nodes.append(helper.make_node(kind, names, outs, domain=domain, **attributes))
        return outs[0] if len(out) == 1 else outs


def build(folder: Path, file: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name.removeprefix("transformer.").removeprefix("model."): array.astype(np.float32)
        for name, array in load_file(folder / "model.safetensors").items()
    }
    graph = Graph()
    layers, groups, width = {"gpt2": gpt2, "llama": llama}[config["model_type"]](graph, config, weights)
    sizes = {"input_ids": ["rows", "n"], "position_ids": ["rows", "n"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, size) for name, size in sizes.items()]
    inputs.append(helper.make_tensor_value_info("last", TensorProto.INT32, ["rows"]))
    inputs.append(helper.make_tensor_value_info("total", TensorProto.INT32, []))
    outputs = [helper.make_tensor_value_info("next", TensorProto.INT64, ["rows", 1])]
    for i in range(layers):
        for part in ("key", "value"):
            shape = ["rows", groups, "room", width]
            inputs.append(helper.make_tensor_value_info(f"past.{i}.{part}", TensorProto.FLOAT, shape))
            outputs.append(helper.make_tensor_value_info(f"present.{i}.{part}", TensorProto.FLOAT, shape))
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.constants)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(made, opset_imports=versions, ir_version=9), file)


def attend(graph: Graph, i: int, qkv: str, heads: int, groups: int, rotary: tuple[Any, Any] | None = None) -> str:
    past = (f"past.{i}.key", f"past.{i}.value")
    attended, _, _ = graph.add(
        "GroupQueryAttention", qkv, "", "", *past, "last", "total", *(rotary or ()), domain=MICROSOFT,
        out=("", f"present.{i}.key", f"present.{i}.value"),
        num_heads=heads, kv_num_heads=groups, do_rotary=int(rotary is not None),
    )  # fmt: skip
    return attended


def speak(graph: Graph, normed: str, table: np.ndarray) -> None:
    final = graph.add("Gather", normed, np.array([-1]), axis=1)
    logits = graph.add("MatMul", final, table.T)  # (rows, 1, vocabulary)
    graph.add("ArgMax", logits, out=("next",), axis=2, keepdims=0)


def gpt2(graph: Graph, config: dict[str, Any], w: dict[str, np.ndarray]) -> tuple[int, int, int]:
    layers, heads, d = config["n_layer"], config["n_head"], config["n_embd"]
    epsilon = config["layer_norm_epsilon"]

    def norm(branch: str, bias: np.ndarray, x: str, name: str) -> Any:
        return graph.add(
            "SkipLayerNormalization", branch, x, w[f"{name}.weight"], w[f"{name}.bias"], bias,
            domain=MICROSOFT, out=("", "-", "-", ""), epsilon=epsilon,
        )  # fmt: skip

    positions = graph.add("Gather", w["wpe.weight"], "position_ids")
    branch, bias = graph.add("Gather", w["wte.weight"], "input_ids"), np.zeros(d, np.float32)
    x = positions
    for i in range(layers):
        h = f"h.{i}"
        normed, _, _, x = norm(branch, bias, x, f"{h}.ln_1")
        qkv = graph.add("MatMul", normed, w[f"{h}.attn.c_attn.weight"])
        qkv = graph.add("Add", qkv, w[f"{h}.attn.c_attn.bias"])
        branch = graph.add("MatMul", attend(graph, i, qkv, heads, heads), w[f"{h}.attn.c_proj.weight"])
        normed, _, _, x = norm(branch, w[f"{h}.attn.c_proj.bias"], x, f"{h}.ln_2")
        wide = graph.add("MatMul", normed, w[f"{h}.mlp.c_fc.weight"])
        wide = graph.add("FastGelu", wide, w[f"{h}.mlp.c_fc.bias"], domain=MICROSOFT)
        branch, bias = graph.add("MatMul", wide, w[f"{h}.mlp.c_proj.weight"]), w[f"{h}.mlp.c_proj.bias"]
    speak(graph, norm(branch, bias, x, "ln_f")[0], w["wte.weight"])
    return layers, heads, d // heads


def llama(graph: Graph, config: dict[str, Any], w: dict[str, np.ndarray]) -> tuple[int, int, int]:
    layers, heads, groups = (config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    width = config.get("head_dim") or config["hidden_size"] // heads
    speeds = config["rope_theta"] ** (-np.arange(0, width, 2) / width)
    angles = np.arange(min(config["max_position_embeddings"], 2048))[:, None] * speeds
    rotary = tuple(graph.constant(f(angles).astype(np.float32)) for f in (np.cos, np.sin))

    def norm(branch: str, x: str, name: str) -> Any:
        return graph.add(
            "SkipSimplifiedLayerNormalization", branch, x, w[f"{name}.weight"],
            domain=MICROSOFT, out=("", "-", "-", ""), epsilon=config["rms_norm_eps"],
        )  # fmt: skip

    branch = graph.add("Gather", w["embed_tokens.weight"], "input_ids")
    x = graph.add("Mul", branch, np.zeros(1, np.float32))
    for i in range(layers):
        h = f"layers.{i}"
        normed, _, _, x = norm(branch, x, f"{h}.input_layernorm")
        merged = np.concatenate([w[f"{h}.self_attn.{c}_proj.weight"] for c in "qkv"])
        qkv = graph.add("MatMul", normed, merged.T)
        attended = attend(graph, i, qkv, heads, groups, rotary)
        branch = graph.add("MatMul", attended, w[f"{h}.self_attn.o_proj.weight"].T)
        normed, _, _, x = norm(branch, x, f"{h}.post_attention_layernorm")
        gate = graph.add("MatMul", normed, w[f"{h}.mlp.gate_proj.weight"].T)
        gate = graph.add("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)  # SiLU
        wide = graph.add("Mul", gate, graph.add("MatMul", normed, w[f"{h}.mlp.up_proj.weight"].T))
        branch = graph.add("MatMul", wide, w[f"{h}.mlp.down_proj.weight"].T)
    speak(graph, norm(branch, x, "norm")[0], w.get("lm_head.weight", w["embed_tokens.weight"]))
    return layers, groups, width
