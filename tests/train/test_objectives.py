"""Every objective against its formula in plain torch: the sum of the losses, and how many there are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from heedful.models.base import Batch, Output
from heedful.models.bert import Bert, BertConfig
from heedful.train.objectives import (
    OBJECTIVES,
    causal,
    cbow,
    classification,
    make_objective,
    masked,
    multi_label,
    question_answering,
    r_drop_loss,
    regression,
    seq2seq,
)

B, T, V = 3, 6, 11


class Says(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits, **extra):
        super().__init__()
        self.output = Output(torch.zeros(1), logits, extra)

    def forward(self, batch):
        return self.output


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, below=V, seed=1):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def surprise(logits, row, position, token):
    return -torch.log_softmax(logits[row, position], dim=-1)[token]


def test_causal_counts_neither_padding_nor_what_follows_it():
    logits, tokens, lengths = noise(B, T, V), ids(B, T), [6, 1, 4]
    loss = causal(Says(logits), Batch(tokens, torch.tensor(lengths)))
    want = sum(surprise(logits, b, t, tokens[b, t + 1]) for b, n in enumerate(lengths) for t in range(n - 1))
    assert loss.n_targets == 5 + 0 + 3
    torch.testing.assert_close(loss.sum, want)
    torch.testing.assert_close(loss.mean, want / 8)


def test_causal_does_not_step_from_one_packed_document_to_the_next():
    logits, tokens = noise(1, T, V), ids(1, T)
    loss = causal(Says(logits), Batch(tokens, documents=torch.tensor([[0, 0, 0, 1, 2, 2]])))
    want = sum(surprise(logits, 0, t, tokens[0, t + 1]) for t in (0, 1, 4))
    assert loss.n_targets == 3
    torch.testing.assert_close(loss.sum, want)


def test_sums_over_small_batches_make_the_large_one():
    logits, tokens, lengths = noise(B, T, V), ids(B, T), torch.tensor([6, 2, 4])
    whole = causal(Says(logits), Batch(tokens, lengths))
    parts = [causal(Says(logits[i : i + 1]), Batch(tokens[i : i + 1], lengths[i : i + 1])) for i in range(B)]
    assert whole.n_targets == sum(p.n_targets for p in parts)
    torch.testing.assert_close(whole.sum, sum(p.sum for p in parts))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_seq2seq_smooths_towards_the_whole_vocabulary(smoothing):
    """Szegedy et al. 2016, section 7, which the paper cites: q'(k) = (1 - ε) [k is the target] + ε / V."""
    logits, targets = noise(B, T, V), ids(B, T)
    targets[0, 4:] = targets[1, 1:] = -100
    loss = seq2seq(Says(logits), Batch(targets=targets), smoothing=smoothing)
    counts = targets != -100
    wanted = torch.full((int(counts.sum()), V), smoothing / V)
    wanted[range(len(wanted)), targets[counts]] += 1 - smoothing
    want = -(wanted * torch.log_softmax(logits[counts], dim=-1)).sum()
    assert loss.n_targets == 4 + 1 + 6
    torch.testing.assert_close(loss.sum, want)


def test_smoothing_is_that_of_the_reference_trainer():
    logits, targets = noise(B, T, V), ids(B, T)
    targets[0, 4:] = -100
    theirs = LabelSmoother(epsilon=0.1)({"logits": logits}, targets.clone())
    ours = seq2seq(Says(logits), Batch(targets=targets), smoothing=0.1)
    torch.testing.assert_close(ours.mean, theirs)


def test_masked_counts_the_hidden_tokens_alone():
    logits, targets = noise(B, T, V), torch.full((B, T), -100)
    targets[0, 2], targets[2, 5] = 4, 9
    loss = masked(Says(logits), Batch(targets=targets))
    assert loss.n_targets == 2
    torch.testing.assert_close(loss.sum, surprise(logits, 0, 2, 4) + surprise(logits, 2, 5, 9))


def test_masked_adds_the_mean_over_pairs_to_the_mean_over_tokens():
    logits, pairs, follows = noise(B, T, V), noise(B, 2, seed=2), torch.tensor([0, 1, 1])
    targets = ids(B, T)
    targets[:, 3:] = -100
    batch = Batch(targets=targets, next_sentence=follows)
    loss = masked(Says(logits, next_sentence=pairs), batch)
    tokens = nn.functional.cross_entropy(logits[:, :3].flatten(0, 1), targets[:, :3].flatten())
    sentences = nn.functional.cross_entropy(pairs, follows)
    assert loss.n_targets == 3 * B
    torch.testing.assert_close(loss.mean, tokens + sentences)
    total, n = loss.metrics["next_sentence_loss"]
    torch.testing.assert_close(total / n, sentences)
    right, n = loss.metrics["next_sentence_accuracy"]
    assert (right, n) == ((pairs.argmax(dim=1) == follows).sum(), B)
    total, n = loss.metrics["token_loss"]
    torch.testing.assert_close(total / n, tokens)


