"""Engines that several processes run together, each with a part of the model: one leads, the others follow.

The leader is an engine as any other, on which a server adds and cancels requests. Before each step it sends what was
added and cancelled to all followers, whose engines then take the same step: with the same requests, seeds and logits
they choose the same tokens. Nothing depends on clocks, so prefill has no `step_time`.

    leader    add, cancel ... step ──► {"calls": [...]} ──► add, cancel ... step    follower

Messages are JSON, from CPU to CPU (gloo); no message ends the followers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.engine import Engine
from heedful.generate.grammar import Grammar
from heedful.generate.request import Request, Sampling
from heedful.generate.sequence import Event
from heedful.generate.turns import Owner
from heedful.models.base import GenerativeModel

LONGEST_WAIT = timedelta(days=365)  # of a follower, for the next request


class LeadingEngine(Engine):
    """An engine whose requests and steps the followers repeat; `settings` are those of `Engine`."""

    def __init__(self, model: GenerativeModel[Any], tokenizer: SupportsDecode | None = None, **settings: Any) -> None:
        settings["step_time"] = None
        super().__init__(model, tokenizer, **settings)
        self._calls: list[dict[str, Any]] = []  # since the last step
        _channel().send({"engine": settings})

    def add(self, request: Request, owner: Owner | None = None) -> int:
        """Queue a request here and at the followers, with a seed if it has none."""
        if request.sampling.seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        id = super().add(request, owner)
        self._calls.append({"add": id, "request": asdict(request), "owner": owner})
        return id

    def cancel(self, id: int) -> bool:
        """Drop a request here and at the followers."""
        found = super().cancel(id)
        if found:
            self._calls.append({"cancel": id})
        return found

    def _step(self) -> list[Event]:
        calls, self._calls = self._calls, []
        _channel().send({"calls": calls})
        return super()._step()


def end_followers() -> None:
    """The leader's last message."""
    _channel().send({})


def follow(model: GenerativeModel[Any], tokenizer: SupportsDecode | None = None) -> None:
    """Do what the leader does, until it ends."""
    engine: Engine | None = None
    ids: dict[int, int] = {}  # the leader's to ours
    failed: Exception | None = None
    while message := _channel().receive():
        if "engine" in message:
            engine, ids, failed = Engine(model, tokenizer, **message["engine"]), {}, None
            continue
        assert engine is not None
        if failed is not None:  # the leader would have made a new engine, had its own failed too
            raise RuntimeError("a step failed here and not in the process that leads") from failed
        try:
            for call in message["calls"]:
                if "add" in call:
                    owner = None if call["owner"] is None else Owner(*call["owner"])
                    ids[call["add"]] = engine.add(request_from_json(call["request"]), owner)
                else:
                    engine.cancel(ids[call["cancel"]])
            engine.step()
        except Exception as error:
            failed = error


def request_from_json(values: Mapping[str, Any]) -> Request:
    """A request from what JSON made of its fields (`dataclasses.asdict`)."""
    sampling, grammar, source = dict(values["sampling"]), values["grammar"], values["source"]
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    typed = {
        "prompt": tuple(values["prompt"]),
        "source": None if source is None else tuple(source),
        "sampling": Sampling(**sampling),
        "stop": tuple(values["stop"]),
        "stop_ids": frozenset(values["stop_ids"]),
        "grammar": None if grammar is None else Grammar(**grammar),
    }
    return Request(**{**values, **typed})


class _Channel:
    """Messages from the first process to all others."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)

    def send(self, message: Mapping[str, Any]) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message, default=list).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self.group)
        dist.broadcast(data, 0, group=self.group)

    def receive(self) -> dict[str, Any]:
        n_bytes = torch.zeros(1, dtype=torch.long)
        dist.broadcast(n_bytes, 0, group=self.group)
        data = torch.empty(int(n_bytes), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        message: dict[str, Any] = json.loads(bytes(data.tolist()))
        return message


@cache
def _channel() -> _Channel:
    """The channel, which all processes make with their first message."""
    return _Channel()
