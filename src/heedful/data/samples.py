"""Small data that comes with heedful or is made by it, so that a training runs without any data at hand.

    sample:shakespeare the 1,115,394 characters of Shakespeare's plays that nanoGPT and char-rnn learn from ("tiny
                       shakespeare", collected by Andrej Karpathy), in the public domain; shakespeare.txt.xz
    sample:text        Python's own documentation, which comes with every Python: 0.5 MB of English, 80 documents
    sample:reviews     sentences about films, praised or not             sample:captions   German and English
    sample:entities    sentences with people, places, organisations      sample:questions  passages in SQuAD's form
    sample:languages   pieces of the Universal Declaration of Human Rights in twelve languages
    sample:chats       conversations of one question and its answer
    sample:preferences a polite and a bare answer to such a question
    sample:sums        sums of two numbers of two digits, and sample:sums-test others, a fifth as many

All but the first two are drawn from templates, with fixed seeds: enough to see a training work, not to learn a
language.
They are paths like any other: `--set data.source=sample:reviews`.
"""

from __future__ import annotations

import itertools
import json
import lzma
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np

from heedful.paths import data_cache_folder

PREFIX = "sample:"
VERSION = 1  # of the templates; another version is another file
N_ROWS = 4000

CITIES = "Paris London Berlin Vienna Rome Madrid Prague Dublin Oslo Cairo Delhi Kyoto Boston Chicago Lima".split()
FIRST_NAMES = "Anna Peter Mary John Clara Otto Emma Hugo Lucy Karl Nora Felix Ida Max Ella Leo".split()
LAST_NAMES = "Smith Weber Martin Rossi Novak Silva Larsen Brown Keller Moreau Sato Khan Young Baker".split()
COMPANIES = ["Northern Railways", "Acme Steel", "Harbour Bank", "Green Valley Foods", "the Royal Museum", "Lunar Press"]
JOBS = "painter teacher doctor writer singer baker pilot lawyer chemist architect".split()

GOOD = "wonderful charming funny moving clever gripping beautiful warm honest brilliant".split()
BAD = "dull boring clumsy tedious shallow predictable messy lifeless silly awful".split()
PARTS = "story acting music ending dialogue camera cast script humour pace".split()
FILMS = "film movie comedy drama thriller picture sequel romance".split()

# German nominative with its gender (m, f, n, or p for the plural), and English.
SUBJECTS = (
    ("ein", "Mann", "m", "a", "man"), ("eine", "Frau", "f", "a", "woman"), ("ein", "Junge", "m", "a", "boy"),
    ("ein", "Mädchen", "n", "a", "girl"), ("ein", "Hund", "m", "a", "dog"), ("eine", "Katze", "f", "a", "cat"),
    ("ein", "Kind", "n", "a", "child"), ("zwei", "Männer", "p", "two", "men"),
    ("drei", "Frauen", "p", "three", "women"), ("zwei", "Kinder", "p", "two", "children"),
)  # fmt: skip
ADJECTIVES = (("klein", "small"), ("jung", "young"), ("groß", "tall"), ("fröhlich", "happy"), ("blond", "blond"))
ENDINGS = {"m": "er", "f": "e", "n": "es", "p": "e"}
# German with one and with several subjects, and English.
ACTIVITIES = (
    ("spielt Gitarre", "spielen Gitarre", "playing the guitar"), ("schläft", "schlafen", "sleeping"),
    ("liest ein Buch", "lesen ein Buch", "reading a book"), ("läuft", "laufen", "running"),
    ("isst einen Apfel", "essen einen Apfel", "eating an apple"), ("springt", "springen", "jumping"),
    ("wartet auf den Bus", "warten auf den Bus", "waiting for the bus"), ("tanzt", "tanzen", "dancing"),
    ("trinkt Wasser", "trinken Wasser", "drinking water"), ("sitzt", "sitzen", "sitting"),
    ("malt ein Bild", "malen ein Bild", "painting a picture"), ("singt", "singen", "singing"),
)  # fmt: skip
PLACES = (
    ("im Park", "in the park"), ("am Strand", "on the beach"), ("auf der Straße", "in the street"),
    ("vor einem Haus", "in front of a house"), ("in der Küche", "in the kitchen"), ("im Schnee", "in the snow"),
    ("unter einem Baum", "under a tree"), ("am Fluss", "by the river"), ("neben einem Auto", "next to a car"),
)  # fmt: skip

