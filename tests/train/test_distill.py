"""Distillation against DistilBERT's formulas in plain torch, and what a halved teacher keeps."""

import pytest
import torch
import torch.nn.functional as F

from heedful.models.base import Batch
from heedful.models.bert import Bert, BertConfig
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.t5 import T5, T5Config
from heedful.models.vit import ViT, ViTConfig
from heedful.train import loss as loss_module
from heedful.train.distill import Distill, halve, project_embeddings
from heedful.train.distill_labels import DistillLabels
from heedful.train.objectives import make_objective

TINY = dict(d_model=16, n_layers=4, n_heads=2, d_ff=24, vocab_size=53, max_len=12, dropout=0.0)


def bert(seed, **changes):
    torch.manual_seed(seed)
    model = Bert.create(BertConfig(**{**TINY, "attention_dropout": 0.0, **changes}))
    return large(model, seed)


def gpt(seed, **changes):
    torch.manual_seed(seed)
    return large(GPT.create(GPTConfig(**{**TINY, **changes})), seed)


def large(model, seed):
    """Weights large enough that every part shows in the output."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def text(masked=True):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 53, (3, 12), generator=g)
    lengths = torch.tensor([12, 7, 9])
    real = torch.arange(12) < lengths[:, None]
    hidden = real & (torch.rand(3, 12, generator=g) < 0.3)
    targets = torch.where(hidden, tokens, -100) if masked else None
    return Batch(tokens, lengths, targets=targets), real


def formula(student, teacher, targets, real, temperature=2.0, soft=5.0, hard=2.0, cosine=1.0):
    """The authors' training loop: distiller.py, step()."""
    kl = F.kl_div(
        F.log_softmax(student.logits[real] / temperature, dim=-1),
        F.softmax(teacher.logits[real] / temperature, dim=-1),
        reduction="batchmean",
    )
    mlm = F.cross_entropy(student.logits.flatten(0, 1), targets.flatten())
    angle = F.cosine_embedding_loss(student.hidden[real], teacher.hidden[real], torch.ones(int(real.sum())))
    return soft * kl * temperature**2 + hard * mlm + cosine * angle


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_the_three_losses_are_those_of_the_paper(family):
    make_one = {"bert": bert, "gpt": gpt}[family]
    student, teacher = make_one(1, n_layers=2), make_one(2)
    batch, real = text(masked=family == "bert")
    targets = batch.targets
    if targets is None:
        targets = torch.full_like(batch.tokens, -100)
        for row, n in enumerate(batch.lengths.tolist()):
            targets[row, : n - 1] = batch.tokens[row, 1:n]
    with torch.no_grad():
        taught = teacher(batch)
    want = formula(student(batch), taught, targets, real)
    want.backward()
    wanted = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    loss = Distill(teacher, share=None)(student, batch)
    loss.mean.backward()
    torch.testing.assert_close(loss.mean, want)
    got = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in teacher.parameters())
    assert int(loss.n_targets) == int(real.sum())


def test_a_large_vocabulary_goes_in_chunks(monkeypatch):
    student, teacher, (batch, _) = bert(1, n_layers=2), bert(2), text()
    plain = Distill(teacher)(student, batch)
    plain.sum.backward()
    want = student.embed.weight.grad.clone()
    student.zero_grad()
    monkeypatch.setitem(loss_module.CHUNK, "cpu", 4 * 53 * 5)
    chunked = Distill(teacher)(student, batch)
    chunked.sum.backward()
    torch.testing.assert_close(chunked.sum, plain.sum)
    torch.testing.assert_close(student.embed.weight.grad, want)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_decoder_learns_where_it_has_targets(temperature, monkeypatch):
    """As in conversations: the answers alone, by both losses, whatever the chunks."""
    student, teacher = gpt(1, n_layers=2, d_model=8), gpt(2)
    batch, _ = text()
    learned = batch.targets != -100
    with torch.no_grad():
        taught = teacher(batch).logits[learned]
    logits = student(batch).logits[learned]
    kl = F.kl_div(F.log_softmax(logits / temperature, -1), F.softmax(taught / temperature, -1), reduction="sum")
    want = 3 * kl * temperature**2 + 0.5 * F.cross_entropy(logits, batch.targets[learned], reduction="sum")
    want.backward()
    wanted = {name: p.grad.clone() for name, p in student.named_parameters()}
    for size in 4 * 53 * 5, 2**26:
        student.zero_grad()
        monkeypatch.setitem(loss_module.CHUNK, "cpu", size)
        loss = Distill(teacher, temperature=temperature, soft=3.0, hard=0.5, cosine=0.0)(student, batch)
        loss.sum.backward()
        torch.testing.assert_close(loss.sum, want)
        assert int(loss.n_targets) == int(learned.sum())
        for name, p in student.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        quiet = Distill(teacher, temperature=temperature, soft=3.0, hard=0.5, cosine=0.0)(student, batch)
    torch.testing.assert_close(quiet.sum, want.detach())


