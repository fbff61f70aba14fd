"""Text from files as people have them: odd encodings, line ends, sizes and kinds."""

import bz2
import codecs
import gzip
import lzma
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import sources
from heedful.data.sources import TextSource


def documents(source: TextSource) -> list[str]:
    found, parts = [], []
    for text, ends in source.pieces():
        assert text
        parts.append(text)
        if ends:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_of_five_odd_files(tmp_path):
    long_line = "many words " * 480_000
    written(tmp_path / "1-crlf.txt", "one\r\ntwo\r\n")
    written(tmp_path / "2-mark.txt", codecs.BOM_UTF8 + "café\n".encode())
    written(tmp_path / "3-latin.txt", "Ångström für 5 £\n".encode("latin-1"))
    written(tmp_path / "4-line.txt", long_line)
    written(tmp_path / "5-empty.txt", "")
    source = TextSource(tmp_path)
    assert documents(source) == ["one\ntwo\n", "café\n", "Ångström für 5 £\n", long_line]
    assert source.notes == [
        "5-empty.txt is empty; left out",
        "3-latin.txt: 4 bytes are not UTF-8 and were read as Windows-1252 (Latin-1)",
    ]
    assert documents(source) and len(source.notes) == 2  # a second reading tells nothing twice


@pytest.mark.parametrize(
    "content, text",
    [
        (codecs.BOM_UTF16_LE + "naïve\r\n日本".encode("utf-16-le"), "naïve\n日本"),
        (codecs.BOM_UTF16_BE + "naïve 👍".encode("utf-16-be"), "naïve 👍"),
        (codecs.BOM_UTF32_LE + "naïve".encode("utf-32-le"), "naïve"),
        ("“quoted” – 5 €".encode("cp1252"), "“quoted” – 5 €"),
        (b"utf-8 \xc3\xa9 and latin-1 \xe9 in one file", "utf-8 é and latin-1 é in one file"),
        (b"undefined in cp1252: \x81", "undefined in cp1252: \x81"),
        (b"cut in a character: \xe2\x82", "cut in a character: â‚"),
        (b"old\rMac", "old\nMac"),
        (b"\x1b[1mbold\x1b[0m", "\x1b[1mbold\x1b[0m"),
    ],
)
def test_encodings(tmp_path, content, text):
    assert documents(TextSource(written(tmp_path / "a.txt", content))) == [text]


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", codecs.BOM_UTF8 + b" \r\n", "is empty"),
        ("a.bin", b"\x7fELF\x02\x01\x01" + bytes(100), "NUL bytes"),
        ("a.dat", bytes(range(1, 32)) * 20, "control characters"),
        ("a.txt.gz", gzip.compress(b"text " * 10_000, mtime=0)[:-20], "cannot be read"),
        ("a.txt.xz", b"no xz at all", "cannot be read"),
        ("a.jsonl", '{"title": "a", "body": "b"}', 'no "text"; it has: title, body; .*data.text = "NAME"'),
        ("a.jsonl", "[" * 100_000, "no JSON"),
        ("a.csv", "title,body\n1,2", "its columns are: title, body"),
    ],
)
def test_what_is_no_text_is_refused_alone_and_left_out_of_a_folder(tmp_path, name, content, match, monkeypatch):
    path = written(tmp_path / name, content)
    with pytest.raises(ValueError, match=match):
        TextSource(path)
    with pytest.raises(ValueError, match="no text in the folder"):
        TextSource(path.parent)
    written(path.parent / "good.txt", "good")
    source = TextSource(path.parent)
    assert documents(source) == ["good"]
    assert len(source.notes) == 1 and source.notes[0].startswith(name) and "left out" in source.notes[0]


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("a.txt", codecs.BOM_UTF16_LE + b"\x00\xd8a\x00", "begins like UTF-16-LE but is not"),
        ("a.txt", b"text" * 2**19 + b"\0", "a NUL character"),
        ("a.jsonl", '{"text": "fine"}\n{"text": "not closed', "line 2 is no JSON"),
        ("a.jsonl", '{"text": "fine"}\n{"text": 5}', "line 2 has no .text."),
        ("a.csv", "id,text\n1,fine\n2\n", "line 3 has 1 of 2 columns"),
        ("a.csv", 'text\nfine\n"not closed\n' + "and\n" * 100, r"line \d+: .*not closed"),
    ],
)
def test_what_is_found_while_reading_is_refused_in_a_folder_too(tmp_path, name, content, match, monkeypatch):
    """Part of the file was used already, so leaving it out is too late."""
    monkeypatch.setattr(sources, "ROW", 100)
    with pytest.raises(ValueError, match=f"{name}: .*{match}"):
        documents(TextSource(written(tmp_path / name, content)))
    with pytest.raises(ValueError, match=f"{name}: .*{match}"):
        documents(TextSource(tmp_path))