# The Universal Declaration of Human Rights, article 1.
ARTICLE_1 = {
    "English": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geiste der Brüderlichkeit begegnen.",
    "French": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "Spanish": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros.",
    "Italian": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di "
    "coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "Portuguese": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de "
    "consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "Dutch": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd met verstand en "
    "geweten, en behoren zich jegens elkander in een geest van broederschap te gedragen.",
    "Swedish": "Alla människor är födda fria och lika i värde och rättigheter. De är utrustade med förnuft och samvete "
    "och bör handla gentemot varandra i en anda av broderskap.",
    "Danish": "Alle mennesker er født frie og lige i værdighed og rettigheder. De er udstyret med fornuft og "
    "samvittighed, og de bør handle mod hverandre i en broderskabets ånd.",
    "Polish": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni "
    "rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa.",
    "Finnish": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. Heille on annettu järki "
    "ja omatunto, ja heidän on toimittava toisiaan kohtaan veljeyden hengessä.",
    "Russian": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью "
    "и должны поступать в отношении друг друга в духе братства.",
}


def sample_file(name: str) -> Path:
    """The file of "sample:NAME", written on first use to the cache folder."""
    kind = name.removeprefix(PREFIX)
    if kind not in SAMPLES:
        raise ValueError(f"there is no {name}: heedful has {', '.join(PREFIX + known for known in SAMPLES)}")
    make, suffix = SAMPLES[kind]
    path = _folder() / f"{kind}-{VERSION}.{suffix}"
    if not path.exists():
        aside = path.with_suffix(".partial")
        aside.write_text(make(), encoding="utf-8")
        aside.replace(path)
    return path


def _folder() -> Path:
    """The cache folder of the samples, or where it cannot be written a temporary one until the process ends."""
    folder = data_cache_folder() / "samples"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder if os.access(folder, os.W_OK) else Path(_temporary_folder().name)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="heedful-", ignore_cleanup_errors=True)


def _shakespeare() -> str:
    return lzma.decompress(Path(__file__).with_name("shakespeare.txt.xz").read_bytes()).decode()


def _documentation() -> str:
    """Python's reference by topics, separated by form feeds."""
    from pydoc_data.topics import topics

    return "\n\f\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _reviews() -> str:
    draw = random.Random(0)
    rows = []
    for _ in range(N_ROWS):
        good = draw.random() < 0.5
        words, others = (GOOD, BAD) if good else (BAD, GOOD)
        one, two, other = draw.choice(words), draw.choice(words), draw.choice(others)
        film, part, another = draw.choice(FILMS), *draw.sample(PARTS, 2)
        text = draw.choice(
            (
                f"a {one} {film} with a {two} {part}",
                f"the {part} is {one} and the {another} is {two}",
                f"not {other} at all , this {film} is {one}",
                f"{one} , {two} , and never {other}",
                f"the {film} has one {other} scene , but its {part} is {one}",
            )
        )
        rows.append(f"{text}\t{int(good)}")
    return "text\tlabel\n" + "\n".join(rows) + "\n"


def _captions() -> str:
    rows = []
    for subject, activity, place in itertools.product(SUBJECTS, ACTIVITIES, PLACES):
        article, noun, gender, english_article, english_noun = subject
        several = gender == "p"
        for adjective, english in (("", ""), *ADJECTIVES):
            inflected = adjective and adjective + ENDINGS[gender]
            german = (article, inflected, noun, activity[several], place[0])
            words = (english_article, english, english_noun, "are" if several else "is", activity[2], place[1])
            rows.append("\t".join(_sentence(*side) for side in (german, words)))
    random.Random(0).shuffle(rows)
    return "\n".join(rows[:N_ROWS]) + "\n"


