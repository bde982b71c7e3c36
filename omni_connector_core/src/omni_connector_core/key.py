"""What names a payload: key, edge and producer, and their one injective encoding.

A payload's full name is ``namespace / edge / producer / key``. `encoded_name` turns it into text of the alphabet
``[A-Za-z0-9_-=:#]``, which every store that we know accepts, such that no two names share an encoding.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from omni_connector_core.errors import InvalidKeyError

MAX_REQUEST_ID_NBYTES = 1024
MAX_SHARD_NBYTES = 256
MAX_CHUNK = 2**63 - 1

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_SAFE = re.compile(r"[A-Za-z0-9_:-]*").fullmatch


class Key(NamedTuple):
    """Names a payload within one producer's end of an edge.

    Parameters
    ----------
    request_id
        The request: a non-empty str of at most 1,024 UTF-8 bytes. `cleanup` works on this field.
    chunk
        Position in a stream; 0 for a payload that is whole.
    shard
        A part of the payload, e.g. one layer of one rank; at most 256 UTF-8 bytes.
    """

    request_id: str
    chunk: int = 0
    shard: str = ""

    def __str__(self) -> str:
        text = repr(self.request_id) if len(self.request_id) <= 80 else f"{self.request_id[:77]!r}..."
        if self.chunk or self.shard:
            text += f"/{self.chunk}"
        return f"{text}/{self.shard}" if self.shard else text


class Edge(NamedTuple):
    """Two stages of a pipeline and the direction between them."""

    producer: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.producer}->{self.consumer}"


class Producer(NamedTuple):
    """Which of a producing stage's processes: its replica and its rank in that replica."""

    replica: int = 0
    rank: int = 0

    def __str__(self) -> str:
        return f"replica {self.replica} rank {self.rank}"


def as_key(key: Key | str) -> Key:
    """Check a key; a plain str is the request id.

    Raises
    ------
    InvalidKeyError
        Empty, too long, not valid Unicode, or of another type.
    """
    if type(key) is str:
        if key and len(key) <= MAX_REQUEST_ID_NBYTES and key.isascii():
            return tuple.__new__(Key, (key, 0, ""))  # what Key(key) would call in Python
        key = Key(key)
    elif not isinstance(key, Key):
        raise InvalidKeyError(f"a key is a str or a Key, not {type(key).__name__}")
    request_id, chunk, shard = key
    if not isinstance(request_id, str) or not isinstance(shard, str):
        raise InvalidKeyError("request_id and shard are str")
    # 1,024 bytes is at least 256 characters: the common key needs no encoding to be checked
    if not request_id or not request_id.isascii() or len(request_id) > MAX_REQUEST_ID_NBYTES:
        _check_text("request_id", request_id, MAX_REQUEST_ID_NBYTES)
        if not request_id:
            raise InvalidKeyError("the key is empty")
    if shard and (not shard.isascii() or len(shard) > MAX_SHARD_NBYTES):
        _check_text("shard", shard, MAX_SHARD_NBYTES)
    if type(chunk) is not int or not 0 <= chunk <= MAX_CHUNK:
        raise InvalidKeyError(f"chunk is an int from 0 to 2**63 - 1, not {chunk!r}")
    return key


def _check_text(field: str, text: str, limit: int) -> None:
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidKeyError(f"{field} is not valid Unicode: {error.reason} at {error.start}") from error
    if nbytes > limit:
        raise InvalidKeyError(f"{field} has {nbytes:,} UTF-8 bytes; at most {limit:,} are allowed")


def encoded(*fields: str | int, limit: int | None = None) -> str:
    """Join fields into one name of the alphabet ``[A-Za-z0-9_-=:#]``, injectively.

    Characters outside ``[A-Za-z0-9_-]`` become ``=XX`` per UTF-8 byte and fields are joined by ``:``, neither of
    which a field can then contain. A name longer than `limit` keeps its head and ends in ``#`` and 128 bits of BLAKE2b
    over the whole name; only hashed names contain ``#``.

    Parameters
    ----------
    limit
        The most characters a backend allows, at least 33.
    """
    name = ":".join(map(str, fields))
    if name.count(":") >= len(fields) or not _SAFE(name):  # the common name has nothing to escape
        name = ":".join(map(_escaped, map(str, fields)))
    if limit is not None and len(name) > limit:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return f"{name[: limit - 33]}#{digest}"
    return name


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda match: b"=%02X" % match[0][0], text.encode()).decode("ascii")


def encoded_name(namespace: str, edge: Edge, producer: Producer, key: Key, *, limit: int | None = None) -> str:
    """Encode a payload's full name (see `encoded`)."""
    return encoded(namespace, *edge, *producer, *key, limit=limit)
