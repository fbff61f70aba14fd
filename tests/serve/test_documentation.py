"""The built documentation at /docs/: its files and nobody else's, without a key, and without scripts inside pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.serve.playground import docs
from support.serving import KEY, ThreadServer, assert_error, serving


@pytest.fixture(scope="module")
def locked() -> Iterator[ThreadServer]:
    """A server with a key, which this client does not send."""
    with serving("tiny", api_keys=(KEY,)) as found:
        yield found


@pytest.fixture
def built(tmp_path, monkeypatch) -> Path:
    """A site as a build leaves it, and files that are none of its."""
    site = tmp_path / "site"
    for name in ("index.html", "families/gpt.html", "_static/styles/furo.css", "searchindex.js", "data.py", ".x.js"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(f"this is {name}")
    (tmp_path / "secret.js").write_text("secret")
    (site / "link.js").symlink_to(tmp_path / "secret.js")
    (site / "out").symlink_to(tmp_path)
    monkeypatch.setattr(docs, "DOCUMENTATION_FOLDER", site)
    return site


@pytest.mark.parametrize(
    ("path", "file", "kind"),
    [
        ("/docs/", "index.html", "text/html"),
        ("/docs/index.html", "index.html", "text/html"),
        ("/docs/families/gpt.html", "families/gpt.html", "text/html"),
        ("/docs/_static/styles/furo.css?v=1", "_static/styles/furo.css", "text/css"),
        ("/docs/searchindex.js", "searchindex.js", "text/javascript"),
    ],
)
def test_files_of_the_site(locked, built, path, file, kind):
    response = locked.get(path)
    assert response.status_code == 200 and response.text == f"this is {file}"
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"
    assert ("immutable" in response.headers["cache-control"]) == ("?v=" in path)
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'; script-src 'self'; style-src 'self'; " in policy and "form-action 'self'" in policy
    again = locked.get(path, headers={"if-none-match": response.headers["etag"]})
    assert again.status_code == 304 and again.headers["content-security-policy"] == policy
    assert locked.http.head(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "families", "families/", "nothing.html", "data.py", ".x.js", "link.js", "out/secret.js", "../secret.js",
        "%2e%2e/secret.js", "..%2fsecret.js", "families/%2e%2e/%2e%2e/secret.js", "/etc/passwd", "a%00.js", "x" * 5000,
    ],
)  # fmt: skip
def test_nothing_else_is_read(locked, built, path):
    response = locked.get(f"/docs/{path}")
    assert response.status_code in (401, 404) and "secret" not in response.text.replace("secret.js", "")


def test_the_folder_is_where_relative_links_start(locked, built):
    response = locked.get("/docs")
    assert response.status_code == 307 and response.headers["location"] == "/docs/"


def test_a_site_that_is_not_built_says_how_to(locked, tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "DOCUMENTATION_FOLDER", tmp_path)
    response = locked.get("/docs/")
    assert response.status_code == 404 and "make docs" in response.text
    assert_error(locked.get("/docs/index.html"), 404)