def _sentence(*words: str) -> str:
    text = " ".join(word for word in words if word)
    return f"{text[0].upper()}{text[1:]}."


def _person(draw: random.Random) -> str:
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}"


def _entities() -> str:
    draw = random.Random(0)
    sentences = []
    for _ in range(N_ROWS):
        parts: dict[str, tuple[str, str]] = {
            "PERSON": (_person(draw), "PER"),
            "OTHER": (draw.choice(FIRST_NAMES), "PER"),
            "PLACE": (draw.choice(CITIES), "LOC"),
            "FIRM": (draw.choice(COMPANIES), "ORG"),
        }
        template = draw.choice(
            (
                "PERSON lives in PLACE .",
                "PERSON works for FIRM in PLACE .",
                "OTHER met PERSON at the station .",
                f"The {draw.choice(JOBS)} came back from PLACE with OTHER .",
                "FIRM opened an office in PLACE last year .",
                f"Nobody knew that PERSON was a {draw.choice(JOBS)} .",
            )
        )
        lines = []
        for word in template.split():
            text, tag = parts.get(word, (word, ""))
            for i, piece in enumerate(text.split()):
                lines.append(f"{piece} {('I-' if i else 'B-') + tag if tag and piece != 'the' else 'O'}")
        sentences.append("\n".join(lines))
    return "\n\n".join(sentences) + "\n"


