"""Who is at the other end of a unix socket, as the kernel saw it connect (unix(7), SO_PEERCRED)."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

__all__ = ["Credentials", "credentials_of"]

_FIELDS = struct.Struct("3i")


class Credentials(NamedTuple):
    """A process, and its user and group; ``pid`` is 0 for one of a namespace that this process cannot see."""

    pid: int
    uid: int
    gid: int


def credentials_of(connection: socket.socket) -> Credentials:
    """Ask the kernel; raises OSError when the socket is none of unix."""
    return Credentials(*_FIELDS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FIELDS.size)))
