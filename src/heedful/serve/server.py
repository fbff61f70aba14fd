"""`heedful serve`: the server process on uvicorn. It binds its socket, loads the first model, prints where it listens,
serves, and shuts down gracefully.

SIGTERM or Ctrl-C: no new connections; running requests may finish within `drain` seconds, after which they fail; exit
code 0. A second signal exits at once.
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
from functools import partial
from types import FrameType

import uvicorn

from heedful.kernels.cpu.memory import share_arenas
from heedful.serve.app import create_app
from heedful.serve.metrics import Metrics
from heedful.serve.model_manager import ModelManager
from heedful.serve.options import Options as Options
from heedful.serve.protocol import Protocol

KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that they close them, not the server
ERROR_DELIVERY = 5.0  # seconds for the errors of unfinished requests to reach their clients


def serve(options: Options) -> int:
    """Serve until a signal; the exit code. ValueError for what cannot be served, before anything is loaded."""
    options.check_exercises()
    options.check_public()
    set_up_logging(verbose=options.verbose)
    share_arenas()
    manager = ModelManager(options.models, options, Metrics())
    listener = bind(options.host, options.port)
    if threading.current_thread() is threading.main_thread():  # only it may set signal handlers
        # Uvicorn handles them only while it runs: before and after, exit at once.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with listener:
        config = uvicorn.Config(
            create_app(manager, options),
            loop=event_loop(),
            http=partial(Protocol, max_connections=options.max_connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=round(options.drain + ERROR_DELIVERY),
        )
        Server(config, manager, options).run(sockets=[listener])
    return 0


class Server(uvicorn.Server):
    """Uvicorn's server, which loads the first model before it listens and stops the models after it."""

    def __init__(self, config: uvicorn.Config, manager: ModelManager, options: Options) -> None:
        super().__init__(config)
        self.manager, self.options = manager, options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load the first model, listen, and print the greeting."""
        if not self.options.lazy:
            await self.manager.worker(self.manager.names[0])  # a broken model fails here, not at the first request
        await super().startup(sockets)
        assert sockets is not None
        print(greeting(self.manager, self.options, sockets[0].getsockname()), flush=True)
        if self.options.open:
            open_page(page_address(self.options, sockets[0].getsockname()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, and end those that take longer than `drain`."""
        timeout = asyncio.create_task(self._stop_after_drain())
        await super().shutdown(sockets)  # waits for requests; then the application stops the manager
        timeout.cancel()

    async def _stop_after_drain(self) -> None:
        await asyncio.sleep(self.options.drain)
        await self.manager.stop()  # unfinished requests fail now

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown. Uvicorn's own handler would raise the signal again at the end: exit code not 0."""
        if self.should_exit or not self.started:  # the second signal, or nothing to finish yet
            os._exit(0 if sig == signal.SIGTERM else 128 + sig)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ValueError if the address cannot be used."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # With the protocol named asyncio sets TCP_NODELAY; without it each small response waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # on Windows it would take a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)  # now, so that clients wait while the model loads
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


def event_loop() -> uvicorn.config.LoopFactoryType:
    """uvloop where it is installed."""
    try:
        import uvloop  # noqa: F401
    except ImportError:  # there is none for Windows
        return "asyncio"
    return "uvloop"


def set_up_logging(*, verbose: bool) -> None:
    """Log errors to stderr, and with `verbose` a line per request; of uvicorn, errors only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in (
        ("heedful", logging.INFO if verbose else logging.WARNING),
        ("uvicorn", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def open_page(url: str) -> None:
    """Open the playground in a graphical browser; a text browser would take over the terminal."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(os.environ):
        return
    # In a thread, since some browsers block; if it fails, the greeting has the address.
    threading.Thread(target=lambda: webbrowser.open(url), name="browser", daemon=True).start()


def page_address(options: Options, address: tuple[str, int]) -> str:
    """Where the playground is: with the token, where there is something that asks for it."""
    url = f"http://{url_host(reachable_host(address[0]))}:{address[1]}/"
    needs_token = options.may_train or options.may_run_cells or options.may_run_answers
    return url + (f"?token={options.token}" if needs_token else "") + options.page


def reachable_host(host: str) -> str:
    """The address by which this machine reaches the server: 0.0.0.0 is only for listening."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_host(host: str) -> str:
    """A host as URLs write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def greeting(manager: ModelManager, options: Options, address: tuple[str, int]) -> str:
    """The lines at the start: what is served, where, who may use it, a curl command to try it, the page."""
    url, page = f"http://{url_host(address[0])}:{address[1]}", page_address(options, address)
    if options.page:
        return f"{page} is the page (for this machine only). Ctrl-C stops the server."
    show = f"Open in a browser: {page}"
    first = manager.names[0]
    can = manager.info(first).abilities or ("generate",)
    if "generate" in can:
        path, body = "completions", {"model": first, "prompt": "Once upon a time", "max_tokens": 50}
    elif "embed" in can:
        path, body = "embeddings", {"model": first, "input": "Once upon a time"}
    else:
        return f"Serving {', '.join(manager.names)} on {url}.\n{show}"
    key = "$HEEDFUL_API_KEY" if options.key_source == "HEEDFUL_API_KEY" else "KEY"
    header = f' -H "Authorization: Bearer {key}"' if options.api_keys else ""
    who = f"API key from {options.key_source or 'the caller'}" if options.api_keys else "for this machine only"
    return (
        f"Serving {', '.join(manager.names)} on {url} ({who}). Try: curl {url}/v1/{path}{header} "
        f"-d {shlex.quote(json.dumps(body))}\n{show}"
    )
