"""One end of a connection: whole messages over a SOCK_SEQPACKET unix socket, never blocking.

What the kernel does not take at once waits in an outbox, which the owner of the epoll object sends on when the socket has room.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

from omni_connector_core.credentials import credentials_of
from omni_connector_core.nonblocking import NonblockingSocket
from omni_connector_shared_memory.protocol import MAX_NBYTES, ToConsumer, ToProducer, encode

__all__ = ["Channel", "ChannelEnd"]

_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class ChannelEnd(Exception):  # noqa: N818 - an end, not necessarily an error
    """The peer is gone."""


class Channel:
    """A connected socket. `send` may be called from any thread; `receive` by one at a time.

    Parameters
    ----------
    sock
        Connected; belongs to the channel from now on.
    epoll
        In which the channel registers itself.
    """

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        self._socket = NonblockingSocket(sock)
        self._memory = ctypes.create_string_buffer(MAX_NBYTES)
        self._received = memoryview(self._memory).cast("B")
        self._epoll = epoll
        self._outbox: deque[bytes] = deque()
        self._outbox_lock = threading.RLock()  # a finalizer that closes the channel may run while it is held
        self._count: tuple[mmap.mmap, int] | None = None
        self.fd = sock.fileno()
        epoll.register(self.fd, select.EPOLLIN)

    def peer_uid(self) -> int:
        """User of the process at the other end, as the kernel saw it connect."""
        return credentials_of(self._socket.sock).uid

    def count_in(self, memory: mmap.mmap, at: int) -> None:
        """Count from now on in a byte of memory, which the peer can see, what has been sent."""
        self._count = (memory, at)

    def send(self, message: ToConsumer | ToProducer) -> None:
        """Send a message, now or as soon as the peer has room; one system call."""
        data = encode(message)
        if not self._outbox and self._sent(data):
            return
        with self._outbox_lock:
            self._outbox.append(data)
            if self.fd >= 0:
                self._epoll.modify(self.fd, select.EPOLLIN | select.EPOLLOUT)

    def send_files(self, message: ToConsumer, fds: Sequence[int]) -> None:
        """Send a message with open files; only as the first message of a channel, which always has room.

        Raises
        ------
        ChannelEnd
            The peer is gone.
        """
        try:
            self._socket.sock.sendmsg(
                [encode(message)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], _SEND
            )
        except OSError as error:
            raise ChannelEnd(str(error)) from error

    def nudge(self, message: ToProducer) -> None:
        """Send a message if that is possible at once; takes no lock, so that a finalizer may call it."""
        self._sent(encode(message))  # without room now: the producer looks at the board by itself, only later

    def flush(self) -> None:
        """Send on what waits in the outbox; called when the socket has room."""
        with self._outbox_lock:
            while self._outbox:
                if not self._sent(self._outbox[0]):
                    return
                self._outbox.popleft()
            if self.fd >= 0:
                self._epoll.modify(self.fd, select.EPOLLIN)

    def receive(self) -> memoryview | None:
        """Return the next message, valid until the one after it; None when there is none now; one system call.

        Raises
        ------
        ChannelEnd
            The peer is gone and everything that it sent was received.
        """
        try:
            nbytes = self._socket.receive_into(self._memory)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelEnd(str(error)) from error
        if not nbytes:
            raise ChannelEnd("the connection was closed")
        return self._received[:nbytes]

    def receive_files(self, count: int) -> tuple[bytes, list[int]] | None:
        """Like `receive`, with the files that came with the message."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket.sock, MAX_NBYTES, count, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelEnd(str(error)) from error
        if not data or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise ChannelEnd("too many open files" if flags & socket.MSG_CTRUNC else "the connection was closed")
        return data, fds

    def close(self) -> None:
        """Close the socket, which also takes it out of the epoll object."""
        with self._outbox_lock:
            self.fd = -1
        self._socket.close()

    def _sent(self, data: bytes) -> bool:
        """Send if there is room; if the peer is gone, whoever receives will see it."""
        try:
            self._socket.send(data)
            if self._count is not None:
                memory, at = self._count
                memory[at] = (memory[at] + 1) & 255
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # the memory was closed with the socket
            return True
        return True

    def abandon(self) -> None:
        """Close the socket in a forked child, taking no lock; the parent's stays connected."""
        self._socket.close()
