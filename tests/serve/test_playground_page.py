"""The page itself: its headers, its files and nobody else's, and that only what it asks of models needs the key."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.serve.playground import page as pages
from support.serving import KEY, ThreadServer, assert_error, serving


@pytest.fixture(scope="module")
def locked() -> Iterator[ThreadServer]:
    """A server with a key, which this client does not send."""
    with serving("tiny", api_keys=(KEY,)) as found:
        yield found


@pytest.fixture
def built(tmp_path, monkeypatch) -> Path:
    """A page as a build leaves it, and a file beside it that is none of its."""
    (tmp_path / "page/assets/deep").mkdir(parents=True)
    (tmp_path / "page/index.html").write_text("<!doctype html><title>hello</title>")
    (tmp_path / "page/icon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    files = {
        "index-DyFKtYKd.js": "let x = 1",
        "Frame-CnU_Cjgh.css": "a {}",
        "plain.js": "let y",
        "x-12345678.py": "secret = 1",
    }
    for name, text in {**files, "deep/a-12345678.js": "1"}.items():
        (tmp_path / "page/assets" / name).write_text(text)
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "page/assets/link-12345678.js").symlink_to(tmp_path / "secret.js")
    monkeypatch.setattr(pages, "PAGE_FOLDER", tmp_path / "page")
    return tmp_path / "page"


def check_safe(response) -> None:
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["default-src"] == policy["object-src"] == policy["base-uri"] == "'none'"
    assert policy["frame-src"] == policy["frame-ancestors"] == "'self'"  # a lesson shows the page's own views
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_page_needs_no_key(locked, built):
    response = locked.get("/")
    assert response.status_code == 200 and "hello" in response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    check_safe(response)
    assert locked.http.head("/").status_code == 200
    again = locked.get("/", headers={"if-none-match": response.headers["etag"]})
    assert again.status_code == 304 and not again.content
    check_safe(again)
    (built / "index.html").write_text("<!doctype html><title>another one</title>")
    assert "another" in locked.get("/", headers={"if-none-match": response.headers["etag"]}).text


@pytest.mark.parametrize(
    ("path", "kind", "kept"),
    [
        ("/assets/index-DyFKtYKd.js", "text/javascript; charset=utf-8", True),
        ("/assets/Frame-CnU_Cjgh.css", "text/css; charset=utf-8", True),
        ("/assets/plain.js", "text/javascript; charset=utf-8", False),
        ("/icon.svg", "image/svg+xml", False),
    ],
)
def test_assets_are_kept_for_ever_where_their_names_change_with_them(locked, built, path, kind, kept):
    response = locked.get(path)
    assert response.status_code == 200 and response.headers["content-type"] == kind
    assert ("immutable" in response.headers["cache-control"]) == kept
    check_safe(response)


def test_assets_are_sent_compressed_to_those_who_take_that(locked, built):
    path = "/assets/index-DyFKtYKd.js"
    plain = locked.get(path, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers  # the build left no other
    (built / "assets/index-DyFKtYKd.js.gz").write_bytes(gzip.compress(b"let x = 1"))
    for accepted, packed in (
        ("gzip, deflate, br", True),
        ("br;q=1, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("", False),
    ):
        response = locked.get(path, headers={"accept-encoding": accepted})
        assert response.text == "let x = 1" and response.headers["vary"] == "accept-encoding"
        assert (response.headers.get("content-encoding") == "gzip") == packed
        assert response.headers["content-type"] == "text/javascript; charset=utf-8"
        assert "immutable" in response.headers["cache-control"]
        check_safe(response)
        kept = {"accept-encoding": accepted, "if-none-match": response.headers["etag"]}
        assert locked.get(path, headers=kept).status_code == 304
    assert "content-encoding" not in locked.get("/", headers={"accept-encoding": "gzip"}).headers
    assert_error(locked.get(f"{path}.gz"), 404)


@pytest.mark.parametrize(
    "path",
    [
        "/assets/", "/assets/nothing.js", "/assets/%2e%2e/index.html", "/assets/..%2findex.html", "/assets/deep",
        "/assets/%2e%2e%2f%2e%2e%2fsecret.js", "/assets//etc/passwd", "/assets/a%00.js", "/assets/x-12345678.py",
        "/assets/link-12345678.js", "/assets/deep/a-12345678.js", "/assets/.js", f"/assets/{'x' * 5000}.js",
    ],
)  # fmt: skip
def test_nothing_else_is_read(locked, built, path):
    assert_error(locked.get(path), 404)


@pytest.mark.parametrize(
    "path", ["/api/models", "/api/runs", "/api/images", "/api/runs/x", "/api/nothing", "/v1/models"]
)
def test_everything_else_asks_for_the_key(locked, path):
    assert_error(locked.get(path), 401, code="invalid_api_key")
    assert locked.get(path, headers={"authorization": f"Bearer {KEY}"}).status_code in (200, 404)


@pytest.mark.parametrize("path", ["tokens", "next", "fill", "attention", "steps", "translate", "image/complete"])
def test_and_so_does_every_question(locked, path):
    assert_error(locked.post(f"/api/{path}", {"model": "tiny", "text": "a"}), 401, code="invalid_api_key")


def test_a_page_that_is_not_built_says_how_to(locked, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_FOLDER", tmp_path)
    response = locked.get("/")
    assert response.status_code == 200 and "make play" in response.text and "npm run build" in response.text
    assert response.headers["cache-control"] == "no-store" and "<script" not in response.text
    check_safe(response)


def test_a_page_of_another_origin_may_ask_nothing():
    with serving("tiny") as page:
        body, other = {"model": "tiny", "text": "a"}, {"origin": "https://example.org"}
        assert page.post("/api/tokens", body, headers=other).status_code == 403
        own = {"origin": page.url}
        assert page.post("/api/tokens", body, headers=own).status_code == 200
