"""The playground: the page at / and, under /api, the JSON that its tabs are made of.

    models      the served models, described from their configs
    text        tokens, next-token probabilities, the logit lens
    chat_prompt a conversation as its chat template writes it
    fill        word probabilities in a blank
    bias        differences between groups of people, with intervals
    attention   weights by layer and head, neuron view, alignment, rollout (attention_view, recompute, neuron)
    steps       all activations and parameters of a small model (steps_schema, parameters)
    steps_map   a pass of a decoder of any size as one picture
    tasks       translate, classify, answer, tag
    neighbours  nearest words and analogies
    images      classify and complete images
    runs        training runs on this machine
    training    a training that is started from the page
    lessons     lessons: their text, their cells run, answers to exercises
    access      who may run code, train and write: the token of the address that the server printed
    page        the built page
    docs        the built documentation, at /docs/
    inspection  jobs in the model's thread, float32 copies, the cache
    wire        shared request fields and response models, the encoding of arrays

All numbers are the library's own (heedful.observe, heedful.tasks). The routes are the page's and may change with it;
they are tagged `playground` in /openapi.json, from which the page's types are generated (web/schema.py).
"""

from __future__ import annotations

from fastapi import APIRouter

from heedful.serve.playground import (
    attention,
    bias,
    chat_prompt,
    docs,
    fill,
    images,
    lessons,
    models,
    neighbours,
    page,
    runs,
    steps,
    steps_map,
    tasks,
    text,
    training,
)

API_MODULES = (
    *(models, text, chat_prompt, fill, bias, attention, steps, steps_map, tasks, neighbours, images),
    *(runs, training, lessons),
)

router = APIRouter()
for part in API_MODULES:
    router.include_router(part.router, tags=["playground"])
for part in (page, docs):
    router.include_router(part.router, include_in_schema=False)
