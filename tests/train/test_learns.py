"""Every objective learns: a tiny model comes to the least loss there is, which is known, in a second or two."""

import math

import numpy as np
import pytest
import torch

from heedful.data.classification import LabelledTexts
from heedful.data.corpus import Corpus
from heedful.data.corruption import MaskedWindows, SpanCorruption
from heedful.data.dataset import Draw
from heedful.data.images import ImageSet, LabelledImages, PixelSequences
from heedful.data.loader import BatchSampler
from heedful.data.neighbour_windows import CBOWWindows
from heedful.data.pairs import Pairs
from heedful.data.squad import Question, SquadWindows
from heedful.data.synthetic import MarkovChain, Reversal
from heedful.data.tagging import TaggedSentences
from heedful.models.bert import Bert, BertConfig
from heedful.models.cbow import CBOW, CBOWConfig
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.image_gpt import ImageGPT, ImageGPTConfig
from heedful.models.seq2seq import Seq2Seq, Seq2SeqConfig
from heedful.models.t5 import T5, T5Config
from heedful.models.transformer import Transformer, TransformerConfig
from heedful.models.vit import ViT, ViTConfig
from heedful.text import train_wordpiece
from heedful.train.distill import Distill, halve
from heedful.train.objectives import make_objective

SIZES = dict(d_model=32, n_heads=2, d_ff=64, dropout=0.0)
WORDS = "the film was very good bad dull fun red green blue one two three four cat dog Ada Bob Paris Rome"


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([WORDS] * 3, 200)