def test_sums_over_small_batches_make_the_large_one():
    student, objective, (batch, _) = bert(1, n_layers=2), Distill(bert(2)), text()
    whole = objective(student, batch)
    parts = [
        objective(student, Batch(batch.tokens[i : i + 1, :n], targets=batch.targets[i : i + 1, :n]))
        for i, n in enumerate(batch.lengths.tolist())
    ]
    torch.testing.assert_close(sum(p.sum for p in parts), whole.sum)
    assert sum(p.n_targets for p in parts) == whole.n_targets
    assert {*whole.metrics} == {"soft_loss", "hard_loss", "cosine_loss"}


def test_a_student_that_is_the_teacher_has_nothing_to_learn_from_it():
    teacher = bert(1)
    loss = Distill(bert(1), hard=0.0)(teacher, text()[0])
    assert abs(float(loss.sum.detach())) < 1e-3
    loss.sum.backward()
    assert max(float(p.grad.abs().max()) for p in teacher.parameters() if p.grad is not None) < 1e-4


# --- labels ----------------------------------------------------------------------------------------------------------

TARGETS = {
    "classify": torch.tensor([0, 2, 1]),
    "tag": torch.tensor([[-100, 1, 2, -100, 0] + [-100] * 7, [-100, 2] + [-100] * 10, [-100, 0, 1] + [-100] * 9]),
    "answer": torch.tensor([[3, 5], [0, 0], [8, 8]]),
}


def labelled(head):
    batch, _ = text()
    return Batch(batch.tokens, batch.lengths, targets=TARGETS[head])


@pytest.mark.parametrize("head", ["classify", "tag", "answer"])
def test_a_teacher_of_labels_teaches_by_the_same_three_losses(head):
    student, teacher = bert(1, n_layers=2, head=head, n_labels=3), bert(2, head=head, n_labels=3)
    batch = labelled(head)
    loss = DistillLabels(teacher)(student, batch)
    total = n = 0.0
    for row, length in enumerate(batch.lengths.tolist()):  # each sequence alone, without padding
        alone = Batch(batch.tokens[row : row + 1, :length])
        with torch.no_grad():
            taught = teacher(alone)
        said = student(alone)
        mine, theirs, targets = said.logits[0], taught.logits[0], batch.targets[row]
        if head == "classify":
            targets, mine, theirs = targets[None], mine[None], theirs[None]
        elif head == "answer":
            mine, theirs = mine.T, theirs.T
        kept = targets[: len(mine)] != -100
        mine, theirs, targets = mine[kept], theirs[kept], targets[: len(kept)][kept]
        kl = F.kl_div(F.log_softmax(mine / 2, -1), F.softmax(theirs / 2, -1), reduction="sum")
        angle = 1 - F.cosine_similarity(said.hidden[0], taught.hidden[0], dim=-1).mean()
        total = total + 5 * 4 * kl + 2 * F.cross_entropy(mine, targets, reduction="sum") + len(targets) * angle
        n += len(targets)
    torch.testing.assert_close(loss.sum, total)
    assert int(loss.n_targets) == n
    loss.sum.backward()
    assert all(p.grad is None for p in teacher.parameters()) and student.embed.weight.grad.isfinite().all()
    assert type(make_objective({"name": "distill"}, teacher=teacher)) is DistillLabels
    assert halve(teacher).config.head == head


