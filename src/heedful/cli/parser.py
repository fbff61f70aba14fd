"""An argument parser whose errors are one line, with the nearest name for a misspelled one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from heedful.models.config import did_you_mean


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with shorter errors and suggestions."""

    def error(self, message: str) -> NoReturn:
        """Exit with a line that says what is wrong; the usage of some commands would fill the screen."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says more\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}{hint}")

    def check_options(self, words: Sequence[str]) -> None:
        """Exit for options that the parser does not know, before it misses anything else."""
        known = list(self._option_string_actions)
        if unknown := [word for word in words if not any(name.startswith(word) for name in known)]:
            self.reject(unknown)

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Exit for arguments that the parser does not know."""
        known = list(self._option_string_actions)
        words = [word + did_you_mean(word.partition("=")[0], known) * word.startswith("-") for word in unknown]
        self.error(f"unrecognized arguments: {' '.join(words)}")
