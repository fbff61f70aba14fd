"""Labels of texts, tags of words and answers in passages, from every kind of file."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from heedful.data.classification import LabelledTexts, read_labelled
from heedful.data.dataset import Draw
from heedful.data.ragged import random_split
from heedful.data.squad import SquadWindows, read_squad
from heedful.data.tagging import TaggedSentences, read_tagged, to_iob2
from heedful.text import train_bpe, train_unigram, train_wordpiece

SHARED = Path(__file__).parents[3] / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.exists(), reason="wants the data in ../shared/data")
TEXT = "the cat sat on the mat and a dog ran over to it at once while EU rejects German lamb . it was good bad"


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([TEXT] * 5, 120)


def written(folder, name, content):
    path = folder / name
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        file.write(content)
    return path


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", 'it was "good\tpos\nit was bad\tneg\n'),
        ("a.tsv", 'pos\tit was "good\nneg\tit was bad\nneg\tit was bad\nneg\ta dog\n'),
        ("a.csv", 'label,text\npos,"it was ""good"\nneg,it was bad\n'),
        ("a.csv.gz", '\ufefftext,Class\r\n"it was ""good",pos\r\nit was bad,neg\r\n'),
        ("a.jsonl", '{"text": "it was \\"good", "label": "pos"}\n\n{"text": "it was bad", "label": "neg"}'),
    ],
)
def test_columns_are_found(tmp_path, name, content, tokenizer):
    data = LabelledTexts.read(written(tmp_path, name, content), tokenizer)
    assert data.names == ("neg", "pos")
    batch = data.batch([Draw(0, 0), Draw(0, 1)], 0)
    assert batch.targets.tolist() == [1, 0]
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert batch.tokens[0].tolist() == [cls, *tokenizer.encode('it was "good'), sep]
    assert batch.tokens[1, : batch.lengths[1]].tolist() == [cls, *tokenizer.encode("it was bad"), sep]


def test_rows_of_a_csv_may_run_over_lines_and_are_counted_by_their_first(tmp_path, tokenizer):
    path = written(tmp_path, "a.csv", 'text,label\n"it\nwas\ngood",1\nbad,x,0\n')
    with pytest.raises(ValueError, match="line 5: 3 columns, and the first line names 2"):
        LabelledTexts.read(path, tokenizer)
    path = written(tmp_path, "a.csv", 'text,label\n"it\nwas\ngood",1\nbad,0\n')
    assert read_labelled(path)[0] == ["it\nwas\ngood", "bad"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("words,stars\nx,1\n", {"text": "word"}, r"no column 'word' \(did you mean words"),
        ("a,b,c\nx,1,2\n", {}, "line 1: 3 columns without names"),
        ("text,stars\nx,1\ny,many\n", {"kind": "regress"}, r"a\.csv, line 3: 'many' is no number"),
        ("text,stars\nx,1\ny,nan\n", {"kind": "regress"}, "line 3: 'nan' is no number"),
        ("text,a,b\nx,1,2\n", {"kind": "multi_label", "label": ["a", "b"]}, "line 2: '2' is not 0 or 1"),
        ("text,label\nx,1\n", {}, "1 different values"),
        ("text,label\nx,1\n", {"names": ["0", "2"]}, "line 2: the label '1' is not one of 0, 2"),
        ("text,label\nx,1\n", {"label": ["label"]}, "multi_label has several columns"),
        ("", {}, "text"),
    ],
)
def test_mistakes_say_where_they_are(tmp_path, content, options, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        LabelledTexts.read(written(tmp_path, "a.csv", content), tokenizer, **options)


def test_labels_that_are_numbers_are_in_their_order(tokenizer):
    data = LabelledTexts(["x"] * 3, [10, 9, 2], tokenizer)
    assert data.names == ("2", "9", "10") and data.targets.tolist() == [2, 1, 0]


def test_regression_and_several_labels(tmp_path, tokenizer):
    numbers = LabelledTexts(["it", "was", "good"], [1, "2.5", -3], tokenizer, kind="regress")
    assert numbers.batch([Draw(0, 1), Draw(0, 2)], 0).targets.tolist() == [2.5, -3.0]
    path = written(tmp_path, "a.csv", "text,mean,rude\nit,0,1\nwas,true,false\n")
    several = LabelledTexts.read(path, tokenizer, text="text", label=["rude", "mean"], kind="multi_label")
    assert several.names == ("rude", "mean")
    assert several.batch([Draw(0, 0), Draw(0, 1)], 0).targets.tolist() == [[1, 0], [0, 1]]


def test_two_texts_are_one_input_with_segments(tmp_path, tokenizer):
    path = written(tmp_path, "a.csv", "premise,hypothesis,label\nthe cat,sat on,1\na dog ran over,it,0\n")
    data = LabelledTexts.read(path, tokenizer)
    batch = data.batch([Draw(0, 1), Draw(0, 0)], 0)
    for row, texts in (0, ("a dog ran over", "it")), (1, ("the cat", "sat on")):
        ids, segments = tokenizer.encode_pair(*texts)
        assert batch.tokens[row, : len(ids)].tolist() == ids
        assert batch.segments[row, : len(ids)].tolist() == segments
    assert LabelledTexts.read(path, tokenizer, segments=False).batch([Draw(0, 0)], 0).segments is None


def test_what_is_too_long_loses_its_end_and_that_is_told(tokenizer):
    data = LabelledTexts(["the cat sat", "the cat sat on the mat"], [0, 1], tokenizer, max_length=6)
    batch = data.batch([Draw(0, 0), Draw(0, 1)], 0)
    assert batch.tokens[1].tolist() == [
        tokenizer.cls_id,
        *tokenizer.encode("the cat sat on"),
        tokenizer.sep_id,
    ]
    assert data.notes == ["1 of 2 texts are longer than 6 tokens: their ends are cut"]
    pair = LabelledTexts(["the cat sat on the mat"] * 2, [0, 1], tokenizer, seconds=["a dog", "it"], max_length=9)
    row = pair.batch([Draw(0, 0)], 0).tokens[0].tolist()
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert row == [cls, *tokenizer.encode("the cat sat on"), sep, *tokenizer.encode("a dog"), sep]


@shared
@pytest.mark.parametrize(
    ("name", "options", "n", "names"),
    [
        ("sst2/dev.tsv", {}, 872, ("0", "1")),
        ("sms-spam/sms.tsv", {}, 5574, ("ham", "spam")),
        ("toxicity/surge_toxicity_en.csv.gz", {}, 1000, ("Not Toxic", "Toxic")),
        ("toxicity/davidson_labeled_data.csv.gz", {}, 24783, ("0", "1", "2")),
    ],
)
def test_real_files_are_read_whole(name, options, n, names):
    texts, _, labels, _ = read_labelled(SHARED / name, **options)
    assert abs(len(texts) - n) <= 1 and sorted(set(labels)) == list(names)
    assert min(map(len, texts)) > 0


# --- tags ------------------------------------------------------------------------------------------------------------

CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
lamb NN I-NP O

it PRP B-NP I-PER
EU NNP I-NP B-PER
"""


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_tag_stands_on_the_first_piece_of_its_word(tmp_path, kind, tokenizer):
    made = {
        "wordpiece": lambda: tokenizer,
        "bpe": lambda: train_bpe([TEXT], 280),
        "unigram": lambda: train_unigram([TEXT] * 3, 60),
    }[kind]()
    data = TaggedSentences.read(written(tmp_path, "a.txt", CONLL), made)
    assert data.names == ("O", "B-MISC", "B-ORG", "B-PER")
    batch = data.batch([Draw(0, 0), Draw(0, 1)], 0)
    for row, words, tags in (0, "EU rejects German lamb", [2, 0, 1, 0]), (1, "it EU", [3, 3]):
        marks = batch.targets[row]
        assert marks[marks != -100].tolist() == tags
        n = len(made.encode(words, add_special=True))
        assert batch.tokens[row, :n].tolist() == made.encode(words, add_special=True)
        starts = [made.token(i) for i, mark in zip(batch.tokens[row].tolist(), marks, strict=True) if mark != -100]
        for piece, word in zip(starts, words.split(), strict=True):
            assert word.lower().startswith(piece.strip("Ġ▁").lower()) or piece == "▁"


