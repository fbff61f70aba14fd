"""A decode pass that failed, repeated in halves: the rows at fault end with the error, the others go on.

B rows, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from heedful.generate.model_runner import ModelRunner
from heedful.generate.sequence import GeneratedSequence, SequenceGroup
from heedful.nn.state import State

# The rows of one decode pass: their sequences, logits (B, V) and KV cache.
Pass = tuple[list[GeneratedSequence], Tensor, State]
Fail = Callable[[SequenceGroup, Exception], None]


def decode_in_halves(
    runner: ModelRunner, state: State, sequences: Sequence[GeneratedSequence], error: Exception, fail: Fail
) -> list[Pass]:
    """The pass of these rows of the state with each half; a row that fails alone fails its request."""

    def repeat(rows: list[int], error: Exception) -> list[Pass]:
        if len(rows) == 1:
            fail(sequences[rows[0]].group, error)
            return []
        passes: list[Pass] = []
        for half in rows[: len(rows) // 2], rows[len(rows) // 2 :]:
            going = [row for row in half if sequences[row].finish_reason is None]  # a request may have several
            if not going:
                continue
            part, some = state.subset(going), [sequences[row] for row in going]
            try:
                passes.append((some, runner.decode([s.tokens[-1] for s in some], part), part))
            except Exception as another:
                passes += repeat(going, another)
        return passes

    return repeat(list(range(len(sequences))), error)


def merge_passes(state: State, passes: Sequence[Pass]) -> State | None:
    """One state of the parts, None without rows; the rows that failed are in none of them, and `state` is freed."""
    whole = state.subset([])
    for _, _, part in passes:
        whole.append_rows(part)
    state.select([])  # frees the blocks of the failed rows
    return whole if whole.n_rows else None
