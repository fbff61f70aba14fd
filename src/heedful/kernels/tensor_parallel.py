"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", section 3): the matrices of a model divided over processes.

    attention      query, key and value by columns: a process has some of the heads, and a KV cache for those; output by
                   rows, and the processes' sums are all-reduced
    feed-forward   up and gate by columns, down by rows; so is every expert
    vocabulary     embedding and head by rows: embeddings are all-reduced, logits all-gathered
    the rest       norms, positions, routers: whole in every process

The plans are PyTorch's (torch.distributed.tensor.parallel), put around the parts of a model from outside. Where there
are more processes than key/value heads, several have the same one. A part with an option that is not listed in
kernels/options.py is refused. All processes make the same calls and get the same logits. For inference alone: there are
no gradients.

    H query heads, G key/value heads, D head size, T queries, S keys, E model width, V vocabulary
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from heedful.kernels import options
from heedful.kernels.accelerate import packed_precision
from heedful.kernels.device import choose_process_device
from heedful.models.base import GenerativeModel, Model
from heedful.nn.attention import Attention
from heedful.nn.embed import Embedding
from heedful.nn.feedforward import FeedForward, MixtureOfExperts
from heedful.nn.head import LanguageHead
from heedful.nn.lora import refuse_adapted
from heedful.nn.position import Alibi, RelativeBias
from heedful.nn.stack import Stack


def process_mesh(device: str | torch.device | None = None) -> DeviceMesh:
    """All processes that torchrun started, on the CPU or each on a GPU of its own; ValueError without torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "tensor parallelism divides a model over processes, and this is a single one: start them with "
            "torchrun --nproc-per-node N"
        )
    own = choose_process_device(device or "auto", int(os.environ.get("LOCAL_RANK", "0")))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    return init_device_mesh(own.type, (int(os.environ["WORLD_SIZE"]),))


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Divide a model over the processes of a mesh, in place; one on the meta device is loaded afterwards, each process
    its own shards. ValueError, before anything is changed, for what cannot be divided."""
    check_parts(model, mesh.size())
    plan = _Plan(mesh)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            plan.attention(module)
        elif isinstance(module, FeedForward):
            plan.feedforward(module)
        elif isinstance(module, Embedding | LanguageHead):
            parallelize_module(module, mesh, VocabularyParallel())
        elif isinstance(module, Stack) and module.bias is not None:
            plan.bias_of_heads(module.bias)
    model.tie()
    model.requires_grad_(False)
    model.abilities = tuple(ability for ability in model.abilities if ability in options.TENSOR_PARALLEL)
    _same_random_state(mesh)


