"""GET / and /assets/...: the built page. Nothing of it comes from elsewhere, and no key is asked for it.

`npm run build` in web/ writes it to serve/page/; a wheel has it. Assets carry a hash of themselves in their names, so
a browser may keep them for ever.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, HTMLResponse, Response

from heedful.serve.errors import ApiError

router = APIRouter()
FOLDER = Path(__file__).parents[1] / "page"
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
HASHED = re.compile(r".+[-.][A-Za-z0-9_-]{8,}\.[a-z0-9]+")

# What this system says of endings may be anything, and browsers refuse scripts of another type.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
# Neither scripts nor styles are inline: what is drawn is placed by scripts. Pictures are saved by blob: and data:.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {  # besides what the guard says of every answer
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NOT_BUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>heedful</title>
<h1>heedful</h1>
<p>The server is running, but the playground's page has not been built yet. In the repository:</p>
<pre>make play</pre>
<p>or, with Node 20, <code>cd web &amp;&amp; npm ci &amp;&amp; npm run build</code>; then load this page again.
A wheel has the page already.</p>
<p>The API works without it: see <code>/v1/models</code> and <code>/openapi.json</code>.</p>
</html>
"""


@router.api_route("/", methods=["GET", "HEAD"])
async def page(http: HttpRequest) -> Response:
    path = FOLDER / "index.html"
    if not path.is_file():
        return HTMLResponse(NOT_BUILT, headers={**SAFE, "cache-control": "no-store"})
    return respond(http, path, "no-cache")


@router.api_route("/icon.svg", methods=["GET", "HEAD"])
async def icon(http: HttpRequest) -> Response:
    return find(http, FOLDER, "icon.svg")


@router.api_route("/assets/{name:path}", methods=["GET", "HEAD"])
async def asset(http: HttpRequest, name: str) -> Response:
    return find(http, FOLDER / "assets", name)


def find(http: HttpRequest, folder: Path, name: str) -> Response:
    """A file of the folder itself, by a plain name of a known kind."""
    path = folder / name if PLAIN.fullmatch(name) else folder
    if path.suffix not in TYPES or not path.is_file() or path.resolve().parent != folder.resolve():
        raise ApiError(404, f"there is no {http.scope['path'][:200]} here")
    hashed = folder.name == "assets" and HASHED.fullmatch(name)
    return respond(http, path, "public, max-age=31536000, immutable" if hashed else "no-cache")


def respond(http: HttpRequest, path: Path, cache: str) -> Response:
    found = FileResponse(path, headers={**SAFE, "cache-control": cache}, stat_result=path.stat())
    found.headers["content-type"] = TYPES[path.suffix]
    if http.headers.get("if-none-match") == found.headers["etag"]:
        kept = {**SAFE, "cache-control": cache, "etag": found.headers["etag"]}
        return Response(status_code=304, headers=kept)
    return found
