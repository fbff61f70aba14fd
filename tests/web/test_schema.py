"""The page's types of the API are those of the server's schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "web" / "schema.py"


def test_the_generated_types_are_up_to_date():
    if not (SCRIPT.parent / "node_modules" / ".bin" / "openapi-typescript").is_file():
        pytest.skip("openapi-typescript is not installed: npm ci in web/")
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