def bert(**changes):
    torch.manual_seed(0)
    sizes = dict(d_model=16, n_layers=1, n_heads=2, d_ff=16, vocab_size=V, max_len=T)
    return Bert.create(BertConfig(**sizes, dropout=0.0, attention_dropout=0.0, **changes))


def pretraining():
    """Rows with very unequal numbers of hidden tokens."""
    tokens, targets = ids(8, T), torch.full((8, T), -100)
    for row, n in enumerate([1, 1, 1, 1, 5, 5, 5, 5]):
        targets[row, :n] = tokens[row, :n]
    return Batch(tokens, targets=targets, next_sentence=ids(8, below=2))


def gradient(model, objective, parts):
    """As a trainer does it: sums, divided once."""
    model.zero_grad()
    losses = [objective(model, part) for part in parts]
    for loss in losses:
        loss.sum.backward()
    n = sum(loss.n_targets for loss in losses)
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / n


def rows(batch, begin, end):
    return Batch(
        batch.tokens[begin:end],
        targets=batch.targets[begin:end],
        next_sentence=batch.next_sentence[begin:end],
    )


def test_next_sentences_count_the_same_however_a_batch_is_cut():
    model, batch = bert(), pretraining()
    objective = make_objective({"name": "masked"})
    whole = gradient(model, objective, [batch])
    for parts in ([(0, 4), (4, 8)], [(0, 2), (2, 3), (3, 8)]):
        cut = gradient(model, objective, [rows(batch, *part) for part in parts])
        torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    # The reference's loss of one batch cannot do that.
    halves = gradient(model, masked, [rows(batch, 0, 4), rows(batch, 4, 8)])
    assert (gradient(model, masked, [batch]) - halves).abs().max() > 1e-3


def test_a_pair_counts_as_many_tokens_as_a_full_row_has_hidden():
    """So that both means weigh alike where rows are full: 1.0 here, with 6 x 0.5 hidden in each row."""
    model, batch = bert(), pretraining()
    batch.targets = torch.where(torch.arange(T) < 3, batch.tokens, -100)
    ours = make_objective({"name": "masked", "share": 0.5})(model, batch)
    torch.testing.assert_close(ours.mean, masked(model, batch).mean)


def test_a_model_without_a_next_sentence_says_so():
    with pytest.raises(ValueError, match="no head for it"):
        masked(bert(head="masked"), pretraining())


def test_what_is_watched_is_called_whole():
    """Hooks on the model see its output; the loss is the same."""
    model, batch, seen = bert().eval(), pretraining(), []
    want = masked(model, batch).sum
    model.register_forward_hook(lambda m, i, out: seen.append(out.logits.shape))
    torch.testing.assert_close(masked(model, batch).sum, want)
    assert seen == [(8, T, V)]


def test_classify_labels_sequences_or_tokens():
    logits, labels = noise(B, 4), torch.tensor([3, 0, 2])
    loss = classification(Says(logits), Batch(targets=labels))
    assert loss.n_targets == B
    torch.testing.assert_close(loss.mean, nn.functional.cross_entropy(logits, labels))
    logits, labels = noise(B, T, 4), ids(B, T, below=4)
    labels[1, 2:] = -100
    loss = classification(Says(logits), Batch(targets=labels))
    assert loss.n_targets == B * T - 4
    kept = labels != -100
    torch.testing.assert_close(loss.mean, nn.functional.cross_entropy(logits[kept], labels[kept]))
    right, n = loss.metrics["accuracy"]
    assert (right, n) == ((logits.argmax(dim=-1) == labels)[kept].sum(), kept.sum())


def test_several_labels_and_numbers():
    logits, labels = noise(B, 4), ids(B, 4, below=2)
    loss = multi_label(Says(logits), Batch(targets=labels))
    want = nn.functional.binary_cross_entropy(torch.sigmoid(logits), labels.float())
    torch.testing.assert_close(loss.mean, want)
    assert loss.metrics["accuracy"] == (((logits > 0) == (labels == 1)).sum(), 4 * B)
    loss = regression(Says(logits[:, :1]), Batch(targets=torch.tensor([1.0, 2.0, 3.0])))
    torch.testing.assert_close(loss.mean, ((logits[:, 0] - torch.tensor([1.0, 2.0, 3.0])) ** 2).mean())


def test_cbow_wants_the_tokens_back():
    logits, tokens = noise(2, T, V), ids(2, T)
    loss = cbow(Says(logits), Batch(tokens, torch.tensor([T, 2])))
    want = sum(surprise(logits, b, t, tokens[b, t]) for b, n in enumerate([T, 2]) for t in range(n))
    assert loss.n_targets == T + 2
    torch.testing.assert_close(loss.sum, want)


