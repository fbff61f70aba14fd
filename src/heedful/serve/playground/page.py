"""GET / and /assets/...: the built page. It loads nothing from other hosts and needs no API key.

`npm run build` in web/ writes it to serve/page/; a wheel contains it. The names of assets carry a hash of their
content, so that browsers may cache them for ever. The build leaves scripts and styles compressed as well (NAME.gz).
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, HTMLResponse, Response

from heedful.serve.errors import ApiError

router = APIRouter()
PAGE_FOLDER = Path(__file__).parents[1] / "page"
SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
HASHED_NAME = re.compile(r".+[-.][A-Za-z0-9_-]{8,}\.[a-z0-9]+")

# Not from mimetypes, which depends on the system: browsers refuse scripts of another media type.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webp": "image/webp",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
# Neither scripts nor styles are inline. Images are saved through blob: and data: URLs. The page shows itself in frames:
# the live views of a lesson.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SECURITY_HEADERS = {  # besides those that the middleware adds to every response
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NOT_BUILT = """<p>The server is running, but the playground's page has not been built yet. In the repository:</p>
<pre>make play</pre>
<p>or, with Node 20, <code>cd web &amp;&amp; npm ci &amp;&amp; npm run build</code>; then load this page again.
A wheel has the page already.</p>
<p>The API works without it: see <code>/v1/models</code> and <code>/openapi.json</code>.</p>
"""
NOTE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>heedful</title>
<h1>heedful</h1>
%s</html>
"""


@router.api_route("/", methods=["GET", "HEAD"])
async def get_index(http: HttpRequest) -> Response:
    """The page; a note on how to build it where it is missing."""
    path = PAGE_FOLDER / "index.html"
    if not path.is_file():
        return note_response(NOT_BUILT)
    return file_response(http, path, "no-cache")


def note_response(html: str, status: int = 200) -> Response:
    """A page with a note of ours on it, in place of one that was not built."""
    return HTMLResponse(NOTE % html, status, headers={**SECURITY_HEADERS, "cache-control": "no-store"})


@router.api_route("/icon.svg", methods=["GET", "HEAD"])
async def get_icon(http: HttpRequest) -> Response:
    """The page's icon."""
    return static_file(http, PAGE_FOLDER, "icon.svg")


@router.api_route("/assets/{name:path}", methods=["GET", "HEAD"])
async def get_asset(http: HttpRequest, name: str) -> Response:
    """A script or style sheet of the page."""
    return static_file(http, PAGE_FOLDER / "assets", name)


def static_file(http: HttpRequest, folder: Path, name: str) -> Response:
    """A file directly in a folder, with a safe name and a known media type; 404 for anything else."""
    path = folder / name if SAFE_NAME.fullmatch(name) else folder
    if path.suffix not in MEDIA_TYPES or not path.is_file() or path.resolve().parent != folder.resolve():
        raise ApiError(404, f"there is no {http.scope['path'][:200]} here")
    hashed = folder.name == "assets" and HASHED_NAME.fullmatch(name)
    return file_response(http, path, "public, max-age=31536000, immutable" if hashed else "no-cache")


def file_response(http: HttpRequest, path: Path, cache: str) -> Response:
    """A file with its media type and security headers, compressed if the build left it so and the client takes that; a
    304 where the client has it already."""
    headers = {**SECURITY_HEADERS, "cache-control": cache}
    media_type, packed = MEDIA_TYPES[path.suffix], path.with_name(f"{path.name}.gz")
    if packed.is_file() and not packed.is_symlink():
        headers["vary"] = "accept-encoding"
        if accepts_gzip(http.headers.get("accept-encoding", "")):
            path, headers["content-encoding"] = packed, "gzip"
    found = FileResponse(path, headers=headers, stat_result=path.stat())
    found.headers["content-type"] = media_type
    if http.headers.get("if-none-match") == found.headers["etag"]:
        headers.pop("content-encoding", None)
        return Response(status_code=304, headers={**headers, "etag": found.headers["etag"]})
    return found


def accepts_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight) is None
    return False
