"""Continuous batching on a GPU: heedful's engine and transformers' manager under the same clients, in process.

    python benchmarks/serving_gpu.py [--model gpt2] [--clients 64] [--requests 4] [--rounds 3] [--only NAME ...]

A client sends a request, reads its stream to the end, and sends the next. Prompts have 16 to 256 tokens and answers 32
to 96, greedy, in bfloat16 with random weights; every round has new prompts. Programs take turns, and one round before
the first warms up. Tokens per second and the time to first token are medians over the rounds and over all requests. The
share of time in which the GPU computes is of one more round of heedful's, profiled.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

from gpu import build, hub_model
from heedful.generate.engine import Engine
from heedful.generate.request import Request, Sampling
from heedful.kernels.accelerate import accelerate

PROMPTS, ANSWERS = (16, 256), (32, 96)
GREEDY = Sampling(temperature=0)
Ask = Callable[[Request], int | str]  # begins a request: its id


@dataclass
class Round:
    """What the clients saw."""

    seconds: float = 0.0
    n_tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token of each request

    @property
    def rate(self) -> float:
        return self.n_tokens / self.seconds


def requests(n: int, seed: str) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            tuple(draw.choices(range(5000), k=draw.randint(*PROMPTS))),
            max_tokens=draw.randint(*ANSWERS),
            sampling=GREEDY,
        )
        for _ in range(n)
    ]


def serve(ask: Ask, answers: Iterator[tuple[int | str, int, bool]], waiting: list[Request], n_clients: int) -> Round:
    """Let clients ask until all requests are answered; an answer is an id, a number of new tokens, whether it ended."""
    found, asked, going = Round(), dict[int | str, float](), 0
    begin = time.perf_counter()
    for _ in range(min(n_clients, len(waiting))):
        asked[ask(waiting.pop())] = time.perf_counter()
        going += 1
    for id, n_new, ended in answers:
        if n_new and id in asked:
            found.first.append(time.perf_counter() - asked.pop(id))
        found.n_tokens += n_new
        if ended and waiting:
            asked[ask(waiting.pop())] = time.perf_counter()
        elif ended:
            going -= 1
        if not going:
            break
    found.seconds = time.perf_counter() - begin
    return found


def heedful(name: str, device: str, n_clients: int, stack: ExitStack) -> Callable[[list[Request]], Round]:
    model = accelerate(build(name, device=device), "inference")
    engine = Engine(model, max_rows=n_clients, chunk=2048, state="paged", cache_tokens=n_clients * 512)

    def answers() -> Iterator[tuple[int | str, int, bool]]:
        while engine.busy:
            for event in engine.step():
                yield event.id, int(event.token is not None), event.result is not None

    return lambda asked: serve(engine.add, answers(), list(asked), n_clients)


def transformers(name: str, device: str, n_clients: int, stack: ExitStack) -> Callable[[list[Request]], Round]:
    from transformers import GenerationConfig

    model = hub_model(name, device=device)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=ANSWERS[1])
    manager: Any = stack.enter_context(model.continuous_batching_context_manager(generation_config=config))

    def ask(request: Request) -> str:
        return str(manager.add_request(list(request.prompt), max_new_tokens=request.max_tokens, streaming=True))

    def answers() -> Iterator[tuple[int | str, int, bool]]:
        known: dict[str, int] = {}
        for output in manager:
            if output.error:
                raise RuntimeError(output.error)
            n = len(output.generated_tokens)
            yield output.request_id, n - known.get(output.request_id, 0), output.is_finished()
            known[output.request_id] = n

    return lambda asked: serve(ask, answers(), list(asked), n_clients)


def busy_share(run: Callable[[], Round]) -> float:
    """The share of a round's time in which some kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds = run().seconds
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_time_total)
    total, last = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total / 1e6 / seconds


PROGRAMS = {"heedful": heedful, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    n = options.clients * options.requests
    with ExitStack() as stack:
        programs, found = {}, dict[str, list[Round]]()
        for name in options.only:
            try:
                programs[name] = PROGRAMS[name](options.model, options.device, options.clients, stack)
                programs[name](requests(n, "warm up"))
            except (ImportError, RuntimeError, ValueError) as problem:
                print(f"{name}: {problem}")
                programs.pop(name, None)
        for round in range(options.rounds):
            for name, run in programs.items():
                found.setdefault(name, []).append(run(requests(n, f"round {round}")))
        for name, rounds in found.items():
            first = [seconds for each in rounds for seconds in each.first]
            print(
                f"{options.model} {name:12} {options.clients} clients: {median(r.rate for r in rounds):8,.0f} tokens/s,"
                f" first token {1e3 * median(first):6.1f} ms, 95 % within {1e3 * quantiles(first, n=20)[-1]:6.1f} ms"
            )
        if "heedful" in programs and torch.device(options.device).type == "cuda":
            share = busy_share(lambda: programs["heedful"](requests(n, "profile")))
            print(f"{options.model} heedful: some kernel runs in {100 * share:.0f} % of the time")


if __name__ == "__main__":
    main()
