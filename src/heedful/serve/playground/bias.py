"""POST /api/bias: differences between groups of people in a model's scores, with intervals, as `Loaded.bias` has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from heedful.evaluate.bias_report import report_in_slices
from heedful.evaluate.bias_tests import MAX_GROUPS, BiasTest, make_test, standard_tests
from heedful.serve.errors import client_errors
from heedful.serve.playground.inspection import Inspector, run_in_slices
from heedful.serve.playground.wire import (
    ModelName,
    PlaygroundModel,
    ShortText,
    TextResponse,
    encode_response,
    with_warnings,
)
from heedful.serve.request_schema import RequestBody

router = APIRouter()
MAX_SENTENCES = 5_000  # of a request
DRAWING = threading.Lock()  # matplotlib's settings are those of the process

Words = Annotated[list[ShortText], Field(min_length=1, max_length=200)]


class BiasRequest(RequestBody):
    """Templates with the members of each group and the values of other places; without any, the tests that ship."""

    model: ModelName
    templates: Annotated[list[ShortText], Field(min_length=1, max_length=64)] | None = None
    groups: Annotated[dict[str, Words], Field(max_length=MAX_GROUPS)] | None = None
    fill: Annotated[dict[str, Words], Field(max_length=8)] | None = None
    words: Words | None = None
    label: ShortText | None = None
    whole: bool = False
    page: bool = Field(False, description="Also the report as one HTML page")


class EffectWithInterval(PlaygroundModel):
    """A number with its 95 % interval, null where there is nothing to resample."""

    name: str
    value: float
    low: float | None
    high: float | None


class GroupContrast(PlaygroundModel):
    """A difference between groups: over all, for each value or word, and the percentage of these above 0."""

    effect: EffectWithInterval
    rows: list[EffectWithInterval]
    share: EffectWithInterval


class BiasTestResult(PlaygroundModel):
    """The result of one test."""

    test: str
    about: str
    measure: str
    unit: str
    sentences: int
    groups: list[EffectWithInterval]
    contrasts: list[GroupContrast]
    members: dict[str, list[EffectWithInterval]]
    command: str


class BiasResponse(TextResponse):
    """The results of the tests."""

    model: str
    resamples: int
    results: list[BiasTestResult]
    page: str | None = Field(description="The report as one self-contained HTML page")


@router.post("/api/bias", response_model=BiasResponse)
async def post_bias(http: HttpRequest, body: BiasRequest) -> Response:
    """What a model makes of sentences that differ in a group alone."""
    with client_errors():
        test = requested_test(body)
    found = await run_in_slices(http, body.model, lambda inspector: bias_in_slices(inspector, test, body))
    return await encode_response(http, with_warnings(http, found))


def requested_test(body: BiasRequest) -> BiasTest | None:
    """The test of a request; None for those that ship."""
    given = body.model_dump(include={"templates", "groups", "fill", "words", "label", "whole"}, exclude_none=True)
    if body.templates is None:
        if set(given) - {"whole"}:
            raise ValueError("groups, fill, words and label are for templates: give some, or leave these out")
        return None
    test = make_test(given)
    if test.n_sentences > MAX_SENTENCES:
        raise ValueError(f"this test is {test.n_sentences:,} sentences: at most {MAX_SENTENCES:,} are scored here")
    return test


def bias_in_slices(inspector: Inspector, test: BiasTest | None, body: BiasRequest) -> Iterator[dict[str, Any]]:
    """A BiasResponse, after something empty for each slice of work."""
    loaded = inspector.loaded
    key = ("bias", repr(test))
    report = inspector.cache_get(key)
    if report is None:
        tests = standard_tests(loaded.abilities) if test is None else [test]
        for part in report_in_slices(loaded, tests):
            report = part
            yield {}
        inspector.cache_put(key, report)
    found = report.to_dict() | {"page": None}
    if body.page:
        with DRAWING:
            found["page"] = report.html()
    yield found