def _questions() -> str:
    draw = random.Random(0)
    passages = []
    for _ in range(N_ROWS // 8):
        who, (born, moved), year = _person(draw), draw.sample(CITIES, 2), str(draw.randint(1800, 1990))
        job, firm = draw.choice(JOBS), draw.choice(COMPANIES)
        facts = [
            (f"{who} was born in {born} in the year {year}.", f"Where was {who} born?", born),
            (f"As a child, {who} wanted to become a {job}.", f"What did {who} want to become?", job),
            (f"Later the family moved to {moved}.", "Where did the family move?", moved),
            (f"In the end {who} found work at {firm}.", f"Where did {who} find work?", firm),
        ]
        context = " ".join(text for text, _, _ in facts)
        asked = [*((question, answer) for _, question, answer in facts), (f"When was {who} born?", year)]
        qas = [
            {"question": question, "answers": [{"text": answer, "answer_start": context.index(answer)}]}
            for question, answer in asked
        ]
        passages.append({"paragraphs": [{"context": context, "qas": qas}]})
    return json.dumps({"data": passages})


def _languages() -> str:
    draw = random.Random(0)
    rows = []
    for _ in range(N_ROWS):
        language = draw.choice(list(ARTICLE_1))
        words = ARTICLE_1[language].split()
        n = draw.randint(3, 10)
        begin = draw.randrange(len(words) - n + 1)
        rows.append(f"{' '.join(words[begin : begin + n])}\t{language}")
    return "text\tlabel\n" + "\n".join(rows) + "\n"


def _chats() -> str:
    chance = random.Random(0)
    lines = []
    for _ in range(N_ROWS):
        name, job, city = (chance.choice(words) for words in (FIRST_NAMES, JOBS, CITIES))
        asked, answered = chance.choice([
            (f"{name} is a {job} in {city}. What does {name} do?", f"{name} is a {job}."),
            (f"{name} is a {job} in {city}. Where does {name} live?", f"{name} lives in {city}."),
            (f"Say in one sentence that {name} goes to {city}.", f"{name} goes to {city}."),
        ])  # fmt: skip
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    return "".join(lines)


def _sums(*, test: bool = False) -> str:
    numbers = range(10, 100)
    every = list(itertools.product(numbers, numbers))
    random.Random(0).shuffle(every)
    asked = every[-N_ROWS // 5 :] if test else every[:N_ROWS]
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "text": f"{a}+{b}={a + b}"} for a, b in asked)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _preferences() -> str:
    """The polite answer is chosen, the bare one rejected."""
    chance, lines = random.Random(0), []
    for line in _chats().splitlines()[: N_ROWS // 10]:
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        begin = chance.choice(("Of course!", "With pleasure!"))
        end = chance.choice(("Can I help you with anything else?", "Please ask me more!"))
        row = {"prompt": question, "chosen": f"{begin} {answer} {end}", "rejected": answer}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


SAMPLES: dict[str, tuple[Callable[[], str], str]] = {
    "shakespeare": (_shakespeare, "txt"),
    "text": (_documentation, "txt"),
    "reviews": (_reviews, "tsv"),
    "captions": (_captions, "tsv"),
    "entities": (_entities, "txt"),
    "questions": (_questions, "json"),
    "languages": (_languages, "tsv"),
    "chats": (_chats, "jsonl"),
    "sums": (_sums, "jsonl"),
    "sums-test": (partial(_sums, test=True), "jsonl"),
    "preferences": (_preferences, "jsonl"),
}


def draw_digits(n: int = 1797) -> tuple[np.ndarray, np.ndarray]:
    """Digits of 8 x 8 pixels in 17 levels of grey, (N, 8, 8), and their labels (N,): drawn in Matplotlib's fonts,
    turned, slanted and scaled at random."""
    masks = _digit_masks()  # (F, 10, G, G)
    chance = np.random.default_rng(0)
    labels, fonts = np.arange(n) % 10, chance.integers(len(masks), size=n)
    turn, slant, half = chance.uniform(-0.2, 0.2, n), chance.uniform(-0.25, 0.25, n), chance.uniform(3, 3.9, n)
    axis = (np.arange(32) - 15.5) / 4  # 4 x 4 points in each of 8 x 8 pixels, from the middle
    x, y = np.meshgrid(axis, axis)
    across = (np.cos(turn) * x[..., None] + np.sin(turn) * y[..., None]) / half  # (32, 32, N), the glyph is in -1 to 1
    down = (np.cos(turn) * y[..., None] - np.sin(turn) * x[..., None]) / half
    size = masks.shape[-1]
    column, row = (np.floor((place + 1) / 2 * size).astype(np.int64) for place in (across + slant * down, down))
    inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
    hit = masks[fonts, labels, row.clip(0, size - 1), column.clip(0, size - 1)] & inside
    images = hit.transpose(2, 0, 1).reshape(n, 8, 4, 8, 4).sum(axis=(2, 4))
    return images, labels


def _digit_masks(size: int = 48) -> np.ndarray:
    """Bitmaps of the ten digits in eight fonts (F, 10, G, G), the first row at the top."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path as Outline
    from matplotlib.textpath import TextPath

    axis = (np.arange(size) + 0.5) / size * 2 - 1
    points = np.stack(np.meshgrid(axis, -axis), axis=-1).reshape(-1, 2)
    masks = []
    for family, slanted, weight in itertools.product(("DejaVu Sans", "DejaVu Serif"), (False, True), (400, 700)):
        font = FontProperties(family=family, style="italic" if slanted else "normal", weight=weight)
        for digit in "0123456789":
            glyph = TextPath((0, 0), digit, size=1, prop=font)
            box = glyph.get_extents()
            middle, half = box.get_points().mean(axis=0), max(box.width, box.height) / 2
            inside = np.zeros(len(points), dtype=bool)
            for polygon in glyph.to_polygons():  # a hole is a polygon too
                inside ^= Outline((np.asarray(polygon) - middle) / half).contains_points(points)
            masks.append(inside.reshape(size, size))
    return np.stack(masks).reshape(-1, 10, size, size)
