"""What became of each claim, in a page that producer and consumer share: releasing memory costs no system call.

When the producer hands a payload to a consumer it issues a ticket, the index of a byte on that consumer's board. Only the
consumer writes the byte while the ticket is out: taken, then released. The producer looks when it wants memory. When
the consumer dies the bytes still say which payloads it never saw.

The producer may recall what the consumer has not taken yet (it expired, its request was cleaned up): it writes a mark into
the second half of the board, gives the mark time to be seen, and looks whether the ticket is still not taken. The consumer
takes first and looks for a mark second. So at least one of the two notices, and if both do, the consumer gives the payload
back.

Byte 0 is the producer's: it asks to be told of the next release, because somebody waits for room. Byte 1 is the consumer's and
its mark the producer's: each side counts there what it has sent over the socket, so that the other sees without a system call that
nothing has come.
"""

from __future__ import annotations

import mmap
import os

from omni_connector_core.errors import CapacityError
from omni_connector_shared_memory.mapping import anonymous_file, map_shared

__all__ = ["ANSWERED", "ASKED", "MARKS", "RELEASED", "TAKEN", "WANTED", "Board", "open_board"]

TICKETS = 1 << 20
BOARD_NBYTES = 2 * TICKETS
CLAIMED, TAKEN, RELEASED = 0, 1, 2
WANTED = 0
ASKED = 1
FIRST_TICKET = 2
MARKS = TICKETS
"""Where the marks begin."""
ANSWERED = MARKS + ASKED
STEP_NBYTES = 64 * 1024
_RELEASED_BYTE = bytes([RELEASED])


class Board:
    """The producer's end of one consumer's board. Not thread-safe.

    Attributes
    ----------
    fd, bytes
        The file, and its memory.

    Raises
    ------
    BackendUnavailableError, CapacityError
        The host has no file descriptor, or no memory, for another consumer.
    """

    def __init__(self) -> None:
        self._allocated = 0
        self._free: list[int] = []
        self._next = FIRST_TICKET
        self.fd = anonymous_file("omni-connector-board", BOARD_NBYTES)
        try:
            self._allocate()
            self.bytes = map_shared(self.fd, BOARD_NBYTES)
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, OSError):
                raise CapacityError(f"no memory to keep book of a consumer: {error.strerror}") from error
            raise

    def issue(self) -> int:
        """Issue a ticket, in state claimed.

        Raises
        ------
        CapacityError
            The consumer holds a million payloads, or the host has no memory for more tickets.
        """
        if self._free:
            ticket = self._free.pop()
        else:
            if self._next == self._allocated:
                self._allocate()
            ticket = self._next
            self._next += 1
        self.bytes[ticket] = CLAIMED
        self.bytes[MARKS + ticket] = 0
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Take a ticket back that its consumer has no more use for."""
        self._free.append(ticket)

    def released(self) -> list[int]:
        """Find the tickets whose memory the consumer no longer uses; each is to be withdrawn by the caller."""
        states = self.bytes[: self._next]
        tickets = []
        ticket = states.find(_RELEASED_BYTE, FIRST_TICKET)
        while ticket >= 0:
            tickets.append(ticket)
            self.bytes[ticket] = CLAIMED
            ticket = states.find(_RELEASED_BYTE, ticket + 1)
        return tickets

    def mark(self, ticket: int) -> None:
        """Tell the consumer not to take the payload any more."""
        self.bytes[MARKS + ticket] = 1

    def seen(self, ticket: int) -> bool:
        """Whether the consumer ever took the payload."""
        return self.bytes[ticket] != CLAIMED

    def want(self, wanted: bool) -> None:
        """Ask to be told of releases, or no longer."""
        self.bytes[WANTED] = wanted

    def close(self) -> None:
        """Close the file; the consumer keeps its mapping."""
        os.close(self.fd)
        self.bytes.close()

    def _allocate(self) -> None:
        if self._allocated == TICKETS:
            raise CapacityError(f"one consumer holds {TICKETS:,} payloads")
        try:
            for half in (0, MARKS):
                os.posix_fallocate(self.fd, half + self._allocated, STEP_NBYTES)
        except OSError as error:
            raise CapacityError(f"no memory to keep book of another payload: {error.strerror}") from error
        self._allocated += STEP_NBYTES


def open_board(fd: int) -> mmap.mmap:
    """Map a board at the consumer's end."""
    return map_shared(fd, BOARD_NBYTES)
