"""The processes that torchrun starts: DDP and FSDP2 behind the interface of distributed.py."""

from __future__ import annotations

import inspect
import os
import re
import socket
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.rendezvous import rendezvous
from torch.utils import _pytree

from heedful.kernels.device import choose_process_device
from heedful.models.base import Batch
from heedful.nn.block import Block
from heedful.train.distributed import Processes
from heedful.train.loss import Loss
from heedful.weights.load import is_sharded

TIMEOUT_MINUTES = 30  # for the other processes
DATA_TIMEOUT_MINUTES = 24 * 60  # while one process prepares the data

# Our buffers are constant tables, which DDP need not broadcast. PyTorch 2.13 renames the option.
_KNOWN = inspect.signature(nn.parallel.DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}

# DDP and FSDP2 look for tensors in a module's output to attach their backward hooks to.
_pytree.register_pytree_node(
    Loss, lambda loss: ([loss.sum, loss.n_targets, loss.metrics], None), lambda parts, _: Loss(*parts)
)


class TorchrunProcesses(Processes):
    """One of several processes started by torchrun."""

    signal_repeat_seconds = 3.0

    def __init__(self, device: str) -> None:
        try:
            self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local = int(os.environ.get("LOCAL_RANK", self.rank))
        except (KeyError, ValueError) as problem:
            raise ValueError(
                f"WORLD_SIZE is set and {problem} is not a number there: start many processes with torchrun"
            ) from None
        super().__init__(choose_process_device(device, self.local))
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        waiting = timedelta(minutes=TIMEOUT_MINUTES)
        self.store, _, _ = next(iter(rendezvous("env://", timeout=waiting)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("heedful", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=waiting,
            device_id=self.device if on_gpu else None,
        )
        # Control messages go from CPU to CPU, so that no GPU waits for them.
        self.control_group = dist.new_group(backend="gloo", timeout=waiting)
        self.n_texts = 0
        self.shards: list[Any] = []  # modules that FSDP2 shards

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.barrier("the end of training")
            dist.destroy_process_group()
        elif isinstance(error, Exception):
            # Not destroy_process_group, which may deadlock: the others wait for us. torchrun ends them.
            self._fail(error)
            raise SystemExit(1) from None

    def _fail(self, error: Exception) -> None:
        """Report which process failed and why; processes that only lost their connection to it say so."""
        who = f"process {self.rank} of {self.world_size} ({socket.gethostname()})"
        why = f"{type(error).__name__}: {error}"
        lost = isinstance(error, RuntimeError) and re.search(r"connection|peer|socket|NCCL|gloo", why, re.I)
        mine = "" if lost else f"{who}: {why}"
        try:
            first = self.store.compare_set("heedful/failed", "", mine).decode()
        except RuntimeError:  # the store was in the process that failed
            first = mine
        if first != mine:
            self.report(f"{who} ends, because another failed: {first}")
        elif lost:
            self.report(f"{who} ends, because another ended without a word; was it killed? {why.splitlines()[0]}")
        else:
            if not isinstance(error, ValueError | OSError):  # those say what to do; others get a traceback
                traceback.print_exception(error)
            self.report(f"{who} failed: {why}")
            ErrorHandler().record_exception(error)  # for the summary that torchrun prints

    # --- a step ----------------------------------------------------------------------------------------------------

    def wrap(self, task: nn.Module, *, sharded: bool, bfloat16: bool = False) -> nn.Module:
        """Move the module to the device and wrap it in DDP, or shard it with FSDP2."""
        if not sharded:
            self._broadcast_weights(task.to(self.device))
            return Replicated(task, self)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # Autocast is on inside the module; the policy halves what is gathered. Gradients stay fp32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for module in [m for m in task.modules() if isinstance(m, Block)]:
            self._broadcast_weights(module.to(self.device))  # one at a time: the full model need not fit into a GPU
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # Embeddings and heads belong to the root, which stays gathered during the whole forward: objectives may call
        # parts of the model, and tied parameters are in one FSDP group.
        self._broadcast_weights(task.to(self.device))
        fully_shard(task, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.shards = [m for m in task.modules() if isinstance(m, FSDPModule)]
        for shard in self.shards:
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)  # gloo has no other
        task.register_forward_hook(_reshard_after_evaluation)
        return task

    def _broadcast_weights(self, module: nn.Module) -> None:
        """Copy the main process's weights to all; parameters that FSDP2 has sharded already are skipped."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if not is_sharded(tensor):
                    dist.broadcast(tensor.detach(), 0)

    @contextmanager
    def gradient_sync(self, called: nn.Module, last: bool) -> Iterator[None]:
        """All-reduce gradients in the backward pass of the last micro-batch only."""
        if isinstance(called, Replicated):
            called.last = last
        else:
            self.shards[0].set_requires_gradient_sync(last)
        yield

    def all_reduce(self, sums: dict[str, Tensor]) -> None:
        """Sum each number over all processes, in one message."""
        names = sorted(sums)
        numbers = torch.stack([sums[name].double() for name in names])
        dist.all_reduce(numbers)
        sums.update(zip(names, numbers.unbind(), strict=True))

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags, group=self.control_group)
        return bool(flags)

    # --- the whole model -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Gather sharded parameters and tensors in the main process, then restore the shards."""
        gathered = {name: self._gather(tensor) for name, tensor in tensors.items()}
        kept: list[tuple[nn.Module, str, nn.Parameter]] = []
        made: dict[Tensor, nn.Parameter] = {}  # tied parameters are gathered once and stay tied
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and is_sharded(parameter):
                    if parameter not in made:
                        made[parameter] = nn.Parameter(self._gather(parameter), parameter.requires_grad)
                    kept.append((module, name, parameter))
        # Not by setattr, which FSDP2 intercepts.
        for module, name, parameter in kept:
            module._parameters[name] = made[parameter] if self.main else parameter
        try:
            yield gathered if self.main else {}
        finally:
            for module, name, parameter in kept:
                module._parameters[name] = parameter
        self.barrier("the main process to write a checkpoint")

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full tensor in the main process's CPU memory, an empty one elsewhere; one at a time on the device."""
        if not is_sharded(tensor):
            return tensor.detach()
        whole = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if self.main else whole.new_empty(0)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Gather all parameters in every process, and take FSDP2's hooks off meanwhile."""
        kept = [(shard, shard._forward_pre_hooks, shard._forward_hooks) for shard in self.shards]
        for shard, _, _ in kept:
            shard.unshard()
            # FSDP2 records the order of calls to prefetch by it: calls of one process alone must not count.
            shard._forward_pre_hooks, shard._forward_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for shard, before, after in kept:
                shard._forward_pre_hooks, shard._forward_hooks = before, after
                shard.reshard()

    # --- waiting and telling ---------------------------------------------------------------------------------------

    def barrier(self, what: str, minutes: float = TIMEOUT_MINUTES) -> None:
        """Wait for all processes; TimeoutError names those that did not come."""
        waiting = timedelta(minutes=minutes)
        try:
            dist.monitored_barrier(self.control_group, waiting, wait_all_ranks=True)
        except RuntimeError as problem:
            late = re.search(r"Ranks? ([\d, ]+) failed to pass", str(problem))
            if late is None:
                raise
            raise TimeoutError(
                f"process {late[1].strip()} did not come within {minutes:g} minutes, where all wait for {what}"
            ) from None

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body in the main process, then in one process per machine, then in the others."""
        turn = 0 if self.main else 1 if self.local == 0 else 2
        for _ in range(turn):
            self.barrier("the process that prepares the data", DATA_TIMEOUT_MINUTES)
        yield
        for _ in range(turn, 2):
            self.barrier("the process that prepares the data", DATA_TIMEOUT_MINUTES)

    def gather_texts(self, text: str) -> list[str]:
        """Every process's text, exchanged through the store."""
        self.n_texts += 1
        keys = [f"heedful/text/{self.n_texts}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], text)
        self.store.wait(keys, timedelta(minutes=TIMEOUT_MINUTES))
        return [self.store.get(key).decode() for key in keys]


class Replicated(nn.Module):
    """A module whose gradients DDP sums over all processes. Evaluation bypasses DDP.

    DDP waits for the gradient of every parameter. With `find_unused_parameters` it walks the graph in each step to find
    those the loss does not depend on (an unused head, say); the first batch shows whether that is needed.
    """

    def __init__(self, task: nn.Module, processes: TorchrunProcesses) -> None:
        super().__init__()
        self.task, self.processes = task, processes
        self.last = True
        self.shared: list[nn.parallel.DistributedDataParallel] = []  # in a list, so that it is no submodule

    def forward(self, batch: Batch) -> Any:
        """The loss of a batch: through DDP in training, directly in evaluation."""
        if not torch.is_grad_enabled():
            return self.task(batch)
        if not self.shared:
            self.shared.append(self._wrap_ddp(batch))
        shared = self.shared[0]
        with nullcontext() if self.last else shared.no_sync():  # DDP decides in forward whether backward reduces
            return shared(batch)

    def _wrap_ddp(self, batch: Batch) -> nn.parallel.DistributedDataParallel:
        """Wrap the module in DDP, with gradients summed instead of averaged."""
        device = self.processes.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            used = graph_parameters(self.task(batch).sum)
        unused = any(p.requires_grad and p not in used for p in self.task.parameters())
        shared = nn.parallel.DistributedDataParallel(
            self.task,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.processes.any_process(unused),
            **NO_BUFFERS,
        )
        shared.register_comm_hook(None, lambda state, bucket: _sum_bucket(bucket))
        return shared


def _sum_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a gradient bucket over all processes; DDP's default hook would average."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _reshard_after_evaluation(task: Any, given: Any, loss: Any) -> None:
    """Reshard after a forward without backward, which FSDP2 does only in backward: else parameters stay full copies."""
    if not torch.is_grad_enabled():
        task.reshard()


def graph_parameters(loss: Tensor) -> set[Tensor]:
    """The parameters a loss depends on, by walking its autograd graph."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        todo.extend(before for before, _ in node.next_functions)
    return found
