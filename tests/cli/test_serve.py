"""`heedful serve` as far as its options: what reaches the server, and what is refused before anything is loaded."""

from __future__ import annotations

import pytest

from heedful.cli import main


@pytest.fixture
def served(monkeypatch):
    """The options that a server was started with; nothing is served."""
    found = []
    monkeypatch.delenv("HEEDFUL_API_KEY", raising=False)
    monkeypatch.setattr("heedful.serve.server.serve", lambda options: found.append(options) or 0)
    return found


def test_the_defaults_are_private(served):
    assert main(["serve"]) == 0
    (options,) = served
    assert (options.models, options.host, options.port, options.api_keys) == ((), "127.0.0.1", 8000, ())
    assert (options.max_body, options.max_tokens_per_request, options.drain) == (8 * 2**20, 65_536, 30)


def test_options_reach_the_server(served):
    main(["serve", "tiny", "x=shakespeare", "--port", "0", "--memory", "1.5", "--quantize", "int8", "--lazy",
          "--max-rows", "3", "--queue", "4", "--allow-origin", "https://a.org", "--cache-tokens", "99"])  # fmt: skip
    (options,) = served
    assert options.models == ("tiny", "x=shakespeare") and options.port == 0 and options.memory == 1.5
    assert options.quantize == "int8" and options.lazy and not options.verbose
    assert (options.max_rows, options.queue, options.cache_tokens) == (3, 4, 99)
    assert options.allow_origins == ("https://a.org",)


def test_keys_come_from_options_files_or_the_environment(served, monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    monkeypatch.setenv("HEEDFUL_API_KEY", "four")
    main(["serve"])
    main(["serve", "--api-key-file", str(file)])
    main(["serve", "--api-key", "one", "--api-key-file", str(file), "--host", "0.0.0.0"])
    assert [options.api_keys for options in served] == [("four",), ("two", "three"), ("one", "two", "three")]
    assert [options.key_source for options in served] == [
        "HEEDFUL_API_KEY",
        str(file),
        f"--api-key and {file}",
    ]
    assert "four" not in repr(served[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "HEEDFUL_API_KEY"),
        (["--host", "::"], "HEEDFUL_API_KEY"),
        (["--port", "99999"], "65535"),
        (["--max-rows", "0"], "max_rows"),
        (["--memory", "nan"], "memory"),
        (["--drain", "-1"], "drain"),
        (["--api-key", ""], "API key"),
        (["--api-key-file", "missing.txt"], "missing.txt"),
        (["--allow-origin", "example.org"], "https://example.org"),
    ],
)
def test_a_mistake_is_one_line_that_helps(served, arguments, words, capsys):
    assert main(["serve", *arguments]) == 2 and not served
    error = capsys.readouterr().err
    assert error.startswith("heedful: ") and error.count("\n") == 1 and words in error


def test_an_empty_key_in_the_environment_is_not_no_key(served, monkeypatch, capsys):
    monkeypatch.setenv("HEEDFUL_API_KEY", "")
    assert main(["serve"]) == 2 and not served
    assert "API key" in capsys.readouterr().err
