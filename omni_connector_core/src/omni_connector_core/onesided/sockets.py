"""The process' ZMQ context, and authentication with a shared secret.

With a secret, every control connection is CURVE: the server's key pair is derived from the secret and its public half is never
sent, so completing the handshake proves, to both sides, that the other one knows the secret. Control messages are then also
encrypted; payloads, which the engine moves, are not.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
import threading
from pathlib import Path

import zmq
from zmq.utils import z85

from omni_connector_core.errors import OptionError
from omni_connector_core.onesided.messages import MAX_MESSAGE_NBYTES

__all__ = ["context", "is_loopback", "new_socket", "read_secret"]

_MIN_SECRET_NBYTES = 16

_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_lock = threading.Lock()


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of this process; a forked child gets its own."""
    pid = os.getpid()
    found = _contexts.get(pid)
    if found is None:
        with _lock:
            found = _contexts.setdefault(pid, zmq.Context())
    return found


def new_socket(kind: int, address: str, secret: bytes | None) -> zmq.Socket[bytes]:
    """Make a socket of the control channel: bounded messages and queues, no linger, CURVE when there is a secret."""
    socket = context().socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_NBYTES
    socket.handshake_ivl = 2000  # ms: who connects and says nothing is dropped
    socket.ipv6 = address.startswith("[")
    socket.tcp_keepalive = 1
    if secret is not None:
        private, public = _key_pair(secret)
        if kind == zmq.ROUTER:
            socket.curve_secretkey, socket.curve_publickey, socket.curve_server = private, public, True
        else:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = public
    return socket


def _key_pair(secret: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hmac.digest(b"omni-connector control server", secret, hashlib.sha256))
    return private, zmq.curve_public(private)


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
