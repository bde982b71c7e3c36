"""The producer's connections: who is connected, what came, what is to go out. Knows consumers by name, and none of what they say."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from omni_connector_core.errors import BackendUnavailableError
from omni_connector_core.liveness import Process
from omni_connector_core.onesided.sockets import listen, process_behind, raise_if_exhausted
from omni_connector_core.onesided.wire import Wire

__all__ = ["Listener", "Peer"]

_log = logging.getLogger(__name__)

_MAX_UNSENT_NBYTES = 8 << 20
"""A consumer that leaves more than this unread is dropped."""

_GREETED_S = 2.0
"""Who connects has so long to say who it is, seconds."""

_NO_DESCRIPTORS_S = 0.1
"""For how long nobody is accepted when the process has no descriptor left, seconds."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Peer:
    """A consumer's channel.

    Attributes
    ----------
    name
        The same over every connection of the channel.
    wire
        Its connection; None while it has none.
    process
        Whose it is, when it is of this host and came over the unix socket.
    """

    name: bytes
    wire: Wire | None = None
    process: Process | None = None

    @property
    def doubtful(self) -> Process | None:
        """The process to look for, when it lost its connection: if that has ended, it makes no other."""
        return self.process if self.wire is None else None


PeerT = TypeVar("PeerT", bound=Peer)


@dataclass(slots=True, eq=False)
class _Connection(Generic[PeerT]):
    """A connection, the process that made it, and whose it is; None: it has not said so yet."""

    wire: Wire
    process: Process | None
    since_s: float
    peer: PeerT | None = None


class Listener(Generic[PeerT]):
    """Listening sockets, their connections, and how to sleep until there is news of any.

    `wait` is called by one thread; everything else by any, with the lock held.

    Parameters
    ----------
    host, port
        Where to bind; port 0 takes a free one, and so does one that is taken, with a warning.
    secret
        The shared secret, or None.
    lock
        Held around the callbacks.
    greeted
        Returns the peer of that name.
    heard
        Takes a message.
    left
        Learns that a peer has no connection any more.

    Raises
    ------
    BackendUnavailableError
        The address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes | None,
        lock: threading.RLock,
        *,
        greeted: Callable[[bytes], PeerT],
        heard: Callable[[PeerT, memoryview], None],
        left: Callable[[PeerT], None],
    ) -> None:
        self._secret = secret
        self._lock = lock
        self._greeted, self._heard, self._left = greeted, heard, left
        listeners, self.address = _bind(host, port)
        """``host:port``; what is advertised is what is bound."""
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._connections: dict[int, _Connection[PeerT]] = {}
        self._fresh: dict[int, _Connection[PeerT]] = {}
        self._accept_at_s = 0.0
        try:
            self._epoll = select.epoll()
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            for listener in listeners:
                listener.close()
            raise_if_exhausted(error)
            raise
        self._epoll.register(self._bell, select.EPOLLIN)
        self._listen()

    def _listen(self) -> None:
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)

    def ring(self) -> None:
        """End a `wait`."""
        os.eventfd_write(self._bell, 1)

    def wait(self, seconds: float | None) -> None:
        """Sleep until there is news, or for so long; take in what there is."""
        for fd, events in self._epoll.poll(seconds):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif fd in self._listeners:
                self._accept(self._listeners[fd])
            else:
                with self._lock:
                    self._serve(fd, events)

    def tend(self) -> float | None:
        """Do what is due; return the seconds until something is due next."""
        now = time.monotonic()
        due: list[float] = []
        if self._fresh:
            for fd in [fd for fd, fresh in self._fresh.items() if now - fresh.since_s > _GREETED_S]:
                self._disconnect(fd)
            due.append(_GREETED_S)
        if self._accept_at_s:
            if now >= self._accept_at_s:
                self._accept_at_s = 0.0
                self._listen()
            else:
                due.append(self._accept_at_s - now)
        return min(due, default=None)

    def send(self, peer: PeerT, body: bytes) -> bool:
        """Send a message, never blocking; one for a peer without a connection is lost. False: the peer reads nothing."""
        wire = peer.wire
        if wire is None:
            return True
        fd = wire.fileno()
        try:
            before = wire.unsent
            wire.send(body)
            if wire.unsent and not before:
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            self._disconnect(fd)
            return True
        return wire.unsent <= _MAX_UNSENT_NBYTES

    def disconnect(self, peer: PeerT) -> None:
        """End a peer's connection."""
        if peer.wire is not None:
            self._disconnect(peer.wire.fileno())

    def close_sockets(self) -> None:
        """Stop listening and end every connection; answers that were sent still arrive."""
        for fd in list(self._connections):
            self._disconnect(fd)
        for listener in self._listeners.values():
            listener.close()

    def close(self) -> None:
        """Close the rest, when nobody waits any more."""
        self._epoll.close()
        os.close(self._bell)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED and not self._accept_at_s:
                _log.warning("omni-connector cannot accept a consumer: %s", error.strerror)
                self._accept_at_s = time.monotonic() + _NO_DESCRIPTORS_S
                for fd in self._listeners:
                    self._epoll.unregister(fd)
            return  # else it left before it was accepted
        try:
            process = process_behind(accepted)
            wire = Wire(accepted, self._secret)
            wire.greet()
        except OSError:
            accepted.close()
            return
        fd = wire.fileno()
        with self._lock:
            self._connections[fd] = self._fresh[fd] = _Connection(wire, process, time.monotonic())
            self._epoll.register(fd, select.EPOLLIN)

    def _serve(self, fd: int, events: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:  # closed by another thread, just now
            return
        wire = connection.wire
        try:
            if events & select.EPOLLOUT:
                wire.flush()
                if not wire.unsent:
                    self._epoll.modify(fd, select.EPOLLIN)
            peer = connection.peer or self._greet(connection)
            if peer is None:
                return
            raw = wire.receive()
            while raw is not None:
                self._heard(peer, raw)
                raw = wire.receive(read=False)  # more comes after the others had their turn
        except OSError as error:
            _log.debug("control channel: %s", error)
            self._disconnect(fd)

    def _greet(self, connection: _Connection[PeerT]) -> PeerT | None:
        wire = connection.wire
        name = wire.accept()
        if name is None:
            return None
        del self._fresh[wire.fileno()]
        peer = connection.peer = self._greeted(name)
        old, peer.wire, peer.process = peer.wire, wire, connection.process
        if old is not None:  # the peer knows before us that it is lost
            self._disconnect(old.fileno())
        return peer

    def _disconnect(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        self._fresh.pop(fd, None)
        connection.wire.close()  # which takes it out of the epoll set
        peer = connection.peer
        if peer is not None and peer.wire is connection.wire:
            peer.wire = None
            self._left(peer)


def _bind(host: str, port: int) -> tuple[list[socket.socket], str]:
    try:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port:
                raise
            _log.warning("port %d is taken: omni-connector takes a free one, which only this host finds", port)
            return listen(host, 0)
    except OSError as error:
        raise_if_exhausted(error)
        raise BackendUnavailableError(f"cannot listen on {host}: {error}", hint="Check the option host") from error
