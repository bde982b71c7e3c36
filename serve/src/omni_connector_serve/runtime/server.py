"""A pipeline behind HTTP, from start to the end of its drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from omni_connector_core import ConfigError
from omni_connector_serve.runtime.errors import UnavailableError
from omni_connector_serve.runtime.http import build_app
from omni_connector_serve.runtime.orchestrator import Orchestrator
from omni_connector_serve.runtime.pipeline import Pipeline

__all__ = ["run_server", "serving"]

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before the stages are stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(pipeline: Pipeline) -> AsyncIterator[tuple[Orchestrator, str, _Server]]:
    """Start the stages and listen; yields orchestrator, URL and HTTP server, whose end is awaited on the way out."""
    settings = pipeline.settings
    try:
        listener = socket.create_server((settings.host, settings.port), family=_family(settings.host), backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    host, port = listener.getsockname()[:2]
    async with Orchestrator(pipeline) as orchestrator:
        config = uvicorn.Config(
            build_app(orchestrator),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(settings.drain_s),
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield orchestrator, f"http://{f'[{host}]' if ':' in host else host}:{port}", server
        finally:
            orchestrator.draining = True
            server.should_exit = True
            await task


async def run_server(pipeline: Pipeline) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end, for ``drain_s``, a second signal ends them at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    async with serving(pipeline) as (orchestrator, url, server):

        def on_signal() -> None:
            server.force_exit = stop.is_set()
            orchestrator.draining = True
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        print(f"listening on {url}", flush=True)
        starting = asyncio.create_task(_say_when_ready(orchestrator))
        await stop.wait()
        starting.cancel()
        print("stopping: no new requests, running ones may end", flush=True)
    print("stopped", flush=True)


async def _say_when_ready(orchestrator: Orchestrator) -> None:
    try:
        await orchestrator.ready()
    except UnavailableError as error:
        _log.error("%s; it is tried again, and /health says when it is there", error)
    else:
        print("ready", flush=True)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
