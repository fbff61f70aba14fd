"""Reading the format of llama2.c (Karpathy 2023): a header, LLaMA's matrices in float32, and the tokenizer.

    header      7 int32: width, feed-forward width, layers, heads, key-value heads, vocabulary (negative if the head
                has a matrix of its own), context
    matrices    each kind for all layers together, in the order of `_layout`
    tokenizer   int32 longest piece; per piece float32 score, int32 bytes, bytes (tokenizer.bin)

Every size is checked against the file's before anything is read. The matrices of queries and keys rotate neighbouring
dimensions, as in Meta's files; ours and the hub's rotate the two halves of a head, so their rows are reordered.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heedful.models.llama import Llama, LlamaConfig
from heedful.text.sentencepiece import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load import DictSource, load_tensors

HEADER = struct.Struct("<7i")
MOST = 2**20  # of any number in the header
LONGEST_PIECE = 4096  # bytes


def read_llama2c(path: Path) -> tuple[Llama, Tokenizer]:
    """The model and the tokenizer in a file that has both, one after the other; ValueError if it is anything else."""
    raw = np.memmap(path, mode="r", dtype=np.uint8)
    config = _read_header(raw[: HEADER.size].tobytes(), path)
    sizes = _layout(config)
    end = HEADER.size + 4 * sum(math.prod(shape) for shape in sizes.values())
    if end > len(raw):
        raise ValueError(f"{path} has {len(raw)} bytes, and its header asks for {end}: it is cut, or no llama2.c file")
    found: dict[str, Tensor] = {}
    start = HEADER.size
    for name, shape in sizes.items():
        stop = start + 4 * math.prod(shape)
        found[name] = torch.from_numpy(raw[start:stop].view("<f4").reshape(shape).astype(np.float32))
        start = stop
    with torch.device("meta"):
        model = Llama(config)
    load_tensors(model, DictSource(_hub_tensors(config, found)))
    # Stories are separated by the token that begins each: it ends the one before, as in run.c.
    model.special = {"bos_token_id": 1, "eos_token_id": [2, 1]}
    return model.eval(), _read_tokenizer(raw[end:].tobytes(), config.vocab_size)


def _read_header(raw: bytes, path: Path) -> LlamaConfig:
    if len(raw) < HEADER.size:
        raise ValueError(f"{path} is no llama2.c file: it is too short")
    width, d_ff, n_layers, n_heads, n_kv_heads, vocabulary, max_len = HEADER.unpack(raw)
    numbers = (width, d_ff, n_layers, n_heads, n_kv_heads, abs(vocabulary), max_len)
    if not all(0 < n <= MOST for n in numbers) or width % (2 * n_heads) or n_heads % n_kv_heads:
        raise ValueError(f"{path} is no llama2.c file: its header says {numbers}")
    return LlamaConfig(
        d_model=width, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
        vocab_size=abs(vocabulary), max_len=max_len, tied=vocabulary > 0, norm_eps=1e-5,
    )  # fmt: skip


def _layout(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The matrices in the order of the file, by the hub's names."""
    c, n = config, config.n_layers
    head = c.d_model // c.n_heads
    keys = head * (c.n_kv_heads or c.n_heads)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (c.vocab_size, c.d_model),
        "input_layernorm": (n, c.d_model),
        "self_attn.q_proj": (n, c.d_model, c.d_model),
        "self_attn.k_proj": (n, keys, c.d_model),
        "self_attn.v_proj": (n, keys, c.d_model),
        "self_attn.o_proj": (n, c.d_model, c.d_model),
        "post_attention_layernorm": (n, c.d_model),
        "mlp.gate_proj": (n, c.d_ff, c.d_model),
        "mlp.down_proj": (n, c.d_model, c.d_ff),
        "mlp.up_proj": (n, c.d_ff, c.d_model),
        "norm": (c.d_model,),
        "cosines": (c.max_len, head // 2),  # of the rotation, which we compute
        "sines": (c.max_len, head // 2),
    }
    return shapes if c.tied else {**shapes, "lm_head": (c.vocab_size, c.d_model)}


def _hub_tensors(config: LlamaConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the hub's names, one per layer."""
    named = {"model.embed_tokens.weight": found["embed_tokens"], "model.norm.weight": found["norm"]}
    if not config.tied:
        named["lm_head.weight"] = found["lm_head"]
    head = config.d_model // config.n_heads
    for part in _layout(config):
        if part in ("embed_tokens", "norm", "cosines", "sines", "lm_head"):
            continue
        for layer, matrix in enumerate(found[part]):
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                matrix = matrix.view(-1, head // 2, 2, config.d_model).transpose(1, 2).reshape(matrix.shape)
            named[f"model.layers.{layer}.{part}.weight"] = matrix
    return named


def _read_tokenizer(raw: bytes, n_pieces: int) -> Tokenizer:
    """SentencePiece's pieces: llama2.c writes a space for its mark of one, and line breaks around control tokens."""
    place = 4  # after the length of the longest piece
    tokens, scores, kinds = [], [], []
    for index in range(n_pieces):
        if place + 8 > len(raw):
            raise ValueError(f"the tokenizer ends at piece {index} of {n_pieces}")
        score, length = struct.unpack_from("<fi", raw, place)
        place += 8
        if not 0 <= length <= LONGEST_PIECE or place + length > len(raw):
            raise ValueError(f"the tokenizer's piece {index} has {length} bytes: the file is cut, or another format")
        text = raw[place : place + length].decode("utf-8", "replace")
        place += length
        kind = UNKNOWN if index == 0 else CONTROL if index < 3 else BYTE if index < 259 else NORMAL
        named = f"<0x{index - 3:02X}>" if kind == BYTE else text.replace(" ", SPACE)  # of bytes it has the bytes
        tokens.append(text.strip() if kind == CONTROL else named)
        scores.append(score)
        kinds.append(kind)
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    roles = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in {**fields, **roles}.items()})