def test_entities_begin_with_b():
    """The first row is CoNLL-2003's own IOB1; what has it already, or has no such tags, stays."""
    assert to_iob2(["I-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-ORG"]) == [
        "B-PER", "I-PER", "O", "B-LOC", "B-LOC", "B-ORG",
    ]  # fmt: skip
    assert to_iob2(["B-PER", "I-PER", "O"]) == ["B-PER", "I-PER", "O"]
    assert to_iob2(["NNP", "O"]) == ["NNP", "O"]


def test_tags_mistakes(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="line 2: a word and its tag"):
        read_tagged(written(tmp_path, "a.txt", "EU I-ORG\nalone\n"))
    with pytest.raises(ValueError, match="sentence 1: the label 'I-X' is not one of O"):
        TaggedSentences([(["it"], ["I-X"])], tokenizer, names=["O"])
    cut = TaggedSentences([(["the", "cat", "sat"], ["O", "O", "O"])], tokenizer, max_length=4)
    assert cut.batch([Draw(0, 0)], 0).targets.tolist() == [[-100, 0, 0, -100]] and "ends are cut" in cut.notes[0]


@shared
def test_conll_2003_has_the_sentences_and_entities_it_is_known_for():
    """Tjong Kim Sang & De Meulder 2003, tables 1 and 2: the development data."""
    sentences = read_tagged(SHARED / "conll2003" / "eng.testa.gz")
    tags = [tag for _, tags in sentences for tag in tags]
    assert (len(sentences), len(tags)) == (3250, 51362)
    counts = {kind: tags.count(f"B-{kind}") for kind in ("LOC", "MISC", "ORG", "PER")}
    assert counts == {"LOC": 1837, "MISC": 922, "ORG": 1341, "PER": 1842}


