"""What every family promises, checked on each of them: the list is in support/families.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from heedful.kernels.cpu.library import library
from heedful.models.base import Batch
from heedful.nn.attention import Watch
from heedful.nn.stack import Stack
from heedful.nn.state import State
from support.case import Case, error
from support.families import CASES

LIMIT = 1e-5


def on_both_paths(cases):
    """Each case plain and accelerated for inference, except where there is nothing to accelerate."""
    found = [(c, path) for c in cases for path in ("plain", "inference") if path == "plain" or c.accelerates]
    return pytest.mark.parametrize("case, path", found, ids=[f"{c.name}-{path}" for c, path in found])


plain = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every = on_both_paths(CASES)
speaking = on_both_paths([c for c in CASES if c.generates])
packing = on_both_paths([c for c in CASES if c.packs])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def same(case: Case, a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if case.exact else error(a, b) < 1e-6


def head(batch: Batch, n: int, rows: list[int] | None = None) -> Batch:
    """The first n tokens of each row with the whole source; none of the rows is padded then."""
    assert batch.tokens is not None
    chosen = list(range(len(batch.tokens))) if rows is None else rows
    pick = lambda x: None if x is None else x[chosen]  # noqa: E731
    return Batch(pick(batch.tokens)[:, :n], source=pick(batch.source), source_lengths=pick(batch.source_lengths))


@every
def test_a_batch_equals_its_rows_alone(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    together = model(batch).logits
    for i, row in enumerate(case.rows(batch)):
        alone = model(row).logits[0]
        assert error(together[i, : len(alone)] if alone.ndim > 1 else together[i], alone) < LIMIT


@every
def test_what_stands_in_the_padding_does_not_matter(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    if batch.lengths is None and batch.source_lengths is None:
        pytest.skip("nothing is padded in this family's batches")
    other = dataclasses.replace(batch)
    for name, lengths in (("tokens", batch.lengths), ("source", batch.source_lengths)):
        ids = getattr(batch, name)
        if ids is not None and lengths is not None:
            padding = torch.arange(ids.shape[-1]) >= lengths[..., None]
            setattr(other, name, torch.where(padding, 5, ids))
    counted = case.counted(batch)
    assert same(case, model(batch).logits[counted], model(other).logits[counted])


@every
def test_watching_changes_nothing(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    counted = case.counted(batch)
    plain = model(batch).logits[counted]
    watches = [m for m in model.modules() if isinstance(m, Watch)]
    seen = []
    for watch in watches:
        watch.on = True
        watch.weights.register_forward_hook(lambda _m, _i, out: seen.append(out))
    watched = model(batch).logits[counted]
    assert error(watched, plain) < 3e-6
    assert (len(seen) > 0) == (len(watches) > 0)
    for weights in seen:
        assert weights.ndim == 4 and error(weights.sum(-1), torch.ones(weights.shape[:-1])) < LIMIT


@plain
def test_a_config_survives_as_data(case: Case):
    config = case.model().config
    assert type(config).from_dict(config.to_dict()) == config


@plain
def test_a_fresh_model_speaks_sense(case: Case):
    """New weights: finite outputs, and a loss no worse than a little above guessing."""
    model = case.model()
    torch.manual_seed(0)
    fresh = type(model).create(model.config).eval()
    assert {n for n, _ in fresh.named_parameters()} == {n for n, _ in model.named_parameters()}
    logits = fresh(case.batch()).logits
    assert torch.isfinite(logits).all()
    assert logits.std() < 3


@plain
def test_every_parameter_learns(case: Case):
    model, batch = case.model(), case.batch()
    with torch.enable_grad():
        case.objective(model, batch).mean.backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not [n for n in still if not case.idle(n)], still


@speaking
def test_the_future_never_changes_the_past(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    tokens = batch.tokens.clone()
    tokens[:, 5:] = 7
    now, changed = model(batch).logits, model(dataclasses.replace(batch, tokens=tokens)).logits
    assert same(case, now[:, :5], changed[:, :5])
    assert not same(case, now[:, 5:], changed[:, 5:])


@speaking
def test_rows_of_unequal_length_start_together(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    together, state = model.start(batch)
    following = torch.tensor([4, 9, 6])
    stepped = model.step(following, state)
    for i, row in enumerate(case.rows(batch)):
        alone, single = model.start(row)
        assert error(together[i], alone[0]) < LIMIT
        assert error(stepped[i], model.step(following[i : i + 1], single)[0]) < LIMIT


@speaking
def test_several_tokens_in_a_step_equal_single_steps(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    _, state = model.start(head(batch, 3))
    several = model.step(batch.tokens[:, 3:7], state)
    assert error(several, model(batch).logits[:, 3:7]) < LIMIT


@speaking
def test_selected_rows_go_on_as_themselves(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    _, state = model.start(head(batch, 4))
    state.select([2, 0, 2, 1])
    got = model.step(batch.tokens[[2, 0, 2, 1], 4], state)
    assert error(got, model(batch).logits[[2, 0, 2, 1], 4]) < LIMIT
    with pytest.raises(ValueError, match="rows"):
        state.select([4])


@speaking
def test_truncated_rows_go_on_from_there(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    _, state = model.start(head(batch, 3))
    model.step(batch.tokens[:, 3:8], state)
    state.truncate([4, 6, 8])
    assert list(state.lengths) == [4, 6, 8]
    got = model.step(batch.tokens[[0, 1, 2], [4, 6, 8]], state)
    assert error(got, model(batch).logits[[0, 1, 2], [4, 6, 8]]) < LIMIT


@speaking
def test_a_freed_row_begins_anew(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    _, state = model.start(head(batch, 4))
    state.free(1)
    assert state.lengths[1] == 0
    whole = model(batch).logits
    for t in range(3):  # row 1 reads its own beginning again while the others go on
        tokens = batch.tokens[[0, 1, 2], [4 + t, t, 4 + t]]
        got = model.step(tokens, state)
        assert error(got, whole[[0, 1, 2], [4 + t, t, 4 + t]]) < LIMIT


@speaking
def test_rows_join_later_and_leave_earlier(case: Case, path: str):
    """Each row goes on as if alone, whatever the lengths of the others, of their sources too."""
    model, batch = case.model(path), case.batch()
    whole = model(batch).logits

    def begin(row: int, n: int) -> State:
        source = batch.source
        if source is not None and batch.source_lengths is not None:
            source = source[:, : batch.source_lengths[row]]
        return model.start(Batch(batch.tokens[row : row + 1, :n], source=None if source is None else source[[row]]))[1]

    def go_on(state: State, rows: list[int]) -> None:
        places = list(state.lengths)
        got = model.step(batch.tokens[rows, places], state)
        assert error(got, whole[rows, places]) < LIMIT

    state = begin(1, 2)
    go_on(state, [1])
    state.append_rows(begin(0, 4))
    go_on(state, [1, 0])
    state.append_rows(begin(2, 1), [0, 0])
    assert state.lengths == [4, 5, 1, 1]
    go_on(state, [1, 0, 2, 2])
    state.remove_row(0)
    go_on(state, [2, 0, 2])
    state.remove_row(2)
    go_on(state, [2, 0])
    state.remove_row(1)
    state.remove_row(0)
    assert state.n_rows == 0
    state.append_rows(begin(2, 3))
    go_on(state, [2])
    with pytest.raises(ValueError, match="rows"):
        state.remove_row(1)


@packing
def test_packed_documents_equal_separate_ones(case: Case, path: str):
    model, batch = case.model(path), case.batch()
    rows = [r.tokens[0] for r in case.rows(batch)]
    documents = torch.cat([torch.full((len(r),), i) for i, r in enumerate(rows)])[None]
    packed = Batch(torch.cat(rows)[None], documents=documents)
    logits = model(packed).logits[0]
    alone = torch.cat([model(r[None]).logits[0] for r in rows])
    assert error(logits, alone) < LIMIT
    with torch.enable_grad():
        together = case.objective(model, packed)
        apart = [case.objective(model, Batch(r[None])) for r in rows]
    assert together.n_targets == sum(a.n_targets for a in apart)
    assert error(together.sum, sum(a.sum for a in apart)) < LIMIT


@plain
def test_accelerating_keeps_the_number_of_parameters(case: Case):
    if case.accelerates:
        assert case.model("inference").n_parameters() == case.model().n_parameters()


# Decoders with an option that the C library does not know: they run the plain blocks, with packed weights.
UNKNOWN = {"gemma2": "softcap", "mixtral": "experts", "mixtral-window": "experts", "image-gpt": "quick_gelu"}


@pytest.mark.skipif(library() is None, reason="the C kernels cannot be had here")
def test_the_kernels_decode_all_families_but_those_listed():
    plain = {
        c.name
        for c in CASES
        if c.generates
        for stack in [m for m in c.model("inference").modules() if isinstance(m, Stack) and m.causal]
        if type(stack) is Stack
    }
    assert plain == set(UNKNOWN)
