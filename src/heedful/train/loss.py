"""Summed losses and their means, and cross-entropy over a large vocabulary without all logits in memory.

With V = 50,000 the logits of 16,000 positions are 3.3 GB in fp32, more than the rest of a small model together, and
softmax and its gradient want as much again. `language_loss` therefore goes from the last hidden states to the loss:

    rows without a target are dropped first (85 % of BERT's positions),
    the rest goes through the head in chunks, and each chunk's gradient is computed while its logits exist.

That works because the loss is a sum: its gradient is the sum over chunks, times the scalar that backward gets. Logits
are bf16 under autocast; softmax is always fp32, a chunk at a time. Small logits are computed all at once.

    N rows with a target, C rows of a chunk, E model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from heedful.data.dataset import IGNORED
from heedful.models.heads import MaskedHead
from heedful.nn.dtype import widest_float
from heedful.nn.head import LanguageHead

# Bytes of fp32 logits at once. A chunk also adds to the gradient of the whole matrix, so it must not be too small.
CHUNK = {"cpu": 2**26, "mps": 2**28, "cuda": 2**31}
TILE = 64


@dataclass
class Loss:
    """A summed loss and its number of targets; each metric (accuracy and the like) is a sum and a count too."""

    sum: Tensor
    n_targets: Tensor | int
    metrics: dict[str, tuple[Tensor, Tensor | int]] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """The loss per target."""
        return self.sum / max(int(self.n_targets), 1)


@dataclass
class Scores:
    """A mean loss and the means of its metrics."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


def add_loss(sums: dict[str, Tensor], loss: Loss, *, counts: bool = True) -> None:
    """Add a batch's loss, metrics and target counts to running sums on its device, in float64 where it has
    that; `counts` False adds 0."""
    found = {"loss": loss.sum, "targets": loss.n_targets}
    for name, (total, count) in loss.metrics.items():
        found |= {f"{name}.sum": total, f"{name}.count": count}
    device, dtype = loss.sum.device, widest_float(loss.sum.device)
    for name, value in found.items():
        if isinstance(value, Tensor):
            number = value.detach().to(device, dtype)
        else:  # filled in there: copying it to a GPU would synchronize
            number = torch.full((), value, dtype=dtype, device=device)
        number = number if counts else number * 0
        sums[name] = sums[name] + number if name in sums else number


def mean_scores(sums: Mapping[str, Tensor | float]) -> Scores:
    """The means of what `add_loss` summed."""

    def mean(total: str, count: str) -> float:
        return float(sums[total]) / max(float(sums[count]), 1)

    names = [name.removesuffix(".sum") for name in sums if name.endswith(".sum")]
    return Scores(mean("loss", "targets"), {n: mean(f"{n}.sum", f"{n}.count") for n in names})


