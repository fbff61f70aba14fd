"""The playground: the page at / and, under /api, the JSON that its tabs are made of.

    models      what is served, by its config alone
    text        tokens, what comes next, the logit lens
    fill        what fills a blank
    attention   maps of every layer and head, neurons, alignment, rollout
    steps       a whole forward pass of a small model
    tasks       translate, classify, answer, tag
    images      classify and complete images
    runs        trainings on this machine
    page        the built page

All numbers are the library's own (heedful.observe, heedful.tasks), computed in the model's thread between two steps of
its engine (desk.py). The paths are the page's and may change with it, so they are not in /openapi.json.
"""

from __future__ import annotations

from fastapi import APIRouter

from heedful.serve.playground import attention, fill, images, models, page, runs, steps, tasks, text

router = APIRouter()
for part in (models, text, fill, attention, steps, tasks, images, runs, page):
    router.include_router(part.router, include_in_schema=False)
