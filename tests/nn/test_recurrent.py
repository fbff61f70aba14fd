"""The recurrent parts against the papers' formulas, written out."""

import pytest
import torch

from heedful.nn.recurrent import Additive, Align, BahdanauDecoder, Dot, General, LuongDecoder, Recurrence
from heedful.nn.recurrent_state import Memory, RecurrentState

B, T, S, E = 3, 4, 5, 6
LENGTHS = torch.tensor([5, 2, 3])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def memory(align: Align | None = None, lengths=LENGTHS) -> Memory:
    values = torch.randn(B, S, E)
    allowed = None if lengths is None else (torch.arange(S) < lengths[:, None])[:, None, None]
    keys = values if align is None else align.score.keys(values)
    return Memory(torch.randn(B, 1, E), values, keys, allowed)


def formula(score, q, h):
    """The score of one query (E,) and one annotation (E,) as its paper writes it."""
    if type(score) is Dot:
        return q @ h
    if type(score) is General:
        return q @ score.key.weight @ h
    w = torch.cat([score.query.weight, score.key.weight], dim=1)
    return score.v.weight[0] @ torch.tanh(w @ torch.cat([q, h]))


@pytest.mark.parametrize("kind", [Dot, General, Additive])
def test_scores_are_the_papers(kind):
    score, q, h = kind(E), torch.randn(B, T, E), torch.randn(B, S, E)
    got = score(q, score.keys(h))
    want = torch.stack([formula(score, q[b, t], h[b, s]) for b in range(B) for t in range(T) for s in range(S)])
    torch.testing.assert_close(got, want.view(B, T, S))


def test_the_dot_score_has_no_parameters():
    assert not list(Dot(E).parameters())


@pytest.mark.parametrize("name", ["additive", "dot", "general", "concat"])
def test_weights_sum_to_one_and_are_zero_on_padding(name):
    align = Align(name, E)
    seen = []
    align.watch.weights.register_forward_hook(lambda _m, _i, out: seen.append(out))
    source = memory(align)
    context, weights = align(torch.randn(B, T, E), source)
    assert weights.shape == (B, 1, T, S) and seen[0] is weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 1, T))
    padding = (torch.arange(S) >= LENGTHS[:, None])[:, None, None].expand_as(weights)
    assert (weights[padding] == 0).all() and (weights[~padding] > 0).all()
    torch.testing.assert_close(context, torch.einsum("bts,bse->bte", weights[:, 0], source.values))


def test_a_hook_can_say_where_to_look():
    align = Align("general", E)
    align.watch.weights.register_forward_hook(lambda _m, _i, out: torch.eye(S)[2].expand_as(out))
    source = memory(align, None)
    context, _ = align(torch.randn(B, T, E), source)
    torch.testing.assert_close(context, source.values[:, 2:3].expand(B, T, E))


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="additive, dot, general, concat"):
        Align("cosine", E)
    with pytest.raises(ValueError, match="lstm, gru"):
        Recurrence("rnn", E, E)
    with pytest.raises(ValueError, match="odd"):
        Recurrence("gru", E, 7, bidirectional=True)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_changes_nothing(cell, bidirectional):
    recurrence = Recurrence(cell, E, E, 2, bidirectional=bidirectional)
    x = torch.randn(B, S, E)
    out, last = recurrence(x, lengths=LENGTHS)
    for b, n in enumerate(LENGTHS.tolist()):
        alone, end = recurrence(x[b : b + 1, :n])
        torch.testing.assert_close(out[b : b + 1, :n], alone, atol=1e-6, rtol=0)
        torch.testing.assert_close(last[b : b + 1], end, atol=1e-6, rtol=0)
        assert (out[b, n:] == 0).all()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_step_by_step_is_the_same_as_at_once(cell):
    recurrence = Recurrence(cell, E, E, 2)
    x = torch.randn(B, T, E)
    _, begin = recurrence(torch.randn(B, 2, E))
    out, end = recurrence(x, begin)
    steps, states = recurrence.forward_steps(x, begin)
    torch.testing.assert_close(steps, out)
    torch.testing.assert_close(states[:, -1], end)
    torch.testing.assert_close(recurrence.top_hidden(end)[:, 0], out[:, -1])


def test_what_is_seen_before_the_step_enters_it():
    """Bahdanau: blind the decoder and its recurrent states change; Luong: only what it says does."""
    x, begin = torch.randn(B, T, E), torch.randn(B, 1, E)
    before = BahdanauDecoder(Recurrence("gru", 2 * E, E), Align("additive", E), E)
    after = LuongDecoder(Recurrence("gru", E, E), Align("concat", E))
    for decoder, enters in ((before, True), (after, False)):
        source = memory(decoder.align)
        blind = Memory(source.last, torch.zeros_like(source.values), source.keys, source.allowed)
        seeing, unseeing = (decoder(x, begin, m, keep_states=True) for m in (source, blind))
        assert torch.equal(seeing.states, unseeing.states) != enters
        assert not torch.equal(seeing.hidden, unseeing.hidden)
        assert seeing.weights.shape == (B, 1, T, S)


def test_a_state_returns_to_where_it_was():
    source = memory()
    state = RecurrentState(source, capacity=2)
    told = torch.randn(B, 4, 1, E)
    state.extend(told)
    state.advance([4, 1, 2])
    torch.testing.assert_close(state.current(), torch.stack([told[0, 3], told[1, 0], told[2, 1]]))
    state.truncate([3, 1, 0])
    torch.testing.assert_close(state.current(), torch.stack([told[0, 2], told[1, 0], source.last[2]]))
    more = torch.randn(B, 3, 1, E)
    state.extend(more)
    state.advance(3)
    assert state.lengths == [6, 4, 3]
    state.truncate(4)
    torch.testing.assert_close(state.current(), torch.stack([more[0, 0], more[1, 2], more[2, 2]]))
    state.select([2, 0])
    torch.testing.assert_close(state.current(), torch.stack([more[2, 2], more[0, 0]]))
    torch.testing.assert_close(state.memory.values, source.values[[2, 0]])
    state.free(0)
    torch.testing.assert_close(state.current(), torch.stack([source.last[2], more[0, 0]]))