# --- answers ---------------------------------------------------------------------------------------------------------

PASSAGE = "the cat sat on the mat and a dog ran over to it at once while EU rejects German lamb"


def squad(folder, *questions):
    asked = [
        {"question": q, "id": str(i), "answers": [{"text": a, "answer_start": PASSAGE.index(a)}] if a else []}
        for i, (q, a) in enumerate(questions)
    ]
    return written(folder, "a.json", json.dumps({"data": [{"paragraphs": [{"context": PASSAGE, "qas": asked}]}]}))


def test_answers_are_found_by_their_characters(tmp_path, tokenizer):
    data = SquadWindows.read(squad(tmp_path, ("it sat on", "the mat"), ("was it bad", None)), tokenizer)
    batch = data.batch([Draw(0, 0), Draw(0, 1)], 0)
    ids, segments = tokenizer.encode_pair("it sat on", PASSAGE)
    assert batch.tokens[0, : len(ids)].tolist() == ids and batch.segments[0, : len(ids)].tolist() == segments
    first, last = batch.targets[0].tolist()
    assert batch.tokens[0, first : last + 1].tolist() == tokenizer.encode("the mat")
    assert data.text(0, first, last) == "the mat"
    assert batch.targets[1].tolist() == [0, 0]
    assert data.text(0, 1, 2) == ""  # in the question


def test_long_passages_are_read_in_windows_that_overlap(tmp_path, tokenizer):
    data = SquadWindows.read(squad(tmp_path, ("it", "once while EU")), tokenizer, max_length=14, stride=4)
    room = 14 - 3 - len(tokenizer.encode("it"))
    whole = tokenizer.encode(PASSAGE)
    begins = [w[1] for w in data.windows.tolist()]
    assert begins == list(range(0, begins[-1] + 1, room - 4)) and data.windows[-1, 2] == len(whole)
    batch = data.batch([Draw(0, i) for i in range(len(data))], 0)
    found = 0
    for i, (first, last) in enumerate(batch.targets.tolist()):
        if (first, last) == (0, 0):
            _, begin, end = data.windows[i].tolist()
            assert tokenizer.encode("once while EU") != whole[begin:end][: len(tokenizer.encode("once while EU"))]
        else:
            assert data.text(i, first, last) == "once while EU"
            found += 1
    assert found >= 1 and batch.tokens.shape[1] <= 14
    with pytest.raises(ValueError, match="length higher"):
        SquadWindows.read(squad(tmp_path, ("it", "once")), tokenizer, max_length=14, stride=12)


def test_answers_mistakes(tmp_path, tokenizer):
    for content, message in (
        ("[1]", "not in the form of SQuAD"),
        ("nonsense", "is not JSON"),
        ('[{"context": 3, "qas": []}]', "has no context"),
        (
            '[{"context": "x", "qas": [{"question": "q", "answers": [{"text": "x", "answer_start": 4}]}]}]',
            "character 4",
        ),
        ('[{"context": "x", "qas": []}]', "no question"),
    ):
        with pytest.raises(ValueError, match=message):
            SquadWindows.read(written(tmp_path, "a.json", content), tokenizer)


@shared
def test_squad_in_both_forms():
    passages, questions, notes = read_squad(SHARED / "squad" / "xquad.en.json")
    assert (len(passages), len(questions), notes) == (240, 1190, [])
    assert all(passages[q.passage][q.begin : q.end] in q.answers for q in questions)
    passages, questions, notes = read_squad(SHARED / "squad" / "squad_ctx_valid.json")
    assert len(questions) > 400 and all(passages[q.passage][q.begin : q.end] == q.answers[0] for q in questions)


@shared
def test_real_answers_come_back_from_their_tokens():
    passages, questions, _ = read_squad(SHARED / "squad" / "xquad.en.json")
    questions = [q for q in questions if q.passage < 20]
    tokenizer = train_wordpiece(passages[:20], 2000)
    data = SquadWindows(passages[:20], questions, tokenizer, max_length=128, stride=32)
    batch = data.batch([Draw(0, i) for i in range(len(data))], 0)
    inside = [(i, a, b) for i, (a, b) in enumerate(batch.targets.tolist()) if a]
    answered = {int(data.windows[i, 0]) for i, _, _ in inside}
    assert len(answered) >= 0.97 * len(questions)
    right = [data.text(i, a, b) == questions[data.windows[i, 0]].answers[0] for i, a, b in inside]
    assert sum(right) >= 0.97 * len(right)  # a token may reach past the answer ("$10" of "$10m")
    train, validation = random_split(data, 0.2)
    assert not set(data.groups[train.indices]) & set(data.groups[validation.indices])
    assert torch.equal(validation.batch([Draw(0, 0)], 0).targets[0], batch.targets[validation.indices[0]])