def create(kind, config, *, times=1):
    """`times` 6 for families that begin with 0.02, which suits a width of 768; here it should be 1/√32."""
    torch.manual_seed(0)
    model = kind.create(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(times)
    return model


def bert(tokenizer, *, times=6, **settings):
    config = BertConfig(**SIZES, n_layers=1, attention_dropout=0.0, vocab_size=tokenizer.vocab_size, max_len=32)
    return create(Bert, config.replace(**settings), times=times)


def learn(model, objective, data, steps, *, batch_size=16, rate=1e-2, again=False):
    """The plainest training there is; `again`: every epoch shows what the first did."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    order = BatchSampler(len(data), batch_size, seed=1)
    model.train()
    for step in range(steps):
        draws = [Draw(0, d.index) if again else d for d in order(step)]
        loss = objective(model, data.batch(draws, seed=1))
        optimizer.zero_grad()
        loss.mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def judged(model, objective, data, epoch=0, n=256):
    """Mean loss and mean metrics over some examples."""
    loss = objective(model, data.batch([Draw(epoch, i) for i in range(min(n, len(data)))], seed=1))
    return float(loss.mean), {name: float(total) / int(count) for name, (total, count) in loss.metrics.items()}


def entropy(p):
    p = np.asarray(p, dtype=float)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def test_causal_comes_to_the_entropy_of_the_source():
    source, objective = MarkovChain(n_symbols=6, length=32, spread=0.4), make_objective({"name": "causal"})
    model = create(GPT, GPTConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=6, max_len=32, dropout=0.0))
    before, _ = judged(model, objective, source, epoch=10**6)
    learn(model, objective, source, 150, batch_size=32)
    loss, _ = judged(model, objective, source, epoch=10**6, n=1000)  # never seen
    assert source.entropy == pytest.approx(loss, rel=0.02)
    assert loss < source.unigram_entropy < before


def test_masked_comes_to_the_entropy_that_hiding_leaves(tokenizer):
    """Tokens drawn independently: of a [MASK] nothing is known but how common each token is, H(p). Where one is shown,
    it is the true one or a random one, half each: H(true | shown) is left of P(t, s) = p(t) ([s = t] + 1/n) / 2."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    ids = [tokenizer.encode(w)[0] for w in ("red", "green", "blue", "cat")]
    text = Corpus.of([np.random.default_rng(0).choice(ids, 20000, p=p).tolist()])
    data = MaskedWindows(text, tokenizer, 32, pairs=False)
    n = len(data.ordinary)
    joint = 0.5 * np.diag(p) + 0.5 * np.outer(p, np.full(4, 1 / n))  # true, shown (of the four)
    others = p * 0.5 * (n - 4) / n  # shown is a token the text never has: nothing is known
    shown = joint.sum(axis=0)
    left = sum(shown[s] * entropy(joint[:, s] / shown[s]) for s in range(4)) + others.sum() * entropy(p)
    least = 0.8 * entropy(p) + 0.2 * left
    objective = make_objective({"name": "masked"})
    model = learn(bert(tokenizer, times=1, head="masked"), objective, data, 250, rate=5e-3, batch_size=32)
    loss = np.mean([judged(model, objective, data, epoch=e, n=600)[0] for e in range(100, 104)])
    assert loss == pytest.approx(least, rel=0.03)


def test_next_sentences_are_told(tokenizer):
    """Each document is one word over and over: what is hidden is known, and so is whether B follows A."""
    ids = [tokenizer.encode(w)[0] for w in ("red", "green", "blue", "cat")]
    data = MaskedWindows(Corpus.of([[i] * 200 for i in ids]), tokenizer, 16)
    objective = make_objective({"name": "masked"})
    model = learn(bert(tokenizer, n_layers=2), objective, data, 200, rate=3e-3, batch_size=32)
    loss, metrics = judged(model, objective, data, epoch=100)
    assert metrics["next_sentence_accuracy"] == 1 and loss < 0.2 and metrics["token_loss"] < 0.1


def test_spans_are_learned_by_heart(tokenizer):
    random = np.random.default_rng(0)
    text = Corpus.of([random.integers(5, tokenizer.vocab_size, 160).tolist()])
    words = train_wordpiece([WORDS] * 3, 200)
    words.eos_id = words.sep_id
    n = tokenizer.vocab_size
    data = SpanCorruption(text, words, 20, start_id=0, vocab_size=n + 10, shifted=False)
    config = T5Config(d_model=32, n_layers=1, n_heads=2, d_head=16, d_ff=64, vocab_size=n + 10, dropout=0.0)
    objective = make_objective({"name": "spans"})
    model = learn(create(T5, config), objective, data, 200, batch_size=len(data), again=True)
    assert judged(model, objective, data)[0] < 0.02


@pytest.mark.parametrize("family", ["seq2seq", "transformer"])
def test_seq2seq_with_smoothing_comes_to_the_entropy_of_the_smoothed_target(family):
    data, epsilon = Reversal(n_symbols=5, length=3, n_examples=60), 0.1
    n = data.vocab_size
    config, kind = {
        "seq2seq": (Seq2SeqConfig(cell="gru", attention="dot", d_model=32, vocab_size=n), Seq2Seq),
        "transformer": (TransformerConfig(**SIZES, n_layers=1, vocab_size=n), Transformer),
    }[family]
    objective = make_objective({"name": "seq2seq", "smoothing": epsilon})
    model = learn(create(kind, config), objective, data, 250, rate=5e-3, batch_size=30)
    least = entropy([1 - epsilon + epsilon / n, *[epsilon / n] * (n - 1)])
    loss, _ = judged(model, objective, data)
    assert least - 1e-4 < loss < 1.03 * least


def test_translation_is_learned_by_heart(tokenizer):
    """Pairs of unequal length, padded: without smoothing the least loss is 0."""
    words = WORDS.split()
    sources = [tokenizer.encode(" ".join(words[i : i + 2 + i % 3])) for i in range(12)]
    targets = [tokenizer.encode(" ".join(reversed(words[i : i + 2 + i % 3]))) for i in range(12)]
    data = Pairs(sources, targets, start_id=0, eos_id=tokenizer.sep_id)
    model = create(Transformer, TransformerConfig(**SIZES, n_layers=1, vocab_size=tokenizer.vocab_size))
    objective = make_objective({"name": "seq2seq"})
    learn(model, objective, data, 120, batch_size=12, rate=5e-3)
    assert judged(model, objective, data)[0] < 0.02


def reviews(longest=6):
    """Sentences, and how many of their words are good and bad."""
    random = np.random.default_rng(0)
    texts = [
        " ".join(random.choice(["good", "bad", "film", "the", "cat"], random.integers(2, longest + 1)))
        for _ in range(64)
    ]
    return texts, [t.split().count("good") for t in texts], [t.split().count("bad") for t in texts]


def test_classification_comes_to_all_right(tokenizer):
    texts, good, bad = reviews()
    data = LabelledTexts(texts, ["up" if g > b else "down" for g, b in zip(good, bad, strict=True)], tokenizer)
    model, objective = bert(tokenizer, head="classify"), make_objective({"name": "classify"})
    learn(model, objective, data, 100, rate=5e-3)
    loss, metrics = judged(model, objective, data)
    assert metrics["accuracy"] == 1 and loss < 0.05


def test_regression_comes_to_no_error(tokenizer):
    texts, good, bad = reviews()
    data = LabelledTexts(texts, [g - b for g, b in zip(good, bad, strict=True)], tokenizer, kind="regress")
    objective = make_objective({"name": "regress"})
    model = learn(bert(tokenizer, head="classify", n_labels=1), objective, data, 200, rate=3e-3)
    assert judged(model, objective, data)[0] < 0.02 * float(data.targets.var())


def test_several_labels_come_to_be_right(tokenizer):
    texts, good, bad = reviews(longest=3)
    labels = [[int(g > 0), int(b > 0), int("cat" in t)] for t, g, b in zip(texts, good, bad, strict=True)]
    data = LabelledTexts(texts, labels, tokenizer, kind="multi_label")
    objective = make_objective({"name": "multi_label"})
    model = learn(bert(tokenizer, head="classify", n_labels=3), objective, data, 200, rate=5e-3)
    loss, metrics = judged(model, objective, data)
    assert metrics["accuracy"] > 0.99 and loss < 0.05


def test_tags_come_to_all_right(tokenizer):
    """The same word is a place after "the" and a person elsewhere, so the context must be read."""
    random = np.random.default_rng(0)
    sentences = []
    for _ in range(64):
        words = random.choice(["the", "Paris", "Ada", "film"], random.integers(2, 8)).tolist()
        tags = [
            ("B-LOC" if last == "the" else "B-PER") if word in ("Paris", "Ada") else "O"
            for last, word in zip(["", *words[:-1]], words, strict=True)
        ]
        sentences.append((words, tags))
    data = TaggedSentences(sentences, tokenizer)
    objective = make_objective({"name": "tag"})
    model = learn(bert(tokenizer, head="tag", n_labels=3), objective, data, 120, rate=5e-3)
    loss, metrics = judged(model, objective, data)
    assert metrics["accuracy"] == 1 and loss < 0.05


def test_answers_come_to_all_right(tokenizer):
    random = np.random.default_rng(0)
    passages, questions = [], []
    for i in range(40):
        words = random.permutation(["red", "green", "blue", "one", "two", "three"]).tolist()
        asked = ["one", "two", "three"][i % 3]
        passages.append(" ".join(words))
        begin = passages[-1].index(asked)
        questions.append(Question(str(i), asked, i, (asked,), begin, begin + len(asked)))
    data = SquadWindows(passages, questions, tokenizer, max_length=32, stride=4)
    objective = make_objective({"name": "answer"})
    model = learn(bert(tokenizer, head="answer"), objective, data, 200, rate=5e-3)
    loss, metrics = judged(model, objective, data)
    assert metrics["accuracy"] == 1 and loss < 0.05


def quadrants():
    """Noise, and one brighter quarter, which is the label."""
    random = np.random.default_rng(0)
    labels = np.arange(64) % 4
    images = random.integers(0, 120, (64, 8, 8))
    for image, label in zip(images, labels, strict=True):
        top, left = 4 * (label // 2), 4 * (label % 2)
        image[top : top + 4, left : left + 4] += 60
    return ImageSet.of(images, labels)


def test_images_come_to_all_right():
    config = ViTConfig(**SIZES, n_layers=1, image_size=8, patch_size=4, n_channels=1, n_labels=4)
    data, objective = LabelledImages(quadrants()), make_objective({"name": "classify"})
    model = learn(create(ViT, config), objective, data, 100, rate=5e-3)
    loss, metrics = judged(model, objective, data)
    assert metrics["accuracy"] == 1 and loss < 0.05


def test_pixels_come_to_the_entropy_of_the_images():
    """Eight images, one as likely as the other: log 8 nats for an image, however many pixels it has."""
    images = np.random.default_rng(0).integers(0, 2, (8, 4, 4)) * 255
    data, objective = PixelSequences(ImageSet.of(images), 2), make_objective({"name": "pixels"})
    config = ImageGPTConfig(**SIZES, n_layers=2, vocab_size=data.vocab_size, max_len=16)
    model = learn(create(ImageGPT, config, times=6), objective, data, 150, batch_size=8, rate=5e-3)
    assert judged(model, objective, data)[0] == pytest.approx(math.log(8) / 16, rel=0.03)


@pytest.mark.parametrize("negatives", [0, 5])
def test_cbow_comes_to_the_entropy_between_two_neighbours(negatives):
    """A chain that reads the same backwards: P(b | a, c) ∝ S(a, b) S(b, c) / π(b), which a mean of vectors can say, by
    negative sampling too, since the head's bias is the log of the noise."""
    random = np.random.default_rng(0)
    n = 5
    weights = random.random((n, n)) ** 4 + 0.02
    joint = (weights + weights.T) / (weights + weights.T).sum()  # S
    often = joint.sum(axis=1)  # π
    triples = joint[:, :, None] * joint[None] / often[None, :, None]  # P(a, b, c)
    around = triples.sum(axis=1, keepdims=True)
    least = float(-(triples * np.log(triples / around)).sum())
    steps = np.cumsum(joint / often[:, None], axis=1)
    text = [0]
    for chance in random.random(40000):
        text.append(int(np.searchsorted(steps[text[-1]][:-1], chance, side="right")))
    data, objective = CBOWWindows(Corpus.of([text]), 200), make_objective({"name": "cbow", "negatives": negatives})
    model = create(CBOW, CBOWConfig(vocab_size=n, d_model=16, window=1))
    if negatives:
        model.init_unigram(torch.bincount(torch.tensor(text)), 0.75)
    learn(model, objective, data, 300, batch_size=16, rate=3e-2)
    assert judged(model, objective, data)[0] == pytest.approx(least, rel=0.03 if negatives else 0.02)
    assert least < 0.95 * entropy(often)


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_a_student_comes_to_say_what_its_teacher_says(family, tokenizer):
    n = tokenizer.vocab_size
    if family == "bert":
        teacher = bert(tokenizer, times=1, head="masked", n_layers=2, max_len=16)
        text = Corpus.of([np.random.default_rng(0).integers(5, n, 4000).tolist()])
        data = MaskedWindows(text, tokenizer, 16, pairs=False)
    else:
        teacher = create(GPT, GPTConfig(**SIZES, n_layers=2, vocab_size=8, max_len=16))
        data = MarkovChain(n_symbols=8, length=16)
    with torch.no_grad():  # a teacher with opinions
        for p in teacher.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    objective = Distill(teacher, hard=0.0)
    student = halve(teacher)
    _, before = judged(student, objective, data, epoch=100)
    learn(student, objective, data, 250, batch_size=32, rate=5e-3)
    _, after = judged(student, objective, data, epoch=100)
    assert after["soft_loss"] < 0.05 * before["soft_loss"]
    assert after["cosine_loss"] < 0.1 * before["cosine_loss"]
