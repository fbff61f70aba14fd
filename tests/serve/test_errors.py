"""Errors as clients see them: one shape, whatever went wrong."""

from __future__ import annotations

import json

import pytest

from heedful.generate.sampling import InvalidLogits
from heedful.serve.errors import (
    DESCRIPTIONS,
    ApiError,
    Overloaded,
    ShuttingDown,
    from_exception,
    from_validation,
    internal_error,
)


@pytest.mark.parametrize("status", [*DESCRIPTIONS, 431])
def test_all_four_keys_whatever_the_status(status):
    error = ApiError(status, "so it is", param="n").body()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"] == "so it is" and error["param"] == "n"
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (ValueError("n is 0"), 400, None),
        (LookupError("no model is called x"), 404, "model_not_found"),
        (Overloaded("full"), 429, "rate_limit_exceeded"),
        (ShuttingDown("stopping"), 503, "unavailable"),
        (MemoryError(), 500, "out_of_memory"),
        (InvalidLogits([0], [float("nan")]), 500, "model_failed"),
        (RuntimeError("secret"), 500, "internal_error"),
        (KeyError("secret"), 500, "internal_error"),
        (IndexError("secret"), 500, "internal_error"),
    ],
)
def test_what_exceptions_mean(problem, status, code):
    error = from_exception(problem)
    assert (error.status, error.code) == (status, code)
    assert error.message and "secret" not in error.message


def test_an_api_error_stays_itself():
    error = ApiError(404, "no", code="model_not_found")
    assert from_exception(error) is error


def test_who_should_try_again_is_told_when():
    assert ApiError(429, "full").headers["retry-after"] == "1"
    assert ApiError(503, "stopping", headers={"retry-after": "9"}).headers["retry-after"] == "9"
    assert "retry-after" not in ApiError(500, "failed").headers


def test_a_bug_is_told_by_its_id_only():
    assert "req_5" in internal_error("req_5").message and internal_error().status == 500


def test_what_clients_sent_is_cut_and_always_encodable():
    long = {
        "loc": ("body", "n"),
        "type": "int_type",
        "input": "x" * 10_000,
        "msg": "Input should be an integer",
    }
    assert len(from_validation([long]).message) < 300
    half = {**long, "input": "\ud800"}
    assert "ud800" in json.loads(from_validation([half]).encoded())["error"]["message"]
    assert json.loads(ApiError(404, "no \ud800").encoded())["error"]["message"] == "no \ud800"
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for huge in (10**5000, nested):
        assert len(from_validation([{**long, "input": huge}]).message) < 300
    while nested:  # taken apart by hand: the interpreter would do it recursively
        nested = nested[0]
