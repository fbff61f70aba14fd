"""Generates web/src/lib/schema.ts, the page's types of the API, from the server's OpenAPI schema.

    python web/schema.py            writes it (npm run schema)
    python web/schema.py --check    fails if it is not up to date (make web)

It needs heedful, and openapi-typescript in web/node_modules (npm ci).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent
PROGRAM = WEB / "node_modules" / ".bin" / "openapi-typescript"
TARGET = WEB / "src" / "lib" / "schema.ts"


def openapi_schema() -> dict[str, Any]:
    """What a server has at /openapi.json."""
    from heedful.serve.app import create_app
    from heedful.serve.metrics import Metrics
    from heedful.serve.model_manager import ModelManager
    from heedful.serve.options import Options

    options = Options()
    return create_app(ModelManager((), options, Metrics()), options).openapi()


def without_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without its error responses, which are the same for every route."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"] = {"200": operation["responses"]["200"]}
    return schema


def generate() -> str:
    """The text of schema.ts."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "openapi.json", Path(folder) / "schema.ts"
        source.write_text(json.dumps(without_errors(openapi_schema())), encoding="utf-8")
        done = subprocess.run(
            [PROGRAM, source, "--output", target, "--default-non-nullable=false"], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"openapi-typescript failed:\n{done.stdout}{done.stderr}")
        return target.read_text(encoding="utf-8")


def main() -> None:
    """Write the file, or compare it."""
    if not PROGRAM.is_file():
        raise SystemExit("openapi-typescript is not installed: run npm ci in web/")
    text = generate()
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
    elif not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{TARGET} is not what the server's schema says: run python web/schema.py")


if __name__ == "__main__":
    main()
