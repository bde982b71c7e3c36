"""The producer's only thread: it admits consumers, answers those that ask late, and notices those that die.

A thread that puts answers what was asked so far itself (`attend`): it runs already, whereas the server's thread would have to
wait until it lets go of the interpreter, which in a busy process may take milliseconds.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from omni_connector_core.claim import Claim
from omni_connector_core.errors import OmniConnectorError
from omni_connector_core.ledger import Ledger
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.channel import Channel, ChannelEnd
from omni_connector_shared_memory.connection import Connection, Slot
from omni_connector_shared_memory.leader import LONGEST_PAUSE_S
from omni_connector_shared_memory.pool import Pool

__all__ = ["Server"]

logger = logging.getLogger(__name__)

ADMIT_AGAIN_S = 0.05
"""After how long a consumer that could not be let in, for want of a file descriptor, is tried again."""
MARK_S = 1e-3
"""How long a mark may take to become visible to another CPU: far longer than it does."""


class Server:
    """Serves one producer's consumers from a thread of its own, which sleeps while nothing happens.

    Parameters
    ----------
    listener
        The socket to which consumers connect.
    ledger, pool
        The producer's.
    """

    def __init__(self, listener: socket.socket, ledger: Ledger[Slot], pool: Pool) -> None:
        self.connections: tuple[Connection, ...] = ()
        self._listener = listener
        self._ledger = ledger
        self._pool = pool
        self._attending = threading.Lock()
        self._by_fd: dict[int, Connection] = {}
        self._wanting = False
        self._closing = False
        self._wakes_at_s = math.inf
        self._wake_lock = threading.Lock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="omni-connector-shared-memory", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def wake_by(self, at_s: float) -> None:
        """Make sure that expiries are looked at by a point in time (monotonic clock)."""
        if at_s < self._wakes_at_s:
            self._wakes_at_s = at_s
            self._wake_up()

    def attend(self) -> None:
        """Answer what consumers have asked by now, in this thread; no system call when they have not."""
        if any(connection.asked for connection in self.connections) and self._attending.acquire(blocking=False):
            try:
                for fd, connection in tuple(self._by_fd.items()):
                    if connection.asked:
                        self._serve_one(fd, connection, select.EPOLLIN)
            finally:
                self._attending.release()

    def reclaim(self) -> None:
        """End all claims that consumers released."""
        for connection in self.connections:
            connection.reclaim()

    def want(self, wanted: bool) -> None:
        """Ask all consumers, also those to come, to tell of the next release; or no longer."""
        self._wanting = wanted
        for connection in self.connections:
            connection.want(wanted)

    def recall(self, which: Callable[[Claim[Slot]], bool]) -> int:
        """Take back payloads that were promised to consumers which have not taken them yet.

        They are unread again; but nobody's any more, if the ledger was told before that they have ended or were overwritten.

        Returns
        -------
        int
            How many payloads that was, without those that the ledger dropped, and counted, itself.
        """
        marked = [(connection, claims) for connection in self.connections if (claims := connection.mark(which))]
        if not marked:
            return 0
        time.sleep(MARK_S)
        recalled = [claim for connection, claims in marked for claim in connection.recall(claims)]
        for claim in recalled:
            self._ledger.release(claim.number, unread=True)
        return len({claim.generation for claim in recalled if not claim.entry.dropped})

    def cleanup(self, request_id: str) -> int:
        """End a request; how many unread payloads that discarded."""
        count = self._ledger.cleanup(request_id)
        return count + self.recall(lambda claim: claim.key.request_id == request_id)

    def close(self) -> None:
        """Say goodbye to all consumers and end the thread."""
        self._closing = True
        self._wake_up()
        self._thread.join()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: close the files, so that only the parent keeps them open."""
        for connection in self.connections:
            connection.abandon()
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._serve()
        finally:  # whatever ends the thread, consumers learn that nobody answers any more
            with self._attending:
                self._closing = True
                self._listener.close()
                for connection in self.connections:
                    connection.channel.send(protocol.Bye())
                    connection.close()
                self.connections = ()
                self._epoll.close()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._wakes_at_s:
            # before the sweep, so that a put during it sees that the thread must be woken for its payload
            self._wakes_at_s = math.inf
            self.recall(lambda claim: claim.expires_s <= now_s)
            next_s = self._ledger.sweep()
            expiries = [connection.expires_s() for connection in self.connections]
            expiries.append(None if next_s is None else now_s + next_s)
            self._wakes_at_s = min([self._wakes_at_s, *(at_s for at_s in expiries if at_s is not None)])
        pause_s = min(max(self._wakes_at_s - now_s, 0.0), LONGEST_PAUSE_S)
        events = self._epoll.poll(None if self._wakes_at_s == math.inf else pause_s)
        with self._attending:
            self._handle(events)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        """Do what is to be done; another thread may have done it already."""
        for fd, event in events:
            connection = self._by_fd.get(fd)
            if connection is not None:
                self._serve_one(fd, connection, event)
            elif fd == self._wake:
                os.eventfd_read(fd)
            elif fd == self._listener.fileno():
                self._admit()

    def _serve_one(self, fd: int, connection: Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                connection.channel.flush()
            if events & ~select.EPOLLOUT:
                connection.serve()
        except ChannelEnd:
            self._drop(fd)
        except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
            logger.warning("a consumer is disconnected, for it sent what is no message of ours: %s", error)
            self._drop(fd)

    def _admit(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("a consumer could not be admitted: %s", error)
            time.sleep(ADMIT_AGAIN_S)  # it stays in line, and so the listener stays readable
            return
        channel = Channel(sock, self._epoll)
        if (uid := channel.peer_uid()) != os.getuid():
            reason = f"permission denied: the producer runs as user {os.getuid()}, this process as user {uid}"
            self._refuse(channel, reason, "Run both stages as one user")
            return
        try:
            connection = Connection(channel, self._ledger, self.cleanup)
        except OmniConnectorError as error:
            logger.warning("a consumer could not be admitted: %s", error)
            self._refuse(channel, error.message, "Give the producer more memory or a higher limit on open files")
            return
        try:
            connection.welcome(self._pool)
        except ChannelEnd:
            connection.close()
            return
        self._by_fd[channel.fd] = connection
        self.connections = tuple(self._by_fd.values())
        connection.want(self._wanting)

    def _refuse(self, channel: Channel, reason: str, hint: str) -> None:
        channel.send(protocol.Refused(reason, hint))
        channel.close()

    def _drop(self, fd: int) -> None:
        connection = self._by_fd.pop(fd)
        self.connections = tuple(self._by_fd.values())
        connection.end()
        self._ledger.notify()
