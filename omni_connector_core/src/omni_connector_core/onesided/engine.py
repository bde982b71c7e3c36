"""What a one-sided transport needs from its engine, and nothing else.

To add a backend: implement `Engine`, and hand its class to `OneSidedTransport`. An engine moves bytes between registered memory of
two processes; it never waits, and knows neither keys nor payloads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

__all__ = ["Engine", "Piece"]


class Piece(NamedTuple):
    """A run of bytes to be read from a peer.

    Attributes
    ----------
    remote, local
        Addresses in the peer's and in this process' registered memory.
    nbytes
        How many bytes.
    """

    remote: int
    local: int
    nbytes: int


class Engine(ABC):
    """One instance of the vendor's engine. Every method may be called from any thread.

    An instance is never repaired: when a transfer on it was given up, it is retired, the process goes on with a new one, and
    `close` is called on the old one as soon as its other transfers are over.
    """

    spin_s: ClassVar[float] = 0.0
    """For how long a small transfer is waited for by spinning, seconds (a sleep costs at least 60 us)."""

    spin_nbytes: ClassVar[int] = 0
    """Transfers up to this many bytes are small."""

    piece_nbytes: ClassVar[int] = 0
    """Below this mean size of a piece, bytes, one read of everything and copies are faster than a read of pieces."""

    eager_nbytes: int = 64 << 10
    """A frame up to this size comes with the control channel's answer, which is faster than a read of its own; bytes.

    At most 192 KiB: more does not fit into a unix socket's buffer, and waits for the control thread.
    """

    progress_s: ClassVar[float | None] = None
    """How often `progress` must be called at a producer while a consumer reads from it, seconds; None: never."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Make memory readable by peers and writable by reads.

        Raises
        ------
        BackendUnavailableError
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`; unknown addresses are ignored."""

    @abstractmethod
    def endpoint(self, address: int) -> bytes:
        """Return what a peer's `connect` needs to reach this engine and read the registered memory at an address."""

    @abstractmethod
    def connect(self, blob: bytes) -> Any:
        """Make first contact with a peer and return the handle for `start`; may block, on a thread of its own.

        Raises
        ------
        PeerLostError
        """

    @abstractmethod
    def start(self, peer: Any, pieces: Sequence[Piece]) -> Any:
        """Begin to read; return a handle for `done`. Does not wait for the network.

        Raises
        ------
        PeerLostError
            Nothing was begun: no byte can arrive.
        """

    @abstractmethod
    def done(self, read: Any) -> bool:
        """Say whether every byte has arrived; True or an exception ends the handle.

        Raises
        ------
        PeerLostError
            It failed. Whether bytes may still arrive then is not known.
        """

    def progress(self) -> None:  # noqa: B027 - most engines work by themselves
        """Let the engine work, at the producer."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the instance; when this returns, no byte arrives any more."""