def test_a_row_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROW", 2**20)
    path = written(tmp_path / "a.jsonl", '{"text": "fine"}\n"' + "x" * 2**21)
    with pytest.raises(ValueError, match="a row is longer than 1,048,576 characters"):
        documents(TextSource(path))


def test_links_and_other_things_in_a_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    written(folder / "a.txt", "a")
    written(folder / ".hidden", "h")
    os.mkfifo(folder / "pipe")  # opening it would wait for ever
    (folder / "again.txt").symlink_to(folder / "a.txt")
    (folder / "nowhere").symlink_to(folder / "missing")
    source = TextSource(folder)
    assert documents(source) == ["a", "a"]
    assert len(source.notes) == 3
    written(tmp_path / "secret.txt", "secret")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"out\.txt is a link out of the folder"):
        TextSource(folder)
    (folder / "out.txt").unlink()
    (folder / "up").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ValueError, match="link out of the folder"):
        TextSource(folder)
    with pytest.raises(ValueError, match="no file or folder"):
        TextSource(tmp_path / "missing")


@pytest.mark.parametrize(
    "suffix, pack", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
@pytest.mark.parametrize(
    "name, content, field, expected",
    [
        ("a.md", "# one\n\f\ntwo\n\f\n\f\n", "", ["# one\n", "two\n"]),
        ("a.txt", "\f\na form\ffeed inside\n\f more\n\f", "", ["a form\ffeed inside\n\f more\n"]),
        ("a.jsonl", '{"text": "a\\r\\nb", "id": ""}\n\n{"text": "\\ud83d\\udc4d \\ud83d"}\r\n', "", ["a\nb", "👍 �"]),
        ("a.jsonl", '{"body": "only string", "n": 1}\n"bare"\n{"text": ""}', "", ["only string", "bare"]),
        ("a.jsonl", '{"text": "no", "body": "yes"}', "body", ["yes"]),
        ("a.csv", 'id,text\r\n1,"two\r\nlines, ""quoted"""\r\n2,b\r\n', "", ['two\nlines, "quoted"', "b"]),
        ("a.csv", "id;body\n1;yes", "body", ["yes"]),
        ("a.csv", "sentence\nonly column", "", ["only column"]),
        ("a.tsv", 'text\tlabel\nan "open quote\t1\n', "", ['an "open quote']),
    ],
)  # fmt: skip
def test_kinds(tmp_path, name, content, field, expected, suffix, pack):
    path = written(tmp_path / (name + suffix), pack(content.encode()))
    assert documents(TextSource(path, field=field)) == expected


def test_a_field_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no text 'body'; it has: text"):
        TextSource(written(tmp_path / "a.jsonl", '{"text": "a"}'), field="body")
    with pytest.raises(ValueError, match="no column 'body'; its columns are: text"):
        TextSource(written(tmp_path / "a.csv", "text\nb"), field="body")


@settings(deadline=None)
@given(
    texts=st.lists(st.text(alphabet=" \n\t\r\fabé日👍.", max_size=60), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
    longest=st.integers(8, 20),
)
def test_pieces_join_to_the_text_wherever_reading_stops(tmp_path_factory, texts, chunk, longest):
    text = "\n\f\n".join(["x", *texts])
    path = written(tmp_path_factory.mktemp("any") / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHUNK", 2**20), ("PIECE", 4), ("LONGEST", longest)):
            patch.setattr(sources, name, value)
        source = TextSource(path)
        patch.setattr(sources, "CHUNK", chunk)
        found = documents(source)
        sizes = [len(piece) for piece in source.texts()]
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    expected, parts = [], []
    for i, line in enumerate(lines):
        if line == "\f":
            expected.append("".join(parts))
            parts = []
        else:
            parts.append(line + ("\n" if i + 1 < len(lines) else ""))
    expected.append("".join(parts))
    assert found == [document for document in expected if document]
    assert max(sizes) <= longest


def test_a_long_line_is_never_in_memory(tmp_path):
    path = tmp_path / "line.txt"
    with open(path, "wb") as file:
        for _ in range(24):
            file.write(b"x" * 2**19 + b"word " * (2**19 // 5))
    source = TextSource(path)
    tracemalloc.start()
    total = sum(len(text) for text in source.texts())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == path.stat().st_size
    assert peak < 8 * 2**20


def test_fingerprint(tmp_path):
    a = TextSource(written(tmp_path / "a.txt", "one text"))
    assert a.fingerprint() == TextSource(written(tmp_path / "b.txt", "one text")).fingerprint()
    assert a.fingerprint() != TextSource(written(tmp_path / "c.txt", "one Text")).fingerprint()
    assert a.fingerprint() != TextSource(written(tmp_path / "c.jsonl", '"one text"')).fingerprint()
    whole = TextSource(tmp_path).fingerprint()
    assert whole == TextSource(tmp_path).fingerprint()
    (tmp_path / "b.txt").rename(tmp_path / "d.txt")
    assert whole != TextSource(tmp_path).fingerprint()
