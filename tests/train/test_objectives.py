"""Every objective against its formula in plain torch: the sum of the losses, and how many there are."""

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from heedful.models.base import Batch, Output
from heedful.train.objectives import answer, causal, classify, masked, seq2seq

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
    assert loss.metrics["next_sentence_loss"] == pytest.approx(float(sentences))


def test_classify_labels_sequences_or_tokens():
    logits, labels = noise(B, 4), torch.tensor([3, 0, 2])
    loss = classify(Says(logits), Batch(targets=labels))
    assert loss.n_targets == B
    torch.testing.assert_close(loss.mean, nn.functional.cross_entropy(logits, labels))
    logits, labels = noise(B, T, 4), ids(B, T, below=4)
    labels[1, 2:] = -100
    loss = classify(Says(logits), Batch(targets=labels))
    assert loss.n_targets == B * T - 4
    kept = labels != -100
    torch.testing.assert_close(loss.mean, nn.functional.cross_entropy(logits[kept], labels[kept]))


def test_answer_chooses_among_the_real_positions():
    logits, lengths = noise(B, T, 2), [6, 3, 4]
    spans = torch.tensor([[1, 5], [0, 2], [3, 3]])
    loss = answer(Says(logits), Batch(targets=spans, lengths=torch.tensor(lengths)))
    want = sum(
        -torch.log_softmax(logits[b, :n, end], dim=0)[spans[b, end]]
        for b, n in enumerate(lengths)
        for end in (0, 1)
    )
    assert loss.n_targets == 2 * B
    torch.testing.assert_close(loss.sum, want)


def test_an_objective_without_targets_says_so():
    for objective in seq2seq, masked, classify, answer:
        with pytest.raises(ValueError, match="targets"):
            objective(Says(noise(B, T, V)), Batch(ids(B, T)))


def test_no_targets_at_all_is_no_loss():
    loss = seq2seq(Says(noise(B, T, V)), Batch(targets=torch.full((B, T), -100)))
    assert loss.n_targets == 0 and loss.mean == 0
