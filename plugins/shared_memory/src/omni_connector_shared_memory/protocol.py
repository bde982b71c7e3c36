"""What producer and consumer say to each other over their socket: one msgpack array a message.

::

    consumer                                producer
    (connects)                        -->   Welcome + the files of pool and board, or Refused
    Lookup(first, keys)               -->   for each key, now or when it is put: Found, or Ended with an error
                                            Waiting for those that are not there, when asked to answer
    Confirm(lookups)                  -->   Waiting, after whatever was found before
    Cancel(lookups)                   -->
    Unread(tickets)                   -->   gives reads back
    Released()                        -->   only while the board says that the producer waits for room
    Presence(call, keys)              -->   Here(call, flags)
    Cleanup(call, request_id)         -->   Done(call, count)
    Ping(call)                        -->   Done(call, 0)
    Leave()                           -->   no more payloads; memory that is held stays held until the socket closes
                                      <--   Bye() before a clean close

The end of the connection, however it comes, ends everything that was held over it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["VERSION"]

VERSION = 2
MAX_NBYTES = 1 << 16
KEYS_PER_MESSAGE = 32
"""A key has at most 1.3 KB, and a message stays below `MAX_NBYTES`."""

PackedKey: TypeAlias = tuple[str, int, str]


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: an array whose first element says which."""


class Welcome(_Message, tag=1):
    """The producer's first word, with the files of pool and board."""

    version: int
    capacity_nbytes: int


class Refused(_Message, tag=2):
    """The producer does not talk to this consumer."""

    reason: str
    hint: str


class Find(msgspec.Struct, array_like=True):
    """A claim on a payload, which the consumer now has."""

    lookup: int
    ticket: int
    offset: int
    nbytes: int
    shared: bool
    """Others may read it too, so nobody may write to it."""


class Found(_Message, tag=3):
    """These are there, and claimed."""

    finds: list[Find]


class Waiting(_Message, tag=4):
    """These are not there yet."""

    lookups: list[int]


class Ended(_Message, tag=5):
    """A lookup ended with an error."""

    lookup: int
    code: str
    message: str


class Here(_Message, tag=6):
    """Answers `Presence`."""

    call: int
    flags: list[bool]


class Done(_Message, tag=7):
    """Answers `Cleanup` and `Ping`."""

    call: int
    count: int


class Bye(_Message, tag=8):
    """The producer closes on purpose."""


class Lookup(_Message, tag=16):
    """Asks for payloads; lookup numbers count up from `first`."""

    first: int
    keys: list[PackedKey]
    answer: bool
    """Say `Waiting` for those that are not there."""


class Confirm(_Message, tag=24):
    """Asks to hear that nothing was found so far."""

    lookups: list[int]


class Cancel(_Message, tag=17):
    """The consumer no longer waits for these."""

    lookups: list[int]


class Unread(_Message, tag=18):
    """Gives claims back whose payloads the consumer never used."""

    tickets: list[int]


class Released(_Message, tag=19):
    """There is something new on the board."""


class Presence(_Message, tag=20):
    """Asks which payloads are there, claiming none."""

    call: int
    keys: list[PackedKey]


class Cleanup(_Message, tag=21):
    """Ends a request."""

    call: int
    request_id: str


class Ping(_Message, tag=22):
    """Asks for a sign of life."""

    call: int


class Leave(_Message, tag=23):
    """The consumer closes, but views of payloads may still be in use."""


ToConsumer: TypeAlias = Welcome | Refused | Found | Waiting | Ended | Here | Done | Bye
ToProducer: TypeAlias = Lookup | Confirm | Cancel | Unread | Released | Presence | Cleanup | Ping | Leave

encode = msgspec.msgpack.Encoder().encode
decode_at_consumer = msgspec.msgpack.Decoder(ToConsumer).decode
decode_at_producer = msgspec.msgpack.Decoder(ToProducer).decode
