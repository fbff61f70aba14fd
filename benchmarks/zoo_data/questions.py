"""The data of the recipe `reader`: questions about passages, some of which have no answer there.

    python benchmarks/zoo_data/questions.py --texts ../shared/data --wiki enwik8.gz --out out/zoo-data/reader
    HEEDFUL_DATA=out/zoo-data heedful train reader-cloze, then heedful train reader

squad    SQuAD's sample (CC BY-SA), its own parts; passages of XQuAD are taken out of validation.json, by which settings
         are chosen. A third more of the questions are asked of a passage that does not answer them: of fifty others
         the one with most of the question's words.
cloze    statements of Wikipedia (CC BY-SA) as questions, to begin with (Lewis et al. 2019): the words of a link, a
         number or a date are the answer, a question word stands in their place. In half of them the statement itself
         is in the passage; in the others it was taken out, and the same words occur elsewhere (Ram et al. 2021). A
         fifth are asked of another passage.
xquad    XQuAD's English questions, and each again of another passage of the same article: to score with alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from wikipedia import LINK, pages, paragraphs, read_part, title_kinds, words_of_links

CLOZE = 60_000  # questions
Passage = dict[str, Any]  # context and qas
NUMBER = re.compile(r"\b(?:1\d{3}|20\d\d|\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)\b")
WORDS = {"PER": ["Who", "Who", "Which person"], "LOC": ["Where", "What place", "Which country"],
         "ORG": ["What organization", "Who", "What group"], "": ["What", "What", "Which", "What"],
         "year": ["When", "In what year", "What year"], "number": ["How many", "How much", "What"]}  # fmt: skip


def content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}


def with_unanswerable(
    passages: list[Passage], share: float, rng: random.Random, groups: list[int] | None = None
) -> list[Passage]:
    """The passages with questions of others added to them, without an answer; from the same group if there are any."""
    made = [{"context": p["context"], "qas": list(p["qas"])} for p in passages]
    words = [content_words(p["context"]) for p in passages]
    everywhere = range(len(passages))
    for number, passage in enumerate(passages):
        for question in passage["qas"]:
            if rng.random() >= share:
                continue
            near = [i for i in everywhere if groups[i] == groups[number] and i != number] if groups else []
            others = near or [i for i in rng.sample(everywhere, min(50, len(passages))) if i != number]
            asked = content_words(question["question"])
            texts = answers_of(question)
            others = [i for i in others if not any(t.lower() in passages[i]["context"].lower() for t in texts)]
            if others:
                best = max(others, key=lambda i: len(words[i] & asked))
                made[best]["qas"].append({"id": f"{question.get('id', number)}-none-{len(made[best]['qas'])}",
                                          "question": question["question"], "answers": []})  # fmt: skip
    return made


def answers_of(question: dict[str, Any]) -> list[str]:
    return [question["answer"]] if "answer" in question else [a["text"] for a in question["answers"]]


# --- cloze ------------------------------------------------------------------------------------------------------------


def cloze_passages(wiki: Path, rng: random.Random) -> list[Passage]:
    dump = read_part(wiki)
    kinds = title_kinds(dump)
    made: list[Passage] = []
    for _, text in pages(dump):
        for paragraph in paragraphs(text):
            plain = words_of_links(paragraph)
            if not 250 <= len(plain) <= 900:
                continue
            sentences = re.split(r"(?<![A-Z])(?<=[.!?]) (?=[A-Z\"])", plain)
            names = {shown or target: kinds.get(target, "") for target, shown in LINK.findall(paragraph)}
            found = [q for q in (cloze(s, sentences, names, rng) for s in sentences if 40 <= len(s) <= 300) if q]
            for context, question in rng.sample(found, min(3, len(found))):
                made.append({"context": context, "qas": [question]})
    rng.shuffle(made)
    return made[:CLOZE]


def cloze(sentence: str, sentences: list[str], names: dict[str, str], rng: random.Random) -> tuple[str, Any] | None:
    """A passage, and a statement of it as a question."""
    spans = [(name, kind) for name, kind in names.items() if 2 < len(name) < 50 and name in sentence]
    spans += [(n[0], "year" if re.fullmatch(r"1\d{3}|20\d\d", n[0]) else "number") for n in NUMBER.finditer(sentence)]
    if not spans:
        return None
    answer, kind = rng.choice(spans)
    rest = " ".join(s for s in sentences if s != sentence)
    if answer in rest and rng.random() < 0.7:
        context = rest
    else:
        context = " ".join(sentences)
    begin = context.find(sentence)
    at = begin + sentence.find(answer) if begin >= 0 else context.find(answer)
    return context, {"question": asked(sentence, answer, rng.choice(WORDS[kind]), rng),
                     "answers": [{"text": answer, "answer_start": at}]}  # fmt: skip


def asked(sentence: str, answer: str, word: str, rng: random.Random) -> str:
    """The statement with a question word for the answer: in its place, or in front with what is near it."""
    before, _, after = sentence.rstrip(".!?").partition(answer)
    clauses = [re.split(r"[,;:()]", before)[-1], re.split(r"[,;:()]", after)[0]]
    if len(" ".join(clauses).split()) < 5:
        clauses = [before, after]
    left, right = ([w for w in c.split() if rng.random() > 0.12] for c in clauses)
    if rng.random() < 0.3:
        words = [*left, word.lower(), *right]
    elif left and left[-1].lower() in ("in", "on", "at", "by", "of", "from", "to", "with", "for", "since", "until"):
        words = [left[-1].capitalize(), word.lower(), *right, *left[:-1]]
    else:
        words = [word, *right, *left] if len(right) > 3 else [word, *left, *right]
    return " ".join(words[:40]) + ("?" if rng.random() < 0.9 else "")


# --- files ------------------------------------------------------------------------------------------------------------


def read_sample(path: Path) -> list[Passage]:
    """SQuAD's sample: only what is needed of each passage, where the answer stands in it."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        {"context": row["context"],
         "qas": [{key: q[key] for key in ("question", "answer")} for q in row["qas"] if q["answer"] in row["context"]]}
        for row in rows
    ]  # fmt: skip


