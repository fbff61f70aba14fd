"""`check(answer)`: what is wrong with the answer to an exercise, in words.

An exercise is a function to write. Its check is a function `check_NAME` in one of the modules of `checks`; it calls the
answer with fresh inputs and raises `Wrong` with the first thing that is not right. A check says what a teacher would:
which input, what came, what should have, and the likely reason.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from heedful.lessons import checks


class Wrong(Exception):
    """What is wrong with an answer; the message is for the student."""


class Verdict:
    """Whether an answer is right, true or false. A notebook shows nothing of it, since `check` has printed it."""

    def __init__(self, right: bool) -> None:
        self.right = right

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return ""

    def _ipython_display_(self) -> None:
        """Without this, a notebook would show an empty result under a cell that ends with `check(...)`."""


def check(answer: Callable[..., Any]) -> Verdict:
    """Whether an answer to an exercise is right; prints so, or what is wrong with it."""
    name = answer.__name__
    problem = _problem_with(answer, found_check(name))
    print(f"✗ {name}: {problem}" if problem else f"✓ {name}: right")
    return Verdict(not problem)


def _problem_with(answer: Callable[..., Any], judge: Callable[[Callable[..., Any]], None]) -> str:
    try:
        judge(answer)
    except Wrong as problem:
        return str(problem)
    except NotImplementedError:
        return "not written yet"
    except (Exception, SystemExit) as problem:
        return f"it raised {type(problem).__name__}: {problem}"
    return ""


def found_check(name: str) -> Callable[[Callable[..., Any]], None]:
    """The check of an exercise, by the name of the function to write."""
    for module in pkgutil.iter_modules(checks.__path__):
        function = getattr(import_module(f"{checks.__name__}.{module.name}"), f"check_{name}", None)
        if inspect.isfunction(function):
            return function
    raise ValueError(f"there is no exercise {name!r}: the function keeps the name that the exercise gives it")


def require(condition: bool, message: str) -> None:
    """Raise `Wrong` with a message unless a condition holds."""
    if not condition:
        raise Wrong(message)


def require_tensor(value: Any, shape: tuple[int, ...], about: str = "") -> Tensor:
    """An answer's value as a tensor of a shape; `Wrong` says what came instead."""
    of = f" of {about}" if about else ""
    require(value is not None, f"it returned None{of}: is there a `return`?")
    require(isinstance(value, Tensor), f"it returned a {type(value).__name__}{of}, not a tensor")
    require(tuple(value.shape) == shape, f"the shape{of} is {tuple(value.shape)}, not {shape}")
    require(bool(torch.isfinite(value).all()), f"there are numbers that are not finite{of}")
    return value


def require_close(value: Any, expected: Tensor, message: str, tolerance: float = 1e-4) -> None:
    """Raise `Wrong` unless a tensor has the expected shape and numbers; the message, then the first that differs."""
    value = require_tensor(value, tuple(expected.shape))
    wrong = (value.double() - expected.double()).abs() > tolerance * (1 + expected.double().abs())
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        place = f" at {list(first)}" if first else ""
        raise Wrong(f"{message} ({value[first].item():.4g}{place}, should be {expected[first].item():.4g})")
