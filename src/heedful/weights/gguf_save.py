"""Writing a model as a GGUF file, which llama.cpp and `load_gguf` read.

    float32, float16, bfloat16   F32, F16, BF16
    int8                         Q8_0
    int4                         Q4_1 for the matrices of blocks, Q8_0 for embedding and head

Q8_0 and Q4_1 have the groups and float16 scales of our int8 and int4. Vectors, tables of positions and routers stay
F32, and so does a matrix whose rows are not whole groups. The file is written aside, tensor by tensor, then renamed.

    N outputs, K inputs, G inputs in a group
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

from heedful.kernels.quantize import GROUP, QuantizedWeight, quantize_weight
from heedful.models.base import Model
from heedful.models.mapping import Entry
from heedful.nn.lora import refuse_adapted
from heedful.text.gguf_fields import gguf_fields
from heedful.text.tokenizer import Tokenizer
from heedful.weights.compressed import Quantized
from heedful.weights.gguf_layout import gguf_weight_map, hub_type
from heedful.weights.gguf_metadata import gguf_metadata, rope_tensors
from heedful.weights.integers import convert_integers
from heedful.weights.load import is_sharded
from heedful.weights.special_ids import special_ids

FileDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Kind = gguf.GGMLQuantizationType
KINDS: Mapping[str, gguf.GGMLQuantizationType] = {
    "float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "int8": Kind.Q8_0, "int4": Kind.Q4_1,
}  # fmt: skip
FILE_TYPES = {Kind.F32: "ALL_F32"}  # the others are called MOSTLY_...
QUANTIZED: Mapping[gguf.GGMLQuantizationType, Quantized] = {Kind.Q8_0: "int8", Kind.Q4_1: "int4"}
WITH_HEAD = ("gpt_neox", "olmo2")  # llama.cpp has no such model whose head is the embedding: it is written twice

ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def save_gguf(
    model: Model,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: FileDtype | None = None,
    name: str | None = None,
    overwrite: bool = False,
    progress: ProgressBar = lambda total: nullcontext(lambda n: None),
) -> None:
    """Write a GGUF file; ValueError for a model or a tokenizer that llama.cpp does not have.

    `dtype` is that of the model's weights unless given; "int8" and "int4" round them, but for those that keep their
    integers (`keep_integers`). `progress` is called with the number of tensors, and what it gives with 1 for each of
    them.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: choose another name or remove it")
    content = _Content(model, dtype or str(next(model.parameters()).dtype).removeprefix("torch."))
    fields = {"general.name": name or path.stem, **content.fields}
    fields |= gguf_fields(tokenizer, special_ids(model, tokenizer), model.config.vocab_size)
    with new_file(path) as aside, progress(len(content.rows)) as advance:
        _write(aside, fields, content, advance)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; after an error nothing of it stays."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class _Content:
    """What is written of a model: `fields` of metadata, `rows` (each tensor's name, shape and type), and `arrays`."""

    def __init__(self, model: Model, dtype: str) -> None:
        refuse_adapted(model, "written as GGUF")
        if any(hasattr(module, "n_weights") for module in model.modules()):
            raise ValueError("the weights are packed: save the model as it was loaded")
        if any(map(is_sharded, model.parameters())):
            raise ValueError("the weights are divided over processes: load the model in one, and save that")
        if dtype not in KINDS:
            raise ValueError(f"GGUF files are written in {', '.join(KINDS)}, not in {dtype}")
        self.kind = KINDS[dtype]
        kind = hub_type(model)
        self.fields = gguf_metadata(model) | {"general.file_type": _file_type(self.kind)}
        self.extra = rope_tensors(model)
        again = kind in WITH_HEAD  # a tied head has a second name
        self.parameters = dict(model.named_parameters(remove_duplicate=not again))
        self.entries = gguf_weight_map(model).entries(self.parameters)
        self.rows = [(name, tuple(x.shape), Kind.F32) for name, x in self.extra.items()]
        for entry in self.entries:
            shapes = entry.op.shapes([self.parameters[n].shape for n in entry.ours])
            self.rows += [(n, tuple(s), self._kind(n, s)) for n, s in zip(entry.theirs, shapes, strict=True)]

    def _kind(self, name: str, shape: torch.Size) -> gguf.GGMLQuantizationType:
        """The type of the file's tensor of this name and shape."""
        if len(shape) == 1 or name.startswith("position_embd") or "ffn_gate_inp" in name:
            return Kind.F32
        if self.kind not in QUANTIZED:
            return self.kind
        if shape[-1] % GROUP:
            return Kind.F32
        return Kind.Q4_1 if self.kind == Kind.Q4_1 and name.startswith("blk.") else Kind.Q8_0

    def arrays(self) -> Iterator[np.ndarray[Any, Any]]:
        """The tensors in the order of `rows`, one in memory at a time."""
        kinds = {name: kind for name, _, kind in self.rows}
        yield from (plain_array(x, Kind.F32) for x in self.extra.values())
        for entry in self.entries:
            kind = kinds[entry.theirs[0]]  # every rule has one tensor of theirs
            if kind in QUANTIZED:
                yield self._quantized(entry, QUANTIZED[kind])
            else:
                (tensor,) = entry.op.save([self.parameters[n].detach() for n in entry.ours])
                yield plain_array(tensor, kind)

    def _quantized(self, entry: Entry, form: Quantized) -> np.ndarray[Any, Any]:
        """Our weights are rounded, then the rule moves rows of integers, scales and zero points alike."""
        rounded = [quantize_weight(self.parameters[name], form) for name in entry.ours]
        converted = convert_integers(entry.op.save, rounded)
        assert converted is not None and len(converted) == 1 and entry.op.by_rows
        return pack_blocks(converted[0])