def write(path: Path, passages: list[Passage]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "2.0", "data": [{"paragraphs": passages}]}, ensure_ascii=False), "utf-8")
    asked = [q for p in passages for q in p["qas"]]
    n_none = sum(q.get("answers") == [] for q in asked)
    print(f"{path}: {len(passages):,} passages, {len(asked):,} questions, {n_none:,} of them without an answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="the folder with squad")
    parser.add_argument("--wiki", type=Path, required=True, help="enwik8.gz, see wikipedia.py")
    parser.add_argument("--out", type=Path, default=Path("out/zoo-data/reader"))
    options = parser.parse_args()
    rng = random.Random(0)
    squad = options.texts / "squad"
    articles = json.loads((squad / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    xquad = [(p, number) for number, article in enumerate(articles) for p in article["paragraphs"]]
    measured = {" ".join(p["context"].split()) for p, _ in xquad}
    write(options.out / "train.json", with_unanswerable(read_sample(squad / "squad_ctx_train.json"), 0.33, rng))
    chosen = [p for p in read_sample(squad / "squad_ctx_valid.json") if " ".join(p["context"].split()) not in measured]
    write(options.out / "validation.json", with_unanswerable(chosen, 1.0, rng))
    write(options.out / "test.json", with_unanswerable(read_sample(squad / "squad_ctx_test.json"), 1.0, rng))
    write(options.out / "xquad.json", with_unanswerable([p for p, _ in xquad], 1.0, rng, [n for _, n in xquad]))
    made = cloze_passages(options.wiki, rng)
    write(options.out / "cloze.json", with_unanswerable(made, 0.2, rng))


if __name__ == "__main__":
    main()