def test_answer_chooses_among_the_real_positions():
    logits, lengths = noise(B, T, 2), [6, 3, 4]
    spans = torch.tensor([[1, 5], [0, 2], [3, 3]])
    loss = question_answering(Says(logits), Batch(targets=spans, lengths=torch.tensor(lengths)))
    want = sum(
        -torch.log_softmax(logits[b, :n, end], dim=0)[spans[b, end]] for b, n in enumerate(lengths) for end in (0, 1)
    )
    assert loss.n_targets == 2 * B
    torch.testing.assert_close(loss.sum, want)
    spans[0] = torch.stack([logits[0, :, 0].argmax(), logits[0, :, 1].argmax()])
    spans[1] = (spans[1] + 1) % 3  # at most one row more can be right by chance
    right, n = question_answering(Says(logits), Batch(targets=spans, lengths=torch.tensor(lengths))).metrics["accuracy"]
    assert 1 <= right <= 3 and n == B


def test_an_objective_without_targets_says_so():
    for objective in seq2seq, masked, classification, question_answering:
        with pytest.raises(ValueError, match="targets"):
            objective(Says(noise(B, T, V)), Batch(ids(B, T)))


def test_no_targets_at_all_is_no_loss():
    loss = seq2seq(Says(noise(B, T, V)), Batch(targets=torch.full((B, T), -100)))
    assert loss.n_targets == 0 and loss.mean == 0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "distill"])
def test_objectives_by_name_take_a_whole_table_of_settings(name):
    """As a recipe has it: every setting there is, at its default."""
    table = {"smoothing": 0.0, "teacher": "", "temperature": 2.0, "soft": 5.0, "hard": 2.0, "cosine": 1.0}
    assert callable(make_objective({"name": name} | table, rollouts=lambda model, batch: batch))


def test_objectives_by_name_use_their_settings():
    logits, targets = noise(B, T, V), ids(B, T)
    batch = Batch(targets=targets)
    for name in "seq2seq", "spans", "causal", "pixels", "classify", "tag":
        got = make_objective({"name": name, "smoothing": 0.3})(Says(logits), batch).sum
        torch.testing.assert_close(got, seq2seq(Says(logits), batch, smoothing=0.3).sum)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "casual"}, "did you mean causal"),
        ({"name": "seq2seq", "smoothnig": 0.1}, "did you mean smoothing"),
        ({"name": "regress", "smoothing": 0.1}, "'regress' has no setting 'smoothing'"),
        ({"name": "causal", "temperature": 3.0}, "'causal' has no setting 'temperature'"),
        ({"name": "seq2seq", "smoothing": 1.0}, "from 0 to 1"),
        ({"name": "seq2seq", "smoothing": "much"}, "must be a number"),
        ({"name": "distill"}, "needs a teacher"),
        ({"name": "grpo"}, "needs what samples completions"),
        ({"name": "dpo", "loss_type": "grpo"}, "sigmoid and ipo are known"),
        ({"name": "dpo", "beta": 0.0}, "above 0"),
        ({"name": "causal", "reward": "regex"}, "'causal' has no setting 'reward'"),
    ],
)
def test_mistakes_in_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_objective(settings)


def test_r_drop_is_the_paper_s_loss_in_training_and_cross_entropy_in_validation():
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 3, 7), torch.tensor([[1, 2, -100], [0, 6, 5]])
    found = r_drop_loss(logits, targets, 0.1, 5.0)
    one, other = logits[:2], logits[2:]
    kept = targets != -100
    ce = sum(F.cross_entropy(x[kept], targets[kept], reduction="sum", label_smoothing=0.1) for x in (one, other))
    p, q = (x[kept].log_softmax(-1) for x in (one, other))
    kl = F.kl_div(p, q, log_target=True, reduction="sum") + F.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close(2 * found.sum, ce + 5.0 / 2 * kl)  # Liang et al. 2021, equations 2 to 4
    assert found.n_targets == 5
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "vocab_size": 50, "max_len": 16}
    classifier = Bert.create(BertConfig(**sizes, head="classify", n_labels=2, dropout=0.2))
    batch = Batch(torch.randint(5, 50, (6, 9)), targets=torch.tensor([0, 1, 0, 1, 1, 0]))
    twice = make_objective({"name": "classify", "r_drop": 1.0})
    once = make_objective({"name": "classify"})
    classifier.train()
    assert twice(classifier, batch).metrics["divergence"][0] > 0
    classifier.eval()
    assert torch.equal(twice(classifier, batch).sum, once(classifier, batch).sum)
