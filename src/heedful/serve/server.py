"""`heedful serve`: the process. It binds, loads, says one line, answers, and stops without cutting anyone short.

SIGTERM or Ctrl-C: no new connections; running requests finish, for `drain` seconds at most, after which they end with
an error; exit code 0. A second one ends at once. Uvicorn does the rest.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import webbrowser
from types import FrameType

import uvicorn

from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options as Options
from heedful.serve.protocol import Protocol

KEEP_ALIVE = 75  # seconds; longer than clients keep their connections, so that it is they who close them
LAST_WORDS = 5.0  # seconds for the errors that end requests to reach their clients


def serve(options: Options) -> int:
    """Serve until told to stop; the exit code. ValueError for what cannot be served, before anything is loaded."""
    options.check_public()
    set_up_logging(verbose=options.verbose)
    metrics = Metrics()
    manager = ModelManager(options.models, options, metrics)
    listener = bind(options.host, options.port)
    if threading.current_thread() is threading.main_thread():  # no other may ask for signals
        # Uvicorn hears them only while it runs: before and after, the end is as quick and as well.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with listener:
        config = uvicorn.Config(
            create_app(manager, options, metrics),
            loop=loop_of_this_system(),
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=round(options.drain + LAST_WORDS),
        )
        Server(config, manager, options).run(sockets=[listener])
    return 0


class Server(uvicorn.Server):
    """Uvicorn's server, with our beginning and our end."""

    def __init__(self, config: uvicorn.Config, manager: ModelManager, options: Options) -> None:
        super().__init__(config)
        self.manager, self.options = manager, options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.options.lazy:
            await self.manager.worker(self.manager.names[0])  # mistakes show now, not with the first request
        await super().startup(sockets)
        assert sockets is not None
        print(greeting(self.manager, self.options, sockets[0].getsockname()), flush=True)
        if self.options.open:
            open_page(sockets[0].getsockname())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)  # waits for requests; the application then stops the manager
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self.options.drain)
        await self.manager.stop()  # whoever still waits for an answer gets the error now

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn would raise the signal again at the end, and the exit code would not be 0."""
        if self.should_exit or not self.started:  # the second one, or nothing to finish yet
            os._exit(0 if sig == signal.SIGTERM else 128 + sig)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address. ValueError if it cannot be had."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Named, so that asyncio sends small answers at once (TCP_NODELAY): else each waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would take the port from whoever has it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)  # so that nobody else can have it; who comes while the model loads waits
    except OSError as problem:
        listener.close()
        if problem.errno == errno.EADDRINUSE:
            why = f"port {port} is in use: choose another with --port, or --port 0 for a free one"
        elif problem.errno == errno.EACCES:
            why = f"port {port} needs rights you do not have: choose one above 1023 with --port"
        else:
            why = f"{host} port {port} cannot be used: {problem.strerror}"
        raise ValueError(why) from None
    return listener


def loop_of_this_system() -> uvicorn.config.LoopFactoryType:
    try:
        import uvloop  # noqa: F401
    except ImportError:  # there is none for Windows
        return "asyncio"
    return "uvloop"


def set_up_logging(*, verbose: bool) -> None:
    """Errors of ours, and with `verbose` a line per request, on stderr; of uvicorn only what went wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in (
        ("heedful", logging.INFO if verbose else logging.WARNING),
        ("uvicorn", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def open_page(address: tuple[str, int]) -> None:
    """Show the playground, where there is a browser with a window: one in the terminal would take it over."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(os.environ):
        return
    url = f"http://{name_of(own_host(address[0]))}:{address[1]}/"
    # In a thread, since some browsers are waited for; it may fail, and the line above says where to go.
    threading.Thread(target=lambda: webbrowser.open(url), name="browser", daemon=True).start()


def own_host(host: str) -> str:
    """The address to reach a server by from here: nobody is at 0.0.0.0."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def name_of(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def greeting(manager: ModelManager, options: Options, address: tuple[str, int]) -> str:
    """The one line at the start: what is served, where, who may ask, and how to try it."""
    url = f"http://{name_of(address[0])}:{address[1]}"
    first = manager.names[0]
    can = manager.info(first).abilities or ("generate",)
    if "generate" in can:
        path, body = "completions", {"model": first, "prompt": "Once upon a time", "max_tokens": 50}
    elif "embed" in can:
        path, body = "embeddings", {"model": first, "input": "Once upon a time"}
    else:
        return f"Serving {', '.join(manager.names)} on {url}: open it in a browser."
    key = "$HEEDFUL_API_KEY" if options.key_source == "HEEDFUL_API_KEY" else "KEY"
    header = f' -H "Authorization: Bearer {key}"' if options.api_keys else ""
    who = f"API key from {options.key_source or 'the caller'}" if options.api_keys else "for this machine only"
    return (
        f"Serving {', '.join(manager.names)} on {url} ({who}). Open it in a browser, or "
        f"try: curl {url}/v1/{path}{header} -d {shlex.quote(json.dumps(body))}"
    )
