"""`heedful show` and `heedful fill`, as a user calls them."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.cli.show import WHAT, WITHOUT_TEXT
from heedful.models.registry import FAMILIES
from heedful.observe.attention import attention_weights
from heedful.observe.inputs import image_input, text_input
from heedful.observe.positions import position_encoding
from heedful.observe.views import VIEWS, ViewOptions
from support.tiny import tiny

EVIL = "<script>alert('$x$')</script> & \"you\""


def test_the_command_knows_every_view():
    assert list(WHAT) == [*VIEWS, "names"]


@pytest.mark.parametrize("what", VIEWS)
def test_pages_show_texts_as_text(what: str, tmp_path):
    model, text = ("reversal", "3 1 4 1 5") if what == "alignment" else ("bert-books", EVIL)
    out = tmp_path / "page.html"
    given = [] if what in WITHOUT_TEXT else [text]
    assert main(["show", model, *given, "--what", what, "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<script>alert" not in page
    assert not re.search(r"(src|href)=[\"']https?:", page.replace('xlink:href="#', ""))  # nothing is fetched
    assert re.search(r'<svg|id="matrix-0"|class="tokens"', page) and "</html>" in page


@pytest.mark.parametrize("what", ["attention", "alignment"])
def test_the_numbers_of_a_page_are_the_librarys(what: str, tmp_path):
    text, out = "3 1 4 1 5 9", tmp_path / "page.html"
    assert main(["show", "reversal", text, "--what", what, "--out", str(out)]) == 0
    found = re.search(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"), flags=re.S)
    assert found is not None
    (shown,) = json.loads(found[1])["maps"]
    loaded = heedful.load("reversal")
    ((_, weights),) = attention_weights(loaded.model, text_input(loaded.model, loaded.tokenizer, text)).items()
    assert shown["columns"] == text.split() and shown["rows"][-6:] == [*text.split()[::-1][-5:], "</s>"]
    assert torch.allclose(torch.tensor(shown["weights"]), weights, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["show", "reversal", "3 1 4 1 5 9 2 6", "--what", "alignment"], ".png"),
        (["show", "tiny", "To be, or not", "--what", "attention", "--layer", "1", "--head", "0"], ".svg"),
        (["show", "tiny", EVIL[:20], "--what", "tokens"], ".svg"),
        (["show", "tiny", "To be", "--what", "lens"], ".svg"),
        (["show", "bert-books", "the man", "--second", "the sea", "--what", "heads"], ".pdf"),
        (["fill", "bert-books", "the [man|woman|child] is _ .", "--words", "good,bad"], ".svg"),
        (["fill", "bert-books", "the man is _ ."], ".png"),
    ],
)
def test_pictures(arguments: list[str], ending: str, tmp_path, capsys):
    out = tmp_path / f"picture{ending}"
    assert main([*arguments, "--out", str(out)]) == 0
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    assert out.read_bytes().startswith(begins)
    assert str(out) in capsys.readouterr().out
    if ending == ".svg":
        assert b"<script" not in out.read_bytes()


def test_images(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="image files want the package Pillow")
    pillow.new("RGB", (16, 16), "white").save(tmp_path / "image.png")
    arguments = ["show", "digits-vit", str(tmp_path / "image.png"), "--what", "rollout"]
    assert main([*arguments, "--out", str(tmp_path / "rollout.svg")]) == 0
    assert (tmp_path / "rollout.svg").stat().st_size > 1000


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_what_it_has(family: str):
    model = tiny(family).eval()
    image = torch.zeros(3, 8, 8)
    reading = image_input(model, image) if family == "vit" else text_input(model, None, "3 1 4 1 5")
    shown = set()
    for what, view in VIEWS.items():
        options = ViewOptions(model, None, family, None if what in WITHOUT_TEXT else reading)
        try:
            assert "</html>" in view(options).page()
            shown.add(what)
        except ValueError as error:  # it has no such thing, and says so
            assert re.search(
                r"no attention|no self-attention|no source|lens needs|no positions|no layers|images",
                str(error),
            )
    usual = {
        "attention",
        "heads",
        "rollout",
        "ablation",
        "lens",
        "embeddings",
        "projection",
        "tokens",
        "positions",
    }
    more = {"transformer": {"alignment"}, "t5": {"alignment"}}.get(family, set())
    expected = {"seq2seq": {"embeddings", "tokens"}, "cbow": {"tokens"}, "vit": usual - {"lens", "tokens"}}
    assert shown == expected.get(family, usual | more)


def test_names_are_listed(capsys):
    assert main(["show", "reversal", "--what", "names"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^decoder\.0\.cross\.weights +\(B, 1, T, S\)$", out, flags=re.M)


def test_fill_prints_a_table(capsys):
    assert main(["fill", "bert-books", "the [man|woman] took off _ hat .", "--words", "his,her"]) == 0
    out = capsys.readouterr().out
    assert "the woman took off _ hat ." in out and "log ratio, man : woman" in out


def test_fill_by_the_models_of_a_template(capsys, tmp_path):
    for ending in (".html", ".csv", ".svg"):
        out = tmp_path / f"report{ending}"
        assert main(["fill", "[tiny|shakespeare]: My [lord|king], _", "-n", "4", "--out", str(out)]) == 0
        said, report = capsys.readouterr().out, out.read_text(encoding="utf-8")
        assert "tiny: My lord, _" in said and "log p above the mean, shakespeare" in said
        for name in ("tiny / king", "shakespeare / lord"):
            assert name in report or f"{name.replace(' / ', ': My ')}, _" in report
    assert main(["fill", "tiny", "[tiny|shakespeare]: My lord, _"]) == 0
    assert "log ratio, tiny : shakespeare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fill", "[tiny|shakspeare]: My lord, _"], "near it: shakespeare"),
        (["fill", "bert-books", "[tiny|shakespeare]: My lord, _"], "leave bert-books out"),
        (["fill", "[tiny|reversal]: My lord, _"], "cannot fill"),
        (["show", "tiny"], "give a text"),
        (["show", "tiny", "x", "--out", "x.bmp"], "written as"),
        (["show", "tiny", "x", "--layer", "7"], "there is no layer 7"),
        (["show", "tiny", "x", "--head", "7"], "there is no head 7"),
        (["show", "tiny", "x", "--kind", "cross"], "no cross attention"),
        (["show", "tiny", "x", "--what", "alignment"], "looks at no source"),
        (["show", "tiny", "x", "--layer", "-1"], "counted from 0"),
        (["show", "tiny", "x", "--what", "lens", "--layer", "1"], "--layer says nothing about lens"),
        (
            ["show", "tiny", "--what", "positions", "--head", "1"],
            "it is for attention, alignment, projection",
        ),
        (["show", "tiny", "--what", "positions", "--target", "x"], "leave the target out"),
        (["show", "tiny", "", "--what", "lens"], "the text is empty"),
        (["show", "bert-books", "x", "--what", "embeddings", "--kind", "decoder"], "no decoder"),
        (["show", "bert-books", "x", "--what", "projection", "--head", "99"], "there is no head 99"),
        (["show", "tiny", "x", "--second", "y"], "reads one text"),
        (["show", "tiny", "x", "--target", "y"], "has no target"),
        (["show", "nothing", "x"], "no model, folder or file is called 'nothing'"),
        (["show", "tiny", "x" * 100], "shorten the text"),
        (["show", "digits-vit", "x"], "reads images"),
        (["show", "reversal", "1 2", "--what", "lens"], "logit lens needs"),
        (["fill", "tiny", "[a|"], "not closed"),
        (["fill", "reversal", "1 _"], "cannot fill"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("transformer-base", "sinusoidal", (20, 512)),
        ("gpt3-175b", "learned", (20, 12288)),
        ("llama3-8b", "rotary", (20, 64)),
        ("t5-small", "bias", (8, 20)),
        ("vit-b-16", "learned", (197, 768)),
    ],
)
def test_positions_need_no_weights(name, kind, shape):
    found = position_encoding(heedful.create(name, device="meta"), 20)
    assert (found.kind, tuple(found.values.shape)) == (kind, shape)
    assert found.about.endswith("before training") == (kind in ("learned", "bias"))
    if kind == "sinusoidal":  # Vaswani et al. 2017, section 3.5
        assert found.values[7, 6].item() == pytest.approx(math.sin(7 / 10000 ** (6 / 512)), abs=1e-6)


def test_show_positions_of_a_size_and_of_a_text(tmp_path, capsys):
    assert main(["show", "transformer-base", "--what", "positions", "--out", str(tmp_path / "a.html")]) == 0
    assert main(["show", "tiny-books", "The king", "--what", "positions", "--out", str(tmp_path / "b.html")]) == 0
    assert "transformer-base: sinusoidal positions" in (tmp_path / "a.html").read_text()
    assert "king" in (tmp_path / "b.html").read_text()
