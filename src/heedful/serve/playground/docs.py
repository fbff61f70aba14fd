"""GET /docs/...: the documentation, where `make docs` has built it; a wheel that was built then contains it.

Like the page it loads nothing from other hosts and needs no API key.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from heedful.serve.errors import ApiError
from heedful.serve.playground.page import CONTENT_SECURITY_POLICY, MEDIA_TYPES, file_response, note_response

router = APIRouter()
DOCUMENTATION_FOLDER = Path(__file__).parents[1] / "documentation"
SAFE_PATH = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,99}/){0,4}[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
# The page's policy, but the search is a form, and Firefox fetches the next page ahead (rel="next").
POLICY = CONTENT_SECURITY_POLICY.replace("form-action 'none'", "form-action 'self'")
POLICY = POLICY.replace("default-src 'none'", "default-src 'self'")
NOT_BUILT = """<p>The documentation has not been built here. In the repository:</p>
<pre>make docs</pre>
<p>Then load this page again.</p>
"""


def has_documentation() -> bool:
    """Whether it was built."""
    return (DOCUMENTATION_FOLDER / "index.html").is_file()


@router.api_route("/docs", methods=["GET", "HEAD"])
async def redirect_to_documentation() -> Response:
    """Links of the pages are relative, to the folder."""
    return RedirectResponse("/docs/")


@router.api_route("/docs/{name:path}", methods=["GET", "HEAD"])
async def get_document(http: HttpRequest, name: str) -> Response:
    """A file of the documentation; for / a note on how to build it where it is missing."""
    root = DOCUMENTATION_FOLDER
    if not name and not has_documentation():
        return note_response(NOT_BUILT, 404)
    path = root / (name or "index.html")
    safe = not name or SAFE_PATH.fullmatch(name)
    if (
        not safe
        or path.suffix not in MEDIA_TYPES
        or not path.is_file()
        or not path.resolve().is_relative_to(root.resolve())
    ):
        raise ApiError(404, f"there is no {http.scope['path'][:200]} here")
    versioned = "v" in http.query_params  # by a hash of the file's content
    response = file_response(http, path, "public, max-age=31536000, immutable" if versioned else "no-cache")
    response.headers["content-security-policy"] = POLICY
    return response
