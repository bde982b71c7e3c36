"""What a store's SDK must offer for `StoreTransport` to run on it: named objects and two atomic operations.

A plugin implements `ObjectStore` once, with its vendor's best calls and one map of its vendor's errors, and gets every
rule of the contract from `omni_connector_core.store.transport`. Only `claim` and `take` must be atomic between
processes; everything else may be as weak as: an object that was created can be read until it is removed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from omni_connector_core.deadline import Deadline
from omni_connector_core.frame import Frame
from omni_connector_core.transport import Memory

__all__ = ["NewObject", "NoRoomError", "ObjectStore"]


class NoRoomError(Exception):
    """`ObjectStore.create`: not now, perhaps once something was removed. Nothing was stored.

    The transport waits for room and turns it into `CapacityError` at the deadline.
    """


class NewObject(msgspec.Struct, frozen=True):
    """An object to create.

    Attributes
    ----------
    name
        Not in use; at most `ObjectStore.longest_name` characters of ``[A-Za-z0-9_-=:#]``.
    content
        Its bytes, at least one: a frame to copy from, or a small record. Both are the caller's again once
        `ObjectStore.create` has returned.
    """

    name: str
    content: Frame | bytes

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.content.nbytes if isinstance(self.content, Frame) else len(self.content)


class ObjectStore(ABC):
    """Named objects in a store, shared by processes. Thread-safe.

    Every call returns or raises by its deadline (a call that begins late may take 0.25 s), also when the vendor's own call
    is still stuck then; memory that the stuck call may still write to is not handed out again. Every call raises
    `BackendUnavailableError` when the service, or the process that keeps an object's bytes, does not answer.
    """

    longest_name: ClassVar[int]
    """The most characters of a name."""
    silence_option: ClassVar[str] = "the service's limit on silent clients"
    """What an operator raises so that the store waits longer for a client that was stopped or starved."""
    tickets: bool = False
    """Whether reads on the producer's host are decided by files (`omni_connector_core.store.tickets`) in place of `take`: worth
    it where `take` is a request more than `read` and `discard`."""

    @abstractmethod
    def create(self, objects: Sequence[NewObject], *, ttl_s: float, deadline: Deadline) -> None:
        """Create a few objects, in one round trip where the SDK can; afterwards each can be read, or none exists.

        Parameters
        ----------
        ttl_s
            They will have been removed by then (0: they stay); a store with native expiry may use it (rounded up, with
            slack) to be rid of what a dead process left. Another one ignores it.

        Raises
        ------
        NoRoomError
        PayloadTooLargeError
        """

    @abstractmethod
    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        """Create or overwrite a small object; a reader sees the old bytes, the new bytes, or for a moment neither."""

    @abstractmethod
    def claim(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> bool:
        """Create a small object unless it exists. Of all callers, in all processes, exactly one is told True."""

    @abstractmethod
    def take(self, names: Sequence[str], *, deadline: Deadline) -> str | None:
        """Remove the first object of `names` that exists, and say which; None when there is none.

        Of all callers exactly one is told a given name.
        """

    @abstractmethod
    def load(self, names: Sequence[str], *, deadline: Deadline) -> list[bytes | None]:
        """Read small objects, at most `SMALL_NBYTES` each, in one round trip; None for one that cannot be read.

        Raises
        ------
        TransferTimeoutError
            The bytes were still on their way at the deadline.
        """

    @abstractmethod
    def read(self, name: str, nbytes: int, *, shared: bool, deadline: Deadline) -> Memory | None:
        """Read one object of a known size; None when it is not there.

        The bytes may be torn when the object was removed meanwhile: the caller finds out by `take`.

        Parameters
        ----------
        shared
            Others may read the object too: a store that shows its own memory makes it read-only then.

        Raises
        ------
        TransferTimeoutError
            The bytes were still on their way at the deadline.
        """

    @abstractmethod
    def exist(self, names: Sequence[str], *, deadline: Deadline) -> list[bool]:
        """Say of each whether it exists, in one round trip."""

    @abstractmethod
    def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        """Remove objects, in one round trip; one that is not there is no error."""

    def discard(self, name: str, *, deadline: Deadline) -> None:
        """Remove an object that was read, at once or soon."""
        self.remove([name], deadline=deadline)

    def purge(self, prefix: str, *, deadline: Deadline) -> None:  # noqa: B027 - native expiry does it elsewhere
        """Remove every object whose name begins with `prefix`, where the store can find them."""

    @abstractmethod
    def probe(self, *, deadline: Deadline) -> str:
        """Ask the service whether it serves; returns what was asked, in a few words.

        Raises
        ------
        BackendUnavailableError
        """

    @property
    @abstractmethod
    def capacity_bytes(self) -> int | None:
        """The most bytes that this process's objects can take; None when the store does not say."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of local memory in use for reads: leases that are out, and quarantine."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; memory that was handed out stays valid. Called once; later calls raise `ClosedError`."""


SMALL_NBYTES = 4096
"""Largest object for `ObjectStore.load`, `ObjectStore.replace` and `ObjectStore.claim`, bytes."""
