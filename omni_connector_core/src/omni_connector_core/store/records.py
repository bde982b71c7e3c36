"""The small objects of the protocol, as bytes: msgpack behind a CRC-32 of the object's name and it.

A store may show an overwrite half done; and to who reads an object while it is removed, another one that was put where it lay.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from omni_connector_core.liveness import Process

__all__ = ["Beat", "Count", "Descriptor", "Mail", "Owned", "Slot", "pack", "unpack"]

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """What a producer says of a key.

    Attributes
    ----------
    generation
        Which put of this producer; names the payload. 0: none is there.
    nbytes, readers
        Of the payload.
    ending
        How it ended: the class name of the error for consumers. Empty: it has not.
    message
        The error's message.
    ticket
        Whether reads are decided by a ticket (`omni_connector_core.store.tickets`), as long as it was not handed over.
    """

    generation: int = 0
    nbytes: int = 0
    readers: int = 1
    ending: str = ""
    message: str = ""
    ticket: bool = False


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A producer, as consumers find it."""

    replica: int
    rank: int
    incarnation: str
    process: Process


class Owned(msgspec.Struct, frozen=True, array_like=True):
    """A consumer's witness (`omni_connector_core.store.witness`)."""

    process: Process
    nonce: str


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A producer's heartbeat: it rises while the producer lives."""

    count: int


class Mail(msgspec.Struct, frozen=True, array_like=True):
    """A consumer asks a producer to abandon a request."""

    id: str
    request_id: str


class Count(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a mail: how many payloads were discarded."""

    discarded: int


def pack(name: str, record: msgspec.Struct) -> bytes:
    """Encode a record for the object of that name."""
    body = msgspec.msgpack.encode(record)
    return _sum(name, body).to_bytes(4, "little") + body


def unpack(name: str, data: bytes | None, kind: type[RecordT]) -> RecordT | None:
    """Decode what was read of the object of that name; None when there is none, or it is torn, another's, or not a `kind`."""
    if data is None or len(data) < 4 or _sum(name, data[4:]) != int.from_bytes(data[:4], "little"):
        return None
    try:
        return msgspec.msgpack.decode(data[4:], type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _sum(name: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(name.encode()))
