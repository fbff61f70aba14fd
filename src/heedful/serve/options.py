"""The options of the server: those of `heedful serve`, by the same names."""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import socket
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.kernels.packed import Precision
    from heedful.nn.int8_cache import CacheType


@dataclass(frozen=True)
class Options:
    """How to serve; validated on construction."""

    models: tuple[str, ...] = ()  # none: all that ship
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # not for logs
    key_source: str = ""  # where the key came from, for the line at the start
    allow_origins: tuple[str, ...] = ()  # pages that may call this server, as "https://example.org"; "*" for all
    device: str = "auto"
    quantize: Precision | None = None
    kv_cache: CacheType | None = None  # how keys and values are stored; None: as they are computed
    tensor_parallel: int = 1  # processes that share the one model (heedful.kernels.tensor_parallel)
    context_length: int | None = None  # most tokens of a prompt and its answer; None: what the models' files say
    memory: float | None = None  # GB that loaded models may take together; None: 80 % of what is free
    max_rows: int = 64  # answers decoded at once (the batch size), per model
    queue: int = 256  # requests that may wait, per model
    cache_tokens: int | None = None  # capacity of the KV cache of a model; None: by the memory there is
    chunk: int = 1024  # prompt tokens per step (chunked prefill)
    step_time: float = 0.5  # seconds of prefill per step; less where answers are being written
    max_tokens_per_request: int = 65_536  # prompts x answers x max_tokens of one request
    max_body: int = 8 * 2**20  # bytes
    max_connections: int = 1000  # open at once, idle ones too
    drain: float = 30.0  # seconds that running requests have to finish when the server is stopped
    runs: str = "runs"  # the folder whose training runs the playground shows
    allow_training: bool = False  # train from the playground even where other machines can reach this server
    exercises: bool | None = None  # run answers to exercises, which are Python code; None: on this machine alone
    # What running code and training ask for: part of the address that the server prints (playground/access.py).
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    lazy: bool = False  # load the first model on first use, not at the start
    verbose: bool = False  # a line per request
    open: bool = False  # open the playground in a browser
    page: str = ""  # where in the playground, as "#/learn?lesson=bert"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port is {self.port}: it must be from 0 (any free one) to 65535")
        sizes = ("cache_tokens", "context_length", "max_tokens_per_request", "max_body", "max_connections")
        for name in ("max_rows", "queue", "chunk", *sizes):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        if self.tensor_parallel > 1 and (len(self.models) != 1 or self.quantize is not None or self.lazy):
            raise ValueError("with --tensor-parallel name the one model to share, and neither --quantize nor --lazy")
        if self.memory is not None and not (math.isfinite(self.memory) and self.memory > 0):
            raise ValueError(f"memory is {self.memory}: it must be above 0 (in GB)")
        if not (math.isfinite(self.step_time) and self.step_time > 0):
            raise ValueError(f"step_time is {self.step_time}: it must be above 0 (in seconds)")
        if not (math.isfinite(self.drain) and self.drain >= 0):
            raise ValueError(f"drain is {self.drain}: it must be 0 or more (in seconds)")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must be made of printable ASCII characters without spaces")
        if len(self.token) < 16 or not re.fullmatch(r"[A-Za-z0-9._~-]*", self.token):
            raise ValueError("the token must be 16 or more characters of A-Z, a-z, 0-9, '.', '_', '~' and '-'")
        for origin in self.allow_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ValueError(f"{origin!r} is not an origin: give it as https://example.org, without a path, or *")

    @property
    def may_train(self) -> bool:
        """Whether the playground may train, and serve the runs of its folder: on this machine alone, or if allowed."""
        return self.tensor_parallel == 1 and (self.allow_training or is_local_only(self.host))

    @property
    def may_run_cells(self) -> bool:
        """Whether lessons' own cells may run: on this machine alone, or where answers may."""
        return is_local_only(self.host) or bool(self.exercises)

    @property
    def may_run_answers(self) -> bool:
        """Whether answers to exercises may run: on this machine alone by default."""
        return is_local_only(self.host) if self.exercises is None else self.exercises

    def check_exercises(self) -> None:
        """ValueError where answers to exercises would be run for anybody."""
        if self.exercises and not self.api_keys and not is_local_only(self.host):
            raise ValueError(
                f"--exercises runs Python code that clients send, and others can reach {self.host}: set an API key "
                "(HEEDFUL_API_KEY or --api-key-file), or stay with --host 127.0.0.1"
            )

    def check_public(self) -> None:
        """ValueError for an address that other machines can reach, unless there is an API key."""
        if not self.api_keys and not is_local_only(self.host):
            raise ValueError(
                f"others can reach {self.host}: set an API key (HEEDFUL_API_KEY or --api-key-file) to serve there, "
                "or stay with --host 127.0.0.1"
            )


@cache
def is_local_only(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"there is no address called {host!r}: give one of this machine's, as 127.0.0.1") from None
    return bool(host) and all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)
