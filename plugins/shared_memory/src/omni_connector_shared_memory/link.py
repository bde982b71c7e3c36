"""The consumer's side of one producer: its memory, mapped, and the claims that this process has on parts of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
from functools import lru_cache
from typing import Any

from omni_connector_core.errors import (
    BackendUnavailableError,
    CapacityError,
    IncompatibleMetadataError,
    OmniConnectorError,
)
from omni_connector_core.lease import watch
from omni_connector_core.transport import Memory
from omni_connector_shared_memory import protocol
from omni_connector_shared_memory.board import ANSWERED, ASKED, MARKS, RELEASED, TAKEN, WANTED, open_board
from omni_connector_shared_memory.channel import Channel, ChannelEnd
from omni_connector_shared_memory.mapping import map_aligned
from omni_connector_shared_memory.meeting import Address

__all__ = ["Link"]

PRIVATE_COPY_NBYTES = 1 << 20
"""Up to this size a payload with several readers is copied; a private mapping costs more than that."""


@lru_cache(maxsize=256)
def _array(nbytes: int) -> Any:
    """Type of a ctypes array; making one costs microseconds, and frames of a stream are of one size."""
    return ctypes.c_char * nbytes


class Link:
    """A connection to one producer.

    Attributes
    ----------
    address
        Who it is.
    refusal
        Why nothing can be had from it, if that is so.
    """

    def __init__(self, address: Address, sock: socket.socket, epoll: select.epoll) -> None:
        self.address = address
        self.refusal: OmniConnectorError | None = None
        self.said_goodbye = False
        self.channel = Channel(sock, epoll)
        self.fd = self.channel.fd
        self._pool: Any = None
        self._pool_fd = -1
        self._board: mmap.mmap | None = None
        self._heard = 0
        self._held: dict[int, int] = {}
        self._retired = False

    @property
    def held_nbytes(self) -> int:
        """Bytes of the producer's memory that views in this process keep."""
        return sum(tuple(self._held.values()))

    @property
    def answered(self) -> int:
        """Changes with everything that the producer sends, after its first word."""
        return self._board[ANSWERED] if self._board is not None else 0

    @property
    def has_news(self) -> bool:
        """Whether something has come since it was last received."""
        return self.answered != self._heard

    def receive(self) -> protocol.ToConsumer | None:
        """Return the next message; None when there is none now.

        Raises
        ------
        ChannelEnd
            The producer is gone.
        """
        if self._pool is None:
            return self._receive_welcome()
        self._heard = self.answered
        data = self.channel.receive()
        return None if data is None else protocol.decode_at_consumer(data)

    def accept(self, found: protocol.Find) -> bool:
        """Begin to use a claim, before touching its memory; False if the producer has taken it back."""
        board = self._board
        assert board is not None
        board[found.ticket] = TAKEN
        if board[MARKS + found.ticket]:
            self.give_back(found)
            return False
        return True

    def take(self, found: protocol.Find) -> Memory:
        """Return the memory of a claim that was accepted; it is released when the last view of it is gone.

        Raises
        ------
        CapacityError
            This process may map no more; the payload stays for whoever asks next.
        """
        array = _array(found.nbytes)
        if not found.shared:
            memory = array.from_buffer(self._pool, found.offset)
        elif found.nbytes <= PRIVATE_COPY_NBYTES or self._pool_fd < 0:
            memory = array.from_buffer_copy(self._pool, found.offset)
            self._release(found.ticket)
            return memory
        else:
            memory = array.from_buffer(*self._map_private(found))
        self._held[found.ticket] = found.nbytes
        watch(memory, self._ended, found.ticket)
        return memory

    def _map_private(self, found: protocol.Find) -> tuple[mmap.mmap, int]:
        """Map the pages of a payload so that writing to them changes them for this mapping alone."""
        skipped = found.offset % mmap.ALLOCATIONGRANULARITY
        try:
            private = mmap.mmap(
                self._pool_fd, found.nbytes + skipped, flags=mmap.MAP_PRIVATE, offset=found.offset - skipped
            )
        except OSError as error:
            self.give_back(found)
            raise CapacityError(f"this process may map no more memory: {error.strerror}") from error
        return private, skipped

    def peek(self, found: protocol.Find) -> Any:
        """Look at the memory of a claim that was accepted; the view must not outlive the claim."""
        return _array(found.nbytes).from_buffer(self._pool, found.offset)

    def finish(self, found: protocol.Find) -> None:
        """Use a claim up whose bytes were copied out."""
        self._release(found.ticket)

    def give_back(self, found: protocol.Find) -> None:
        """Leave a payload to whoever asks next."""
        self.channel.send(protocol.Unread([found.ticket]))

    def retire(self) -> None:
        """Take no more payloads; the connection lives on, unattended, for as long as views of its memory do."""
        self.channel.send(protocol.Leave())
        self._retired = True
        if not self._held:
            self.close()

    def close(self) -> None:
        """Close the connection; memory that is mapped stays valid for those who have views of it."""
        self.channel.close()
        fd, self._pool_fd = self._pool_fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """Close the files in a forked child."""
        self.channel.abandon()
        if self._pool_fd >= 0:
            os.close(self._pool_fd)
            self._pool_fd = -1

    def _ended(self, ticket: int) -> None:
        # runs as a finalizer, in any thread at any point: no locks
        del self._held[ticket]
        self._release(ticket)
        if self._retired and not self._held:
            self.close()

    def _release(self, ticket: int) -> None:
        board = self._board
        assert board is not None
        board[ticket] = RELEASED
        if board[WANTED]:
            self.channel.nudge(protocol.Released())

    def _receive_welcome(self) -> protocol.ToConsumer | None:
        received = self.channel.receive_files(2)
        if received is None:
            return None
        data, fds = received
        try:
            message = protocol.decode_at_consumer(data)
            match message:
                case protocol.Welcome(version=protocol.VERSION) if len(fds) == 2:
                    self._pool = map_aligned(fds[0], message.capacity_nbytes)
                    self._pool_fd = os.dup(fds[0])
                    self._board = open_board(fds[1])
                    self.channel.count_in(self._board, ASKED)
                    return message
                case protocol.Welcome(version=version):
                    self.refusal = IncompatibleMetadataError(
                        f"{self.address} speaks version {version} of the protocol, this process {protocol.VERSION}",
                        hint="Install the same omni-connector-shared-memory on both sides of the edge",
                    )
                case protocol.Refused(reason, hint):
                    self.refusal = BackendUnavailableError(f"{self.address} refuses this process: {reason}", hint=hint)
        except OSError as error:
            self.refusal = BackendUnavailableError(
                f"the memory of {self.address} cannot be mapped: {error.strerror}",
                hint="Lower capacity_bytes, or raise the limit on address space or open files",
            )
        finally:
            for fd in fds:
                os.close(fd)
        raise ChannelEnd("no welcome")