def test_what_cannot_teach_says_so():
    with pytest.raises(ValueError, match="ViT cannot teach"):
        Distill(ViT.create(ViTConfig(d_model=16, n_layers=1, n_heads=2, image_size=8, patch_size=4)))
    with pytest.raises(ValueError, match="cannot teach"):
        Distill(bert(1, head="classify"))
    with pytest.raises(ValueError, match="cannot teach labels"):
        DistillLabels(bert(1, head="classify", n_labels=1))
    with pytest.raises(ValueError, match="a head of the kind tag"):
        DistillLabels(bert(1, head="tag"))(bert(1, head="classify"), labelled("classify"))
    with pytest.raises(ValueError, match="3 labels and the teacher 2"):
        DistillLabels(bert(1, head="classify"))(bert(1, head="classify", n_labels=3), labelled("classify"))
    batch, _ = text()
    with pytest.raises(ValueError, match="cannot learn from a GPT"):
        Distill(gpt(1))(bert(1), batch)
    with pytest.raises(ValueError, match="one tokenizer"):
        Distill(bert(1))(bert(1, vocab_size=60), batch)
    with pytest.raises(ValueError, match=r"set objective\.cosine to 0"):
        Distill(bert(1))(bert(1, d_model=8), batch)
    assert torch.isfinite(Distill(bert(1), cosine=0.0)(bert(1, d_model=8), batch).sum)


def test_by_name_with_the_papers_weights():
    objective = make_objective({"name": "distill", "teacher": "x", "soft": 1.0}, teacher=bert(1))
    assert (objective.temperature, objective.soft, objective.hard, objective.cosine) == (2, 1, 2, 1)
    assert objective.share == 0.15
    assert make_objective({"name": "distill"}, teacher=gpt(1)).share == 1.0


# --- halving ---------------------------------------------------------------------------------------------------------


def test_half_a_teacher_has_every_second_layer_and_all_the_rest():
    for teacher in bert(1), gpt(1):
        student = halve(teacher)
        assert type(student) is type(teacher) and student.config.n_layers == 2
        theirs = dict(teacher.named_parameters())
        for name, p in student.named_parameters():
            source = name.replace("blocks.1.", "blocks.2.")
            assert torch.equal(p, theirs[source]), name
            assert p.data_ptr() != theirs[source].data_ptr()


def test_half_an_encoder_decoder():
    torch.manual_seed(0)
    teacher = T5.create(
        T5Config(d_model=16, n_layers=4, n_decoder_layers=2, n_heads=2, d_head=8, d_ff=8, vocab_size=31)
    )
    student = halve(teacher)
    assert (student.config.n_layers, student.config.n_decoder_layers) == (2, 1)
    blocks = teacher.encoder.blocks[2].feedforward.up.weight
    assert torch.equal(student.encoder.blocks[1].feedforward.up.weight, blocks)


def test_a_bert_becomes_a_distilbert_that_reads_as_it_does():
    """Layer 0 of a one-layer BERT twice over: with equal layers nothing else can differ."""
    teacher = bert(1, n_layers=1)
    pair = bert(1, n_layers=2)
    with torch.no_grad():
        for name, p in pair.named_parameters():
            p.copy_(dict(teacher.named_parameters())[name.replace("blocks.1.", "blocks.0.")])
    student = halve(pair, family="distilbert")
    assert student.family == "distilbert" and student.config.n_layers == 1
    batch = Batch(text()[0].tokens)
    torch.testing.assert_close(student(batch).logits, teacher(batch).logits)
    assert halve(pair.half(), family="distilbert").embed.weight.dtype == torch.float16


def test_what_cannot_be_halved_says_so():
    with pytest.raises(ValueError, match="one layer"):
        halve(bert(1, n_layers=1))
    with pytest.raises(ValueError, match="into a distilbert"):
        halve(gpt(1), family="distilbert")


def test_a_narrow_student_begins_with_the_embeddings_principal_components():
    teacher, student = gpt(1), gpt(2, d_model=8)
    before = float(student.embed.weight.detach().norm())
    project_embeddings(teacher, student)
    u, s, _ = torch.linalg.svd(teacher.embed.weight, full_matrices=False)
    best = (u[:, :8] * s[:8]).detach()
    got = student.embed.weight.detach() * (best.norm() / before)
    torch.testing.assert_close(got @ got.T, best @ best.T, atol=1e-3, rtol=1e-3)
    assert float(student.embed.weight.detach().norm()) == pytest.approx(before, rel=1e-4)
    same = student.embed.weight.clone()
    project_embeddings(gpt(3, vocab_size=60), student)  # another vocabulary: unchanged
    assert torch.equal(student.embed.weight, same)
