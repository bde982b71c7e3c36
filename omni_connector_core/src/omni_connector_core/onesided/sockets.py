"""Addresses, listening and connecting sockets, and the shared secret of the control channel.

Who listens on a loopback address also listens on a unix socket named after it, which consumers try first: a message then
costs 4 to 14 us to send where TCP takes 21 to 24, and arrives 10 us sooner (measured, 2 cores). It lies in the kernel's abstract
namespace, so there is no file to leave behind, and it reaches no further than loopback does. One of another user's is not used.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
import stat
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omni_connector_core.credentials import credentials_of
from omni_connector_core.errors import BackendUnavailableError, OptionError
from omni_connector_core.liveness import Process, process_of

__all__ = ["Connecting", "is_loopback", "listen", "process_behind", "raise_if_exhausted", "read_secret"]

_MIN_SECRET_NBYTES = 16
_BACKLOG = 1024
_LOOK_S = 0.01


def raise_if_exhausted(error: OSError) -> None:
    """Raise the error to show when it says that this process, or the host, has no descriptor left.

    Raises
    ------
    BackendUnavailableError
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise BackendUnavailableError(
            f"no file descriptor is left: {error.strerror}", hint="Raise the limit (ulimit -n), or find what leaks them"
        ) from error


def listen(host: str, port: int) -> tuple[list[socket.socket], str]:
    """Listen on an address; port 0 takes a free one.

    Returns
    -------
    list of socket, str
        And its ``host:port``, as a consumer is to be told.

    Raises
    ------
    OSError
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listeners = [socket.create_server(address[:2], family=family, backlog=_BACKLOG)]
    bound = listeners[0].getsockname()
    shown = f"[{bound[0]}]:{bound[1]}" if family == socket.AF_INET6 else f"{bound[0]}:{bound[1]}"
    if is_loopback(bound[0]):
        near = socket.socket(socket.AF_UNIX)
        try:
            near.bind(_near(shown))
            near.listen(_BACKLOG)
            listeners.append(near)
        except OSError:  # somebody has the name: over TCP, then
            near.close()
    for listener in listeners:
        listener.setblocking(False)
    return listeners, shown


def _near(address: str) -> str:
    return f"\0omni-connector:{address}"


def _connected_near(address: str) -> socket.socket | None:
    """Connect to a listener of this user on this host, which takes no time."""
    near = socket.socket(socket.AF_UNIX)
    near.setblocking(False)
    if near.connect_ex(_near(address)) == 0 and credentials_of(near).uid == os.getuid():
        return near
    near.close()
    return None


def process_behind(connection: socket.socket) -> Process | None:
    """Return the process that connected, where the kernel knows it and this process could see it end."""
    if connection.family != socket.AF_UNIX:
        return None
    pid = credentials_of(connection).pid
    return process_of(pid) if pid else None


class Connecting:
    """A connection on its way; nothing here blocks, not even to look up a name.

    Parameters
    ----------
    address
        ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        near = is_loopback(address.rpartition(":")[0])
        self._near = _connected_near(address) if near else None
        self._found = _look_up(address)

    def connected(self) -> socket.socket | None:
        """Return the socket, once; None while it is not connected.

        Raises
        ------
        OSError
            It cannot be.
        """
        if self._near is not None:
            near, self._near = self._near, None
            return near
        if self._socket is None:
            if not self._found.done():
                return None
            family, address = self._found.result()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            code = self._socket.connect_ex(address)
        else:
            code = self._socket.connect_ex(self._socket_address())
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return None
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        connection = self._socket
        if connection.getsockname() == connection.getpeername():  # a free port of this host may connect to itself
            raise OSError(errno.ECONNREFUSED, "nobody listens")
        self._socket = None
        return connection

    def _socket_address(self) -> Any:
        return self._found.result()[1]

    def fileno(self) -> int:
        """Return the descriptor that becomes writable when there is news; -1: none yet."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def due_s(self) -> float:
        """When to look though the descriptor brought no news (monotonic clock)."""
        return math.inf if self._socket is not None else time.monotonic() + _LOOK_S

    def close(self) -> None:
        """Give it up."""
        for connection in (self._near, self._socket):
            if connection is not None:
                connection.close()


def _look_up(address: str) -> Future[tuple[int, Any]]:
    """Find the family and the socket address of a ``host:port``; at once, unless it is a name."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    future: Future[tuple[int, Any]] = Future()

    def ask(flags: int) -> None:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
        future.set_result((family, found))

    def ask_name() -> None:
        try:
            ask(0)
        except OSError as error:
            future.set_exception(error)

    try:
        ask(socket.AI_NUMERICHOST)
    except OSError:
        threading.Thread(target=ask_name, name="omni-look-up", daemon=True).start()
    return future


def read_secret(path: str | None) -> bytes | None:
    """Read the shared secret from a file that only its owner may read.

    Raises
    ------
    OptionError
        Missing, too short, or readable by others.
    """
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
        mode = os.stat(path).st_mode
    except OSError as error:
        raise OptionError(f"secret_file: {error}", hint="Name a file that this user can read") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(f"secret_file {path} can be read by others", hint=f"chmod 600 {path}")
    if len(secret) < _MIN_SECRET_NBYTES:
        raise OptionError(
            f"secret_file {path} holds fewer than {_MIN_SECRET_NBYTES} bytes",
            hint="openssl rand -hex 32 makes a good one",
        )
    return secret


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this host alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