def plain_array(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """A tensor as F32 or F16, or as the bytes of BF16; ValueError where float16 has no such numbers."""
    if kind == Kind.BF16:
        return tensor.bfloat16().contiguous().cpu().view(torch.uint8).numpy()
    if kind == Kind.F16 and tensor.numel() and tensor.abs().max() > torch.finfo(torch.float16).max:
        raise ValueError("some weights are beyond float16's 65,504: use bfloat16")
    return tensor.to(torch.float16 if kind == Kind.F16 else torch.float32).contiguous().cpu().numpy()


def pack_blocks(weight: QuantizedWeight) -> np.ndarray[Any, Any]:
    """Integers (..., K) with scales and zero points (..., K/G) as the bytes of Q8_0 (int8) or Q4_1 (int4).

    Q8_0: a scale, then 32 int8. Q4_1: a scale d and a least value m, then 16 bytes with the first half of a group in
    the low bits and the second in the high ones; w = q·d + m, where ours is (q - 8)·scale + zero.
    """
    weight = weight.map(Tensor.cpu)
    groups = weight.ints.unflatten(-1, (-1, GROUP)).contiguous()  # (..., K/G, G)
    head = [weight.scale]
    if weight.zero is not None:
        head.append((weight.zero.float() - 8 * weight.scale.float()).half())
        groups = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    halves = torch.stack(head, dim=-1).view(torch.uint8)  # (..., K/G, 2 or 4)
    return torch.cat([halves, groups.view(torch.uint8)], dim=-1).flatten(-2).numpy()


def _file_type(kind: gguf.GGMLQuantizationType) -> int:
    return int(gguf.LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind.name}")])


def _write(path: Path, fields: Mapping[str, Any], content: _Content, advance: Callable[[int], None]) -> None:
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    try:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in fields.items():
            if key != "general.architecture":  # which the writer has
                _add(writer, key, value)
        for name, shape, kind in content.rows:
            per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
            size = int(np.prod(shape)) // per_block * n_bytes
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in content.arrays():
            writer.write_tensor_data(array)
            advance(1)
    finally:
        writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key of the metadata, in the type that llama.cpp expects."""
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    adders[type(value)](key, value)
