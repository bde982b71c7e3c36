"""The control servers of this process: one for each address, shared by its connectors and ended by the last of them."""

from __future__ import annotations

import os
import threading

from omni_connector_core.onesided.server import ControlServer

__all__ = ["close_server", "open_server"]

_servers: dict[tuple[int, str, int, bytes | None], tuple[ControlServer, int]] = {}
_servers_lock = threading.Lock()


def open_server(host: str, port: int, secret: bytes | None) -> ControlServer:
    """Return this process' server at an address, started for its first connector; pair with `close_server`.

    Raises
    ------
    BackendUnavailableError
        The address cannot be bound.
    """
    place = (os.getpid(), host, port, secret)
    with _servers_lock:
        server, users = _servers.get(place) or (ControlServer(host, port, secret), 0)
        _servers[place] = (server, users + 1)
    return server


def close_server(server: ControlServer) -> None:
    """Give a server back; the last connector's ends it."""
    with _servers_lock:
        place, users = next((place, users) for place, (known, users) in _servers.items() if known is server)
        if users > 1:
            _servers[place] = (server, users - 1)
            return
        del _servers[place]
    server.close()
