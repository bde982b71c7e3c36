"""What consumers and producers say to each other over the control channel.

Every message is one byte of protocol version and one msgpack array of a closed set of types: nothing that arrives can name
code, and what is not a message of ours is dropped by the decoder. `number` pairs an answer with its question; a consumer never
uses one twice on a channel.

========== ========= ==================================================================================
consumer   producer  meaning
========== ========= ==================================================================================
Ask        Found     claim one read of a key: here it is, claimed
..         Pending   not put yet; Found or Failed follows as soon as it is decided
..         Failed    it will never come, or the question cannot be answered; carries one of our errors
Cancel               stop waiting for an Ask
Done                 the claim is no longer needed, read or unread
Describe   Endpoint  how to reach the producer's engine
Exists     Truths    which of these keys have an unread payload
Cleanup    Count     discard requests
Ping       Pong      are you there; also renews every claim of this channel. Which of these claims stand?
========== ========= ==================================================================================
"""

from __future__ import annotations

import itertools

import msgspec

__all__ = [
    "LEASE_S",
    "LOST_S",
    "MAX_MESSAGE_NBYTES",
    "PING_S",
    "PROTOCOL",
    "Answer",
    "Ask",
    "Cancel",
    "Cleanup",
    "Count",
    "Describe",
    "Done",
    "Endpoint",
    "Exists",
    "Failed",
    "Found",
    "Pending",
    "Ping",
    "Pong",
    "ProtocolError",
    "Question",
    "Scope",
    "Truths",
    "decode_answer",
    "decode_question",
    "encode",
    "new_number",
]

PROTOCOL = 1
MAX_MESSAGE_NBYTES = 1 << 20
"""A longer message ends the connection that sent it."""

PING_S = 1.0
"""A consumer that waits says that it lives this often, seconds."""

LOST_S = 5.0
"""A producer that leaves a question unanswered for this long is lost, seconds; longer than a short cut of the network."""

LEASE_S = 10.0
"""A consumer that was silent for this long has lost its claims, seconds."""

new_number = itertools.count(1).__next__
"""Return a number for a question, never used before in this process."""

KeyFields = tuple[str, int, str]


class Scope(msgspec.Struct, array_like=True, frozen=True):
    """Whose payloads a question is about; nothing is answered across scopes."""

    backend: str
    namespace: str
    producer_stage: str
    consumer_stage: str


class Ask(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Claim one read of a key.

    Attributes
    ----------
    instance
        The producer process that is meant, when metadata named it; empty: any.
    producer
        The replica and rank that is meant; None: any.
    """

    number: int
    scope: Scope
    key: KeyFields
    instance: str = ""
    producer: tuple[int, int] | None = None


class Cancel(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Stop waiting for the Ask of this number."""

    number: int


class Done(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A claim is over."""

    number: int
    claim: int
    unread: bool = False


class Describe(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Ask for the endpoint of the engine behind a claim of this channel."""

    number: int
    claim: int


class Exists(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Ask which keys have an unread payload."""

    number: int
    scope: Scope
    keys: list[KeyFields]
    producer: tuple[int, int] | None = None


class Cleanup(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Discard requests."""

    number: int
    scope: Scope
    request_ids: list[str]


class Ping(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """Renew this channel's claims, and ask which of some still stand."""

    number: int
    claims: list[int] = []


Question = Ask | Cancel | Done | Describe | Exists | Cleanup | Ping


class Found(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A payload, claimed for the asking consumer.

    Attributes
    ----------
    endpoint
        Names the engine that holds it (see `Endpoint`).
    address, nbytes
        Where the frame lies in the producer's memory.
    frame
        The frame itself, if it is small; else empty.
    """

    number: int
    claim: int
    endpoint: str
    address: int
    nbytes: int
    frame: bytes = b""


class Pending(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Not put yet; the consumer will hear of it."""

    number: int


class Failed(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An error of ours, by its code."""

    number: int
    code: str
    message: str


class Endpoint(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """How to reach an engine: its name and what `Engine.connect` takes."""

    number: int
    name: str
    blob: bytes


class Truths(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Answers to Exists, in order."""

    number: int
    values: list[bool]


class Count(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """How many payloads were discarded."""

    number: int
    count: int


class Pong(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """I am here; these of the named claims stand."""

    number: int
    claims: list[int] = []


Answer = Found | Pending | Failed | Endpoint | Truths | Count | Pong


class ProtocolError(ValueError):
    """Bytes that are no message of this version."""


_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
_VERSION = bytes([PROTOCOL])


def encode(message: Question | Answer) -> bytes:
    """Put a message into bytes."""
    return _VERSION + _encoder.encode(message)


def decode_question(raw: memoryview | bytes) -> Question:
    """Read a consumer's message.

    Raises
    ------
    ProtocolError
    """
    try:
        return _questions.decode(_body(raw))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def decode_answer(raw: memoryview | bytes) -> Answer:
    """Read a producer's message.

    Raises
    ------
    ProtocolError
    """
    try:
        return _answers.decode(_body(raw))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def _body(raw: memoryview | bytes) -> memoryview:
    if not raw or raw[0] != PROTOCOL:
        theirs = raw[0] if raw else "none"
        raise ProtocolError(f"the other side speaks control protocol {theirs}, this one {PROTOCOL}")
    return memoryview(raw)[1:]