def fetch_floats(numbers: Mapping[str, Tensor]) -> Callable[[], dict[str, float]]:
    """Scalars as floats when the result is called. From a GPU they are copied asynchronously: the call waits for them,
    and not for work that was queued since."""
    if next(iter(numbers.values())).device.type != "cuda":
        return lambda: {name: float(number) for name, number in numbers.items()}
    stacked = torch.stack([number.double() for number in numbers.values()])
    host = torch.empty(len(stacked), dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> dict[str, float]:
        copied.synchronize()
        return dict(zip(numbers, host.tolist(), strict=True))

    return wait


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Loss:
    """Cross-entropy summed over all targets but IGNORED; logits (..., V), targets (...)."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return Loss(total, (targets != IGNORED).sum())


def language_loss(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    *,
    rows: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Loss:
    """Summed cross-entropy of the head's logits for hidden states (..., E) against targets (...).

    `rows` are the indices of rows with a target, if the caller has them (`target_rows`). Otherwise they are selected on
    a CPU; on a GPU, where that would synchronize, all rows are computed and those without a target weighted 0.
    """
    n_targets = (targets != IGNORED).sum()
    x, wanted = hidden.flatten(0, -2), targets.flatten()  # (N, E), (N,)
    if rows is None and x.device.type == "cpu":
        rows = target_rows(targets)
    if rows is not None and len(rows) < len(wanted):
        x, wanted = x[rows], wanted[rows]
    size = chunk_bytes or CHUNK.get(x.device.type, CHUNK["cuda"])
    if len(x) * largest_dim(head) * 4 <= size:
        return Loss(cross_entropy(head(x), wanted, smoothing).sum, n_targets)
    if isinstance(head, MaskedHead) and not has_hooks(head) and is_plain_head(head.vocabulary):
        x, head = head.norm(head.act(head.dense(x))), head.vocabulary  # (N, E) fits in memory
    if is_plain_head(head):
        assert isinstance(head, LanguageHead)
        n = max(1, size // (4 * len(head.weight)))
        given: list[Any] = [x, head.weight, head.bias]
        if not torch.is_grad_enabled():
            given = [t if t is None else t.detach() for t in given]
        total = ChunkedCrossEntropy.apply(*given, wanted, head.scale, head.softcap, smoothing, n)  # type: ignore[no-untyped-call]
        return Loss(total, n_targets)

    def part(x: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(head(x), wanted, smoothing).sum

    return Loss(checkpointed_sum(part, x, wanted, n=max(1, size // (4 * largest_dim(head)))), n_targets)


def target_rows(targets: Tensor) -> Tensor:
    """Indices of the targets that are not IGNORED, in the flattened tensor. Synchronizes with a GPU."""
    return (targets.flatten() != IGNORED).nonzero()[:, 0]


def checkpointed_sum(part: Callable[..., Tensor], *tensors: Tensor, n: int) -> Tensor:
    """The sum of `part` over chunks of n rows, each recomputed in backward (activation checkpointing)."""
    total = tensors[0].new_zeros((), dtype=torch.float32)
    for chunk in zip(*(t.split(n) for t in tensors), strict=True):
        total = total + checkpoint(part, *chunk, use_reentrant=False)
    return total


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks, which run only if it is called as a whole."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def is_plain_head(head: nn.Module) -> bool:
    """Whether a head is a plain LanguageHead: not replaced, hooked or sharded."""
    if type(head) is not LanguageHead or has_hooks(head):
        return False
    return not hasattr(head.weight, "full_tensor")  # of a sharded parameter


def largest_dim(head: nn.Module) -> int:
    """An upper bound on the logits per row: the largest dimension of the head's parameters."""
    return max((size for p in head.parameters() for size in p.shape), default=1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Product, scale, soft cap and cross-entropy, forward and backward in one pass over chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float | None,
        softcap: float | None,
        smoothing: float,
        n: int,
    ) -> Tensor:
        """The summed loss of rows x (N, E) against targets (N,); gradients are computed here and saved."""
        kind = x.device.type
        mixed = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else x.dtype
        ctx.factor, ctx.dtypes = scale or 1.0, (x.dtype, weight.dtype)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x, dtype=dtype) if wants_x else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        total = x.new_zeros((), dtype=torch.float32)
        losses_and_gradient = compiled_cross_entropy.get(kind, cross_entropy_and_gradient)
        # Autocast would cache its copy of the weight, made here without gradients, for later users.
        with torch.autocast(kind, enabled=False):
            # GPU matrix products are far slower where a dimension is no multiple of the tile size, as 50257 is not.
            extra = -len(weight) % TILE if kind == "cuda" else 0
            w, b = (
                F.pad(weight.to(dtype), (0, 0, 0, extra)),
                None if bias is None else F.pad(bias.to(dtype), (0, extra)),
            )
            for begin in range(0, len(x), n):
                rows, wanted = x[begin : begin + n], targets[begin : begin + n]
                rows = (rows if scale is None else rows * scale).to(dtype)  # (C, E)
                counts = wanted != IGNORED
                losses, d = losses_and_gradient(
                    F.linear(rows, w, b), wanted.clamp(min=0), len(weight), softcap, smoothing
                )
                total += (losses * counts).sum()
                if not any(ctx.needs_input_grad):
                    continue
                if dbias is not None:
                    dbias += counts.float() @ d[:, : len(weight)].float()
                d = d.to(dtype)  # (C, V)
                if dx is not None:
                    torch.mm(d, w, out=dx[begin : begin + n])
                    dx[begin : begin + n] *= counts[:, None]
                if dweight is not None and dtype == torch.float32:
                    dweight.addmm_(d[:, : len(weight)].T, rows * counts[:, None])
                elif dweight is not None:
                    dweight += (d.T @ (rows * counts[:, None]))[: len(weight)]
        ctx.save_for_backward(dx, dweight, dbias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the gradient of the sum."""
        dx, dweight, dbias = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dx = None if dx is None else (dx * (gradient * ctx.factor)).to(x_dtype)
        dweight = None if dweight is None else (dweight * gradient).to(weight_dtype)
        dbias = None if dbias is None else (dbias * gradient).to(weight_dtype)
        return dx, dweight, dbias, None, None, None, None, None


def cross_entropy_and_gradient(
    logits: Tensor, targets: Tensor, n: int, softcap: float | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (C,) of the first n logits (C, V padded), and its fp32 gradient with respect to the logits before
    their soft cap; 0 for the padding."""
    capped: Tensor | None = None
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits = capped * softcap
    if n < logits.shape[1]:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= n, -torch.inf)
    scores = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # (C, V)
    place = targets[:, None]
    losses = (smoothing - 1) * scores.gather(1, place)[:, 0]
    if smoothing:
        losses = losses - smoothing * scores[:, :n].mean(dim=-1)
    d = scores.exp()  # softmax less the smoothed target (Szegedy et al. 2016, section 7)
    if smoothing:
        d[:, :n] -= smoothing / n
    d.scatter_add_(1, place, torch.full_like(place, smoothing - 1, dtype=d.dtype))
    if capped is not None:
        d *= 1 - capped.float().square()
    return losses, d


# The same by device type, compiled or by a kernel (train/torch_compile.py); d may have the type of the logits.
compiled_cross_entropy: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