class _Plan:
    """PyTorch's plans for the parts of a model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size = mesh, mesh.size()
        self.of_copies: dict[int, DeviceMesh] = {}

    def attention(self, part: Attention) -> None:
        """Each process has H / size query heads, and the key/value heads that they attend to."""
        kv_mesh = self.kv_mesh(part.n_kv_heads)
        self._apply(part.query, ColwiseParallel())
        self._apply(part.key, ColwiseParallel(), kv_mesh)
        self._apply(part.value, ColwiseParallel(), kv_mesh)
        self._apply(part.output, RowwiseParallel())
        for norm, mesh in (part.query_norm, self.mesh), (part.key_norm, kv_mesh):
            if norm is not None and norm.weight.shape[0] != part.d_head:  # over all heads (OLMo 2), not over each
                whole: dict[str, Any] = {"desired_input_layouts": Replicate(), "output_layouts": Replicate()}
                shards: dict[str, Any] = {"input_layouts": Shard(-1), "desired_output_layouts": Shard(-1)}
                self._apply(norm, PrepareModuleInputOutput(**whole, **shards, use_local_input=True), mesh)
        part.n_heads //= self.size
        part.n_kv_heads //= kv_mesh.size()

    def kv_mesh(self, n_kv_heads: int) -> DeviceMesh:
        """The processes that key/value heads are divided over: all of them, or where they are more than the heads one
        for each head. The others have copies, and are such meshes too."""
        if n_kv_heads >= self.size:
            return self.mesh
        if n_kv_heads not in self.of_copies:
            shape = n_kv_heads, self.size // n_kv_heads
            both = init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("heads", "copies"))
            self.of_copies[n_kv_heads] = both["heads"]
        return self.of_copies[n_kv_heads]

    def feedforward(self, part: FeedForward) -> None:
        """Each process has F / size hidden units."""
        self._apply(part.up, ColwiseParallel())
        if part.gate is not None:
            self._apply(part.gate, ColwiseParallel())
        self._apply(part.down, RowwiseParallel())

    def bias_of_heads(self, part: RelativeBias | Alibi) -> None:
        """Computed for all heads (B or 1, H, T, S), of which each process uses its own."""
        self._apply(part, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)))

    def _apply(self, part: nn.Module, style: ParallelStyle, mesh: DeviceMesh | None = None) -> None:
        parallelize_module(part, mesh or self.mesh, style, src_data_rank=None)


class VocabularyParallel(ParallelStyle):
    """An embedding table or language head divided by tokens; their outputs are whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, self._shard, self._whole_input, self._whole_output)

    @staticmethod
    def _shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                shard = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(shard))

    @staticmethod
    def _whole_input(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

    @staticmethod
    def _whole_output(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[Replicate()]).to_local()


def _same_random_state(mesh: DeviceMesh) -> None:
    """Sampling without a seed takes one from torch's global state: it is made the same in all processes."""
    seed = torch.randint(2**63 - 1, (), device=mesh.device_type)
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed))


# --- what can be divided ---------------------------------------------------------------------------------------------


def check_parts(model: Model, size: int) -> None:
    """ValueError unless a plan understands every part of the model and divides it evenly over this many processes."""
    if packed_precision(model) is not None:
        raise ValueError("a packed model is not divided over processes: load it without quantize")
    refuse_adapted(model, "divided over processes")
    if not isinstance(model, GenerativeModel) or not any(isinstance(m, Stack) for m in model.modules()):
        raise ValueError(f"a {model.family} is not divided over processes: only Transformers that generate are")
    for name, module in model.named_modules():
        if not _is_understood(module):
            raise ValueError(
                f"{name}, a {type(module).__name__}, has an option that tensor parallelism does not know: run the "
                "model in one process"
            )
        if isinstance(module, Attention):
            _check_heads(module, size)
        elif isinstance(module, FeedForward) and module.up.out_features % size:
            n = module.up.out_features
            raise ValueError(f"{n} hidden units ({name}) do not divide evenly over {size} processes")


def _is_understood(module: nn.Module) -> bool:
    """Whether the part has options that its plan knows only; a part without a plan is whole in every process."""
    if isinstance(module, Attention):
        projections = (module.query, module.key, module.value, module.output)
        norms = [norm for norm in (module.query_norm, module.key_norm) if norm is not None]
        plain = all(map(options.is_linear, projections)) and all(map(options.is_norm, norms))
        return plain and options.is_attention(module)
    if isinstance(module, FeedForward):
        layers = [layer for layer in (module.up, module.gate, module.down) if layer is not None]
        return all(map(options.is_linear, layers)) and options.is_feedforward(module)
    if isinstance(module, MixtureOfExperts):
        return options.has_only(module, MixtureOfExperts, {"top_k", "renormalize", "router", "experts"})
    if isinstance(module, Stack):
        known = module.bias is None or type(module.bias) in (RelativeBias, Alibi)
        return known and options.has_only(module, Stack, options.STACK)
    if isinstance(module, Embedding):
        return options.is_embedding(module)
    return options.is_head(module) if isinstance(module, LanguageHead) else True


def _check_heads(part: Attention, size: int) -> None:
    if part.n_heads % size:
        raise ValueError(
            f"{part.n_heads} attention heads do not divide evenly over {size} processes: use a number that divides them"
        )
    if part.n_kv_heads % size and size % part.n_kv_heads:
        raise ValueError(
            f"{part.n_kv_heads} key/value heads do not divide evenly over {size} processes, nor the processes over them"
        )
