"""Metadata: what `put` returns and another process may pass to `get`.

A plain dict of str, int, list and dict, so that it survives JSON and msgpack::

    {"omni_connector": 1, "transport": "shared_memory", "edge": ["0", "1"], "producer": [0, 0],
     "key": ["req-1", 0, ""], "nbytes": 4096, "at": {...}}

``at`` is the backend's own. Metadata is a shortcut and a statement of whose payload is meant, never a necessity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from omni_connector_core.errors import IncompatibleMetadataError
from omni_connector_core.key import Edge, Key, Producer

__all__ = ["METADATA_VERSION", "Metadata", "Where", "make_metadata", "read_metadata"]

METADATA_VERSION = 1
_MARK = "omni_connector"
_WRONG_TYPE = "the metadata is damaged: a field has the wrong type"

Metadata = dict[str, Any]
"""What `put` returns: JSON-safe, see the module's docstring."""


class Where(msgspec.Struct, frozen=True):
    """What a consumer knows of a payload's whereabouts; everything may be unknown.

    Attributes
    ----------
    producer
        Whose payload is meant; None: any producer's, as long as only one holds the key.
    at
        The backend's own part of the metadata, as `Transport._put` returned it.
    nbytes
        Size of the frame in bytes, when metadata told it.
    hint
        ``(host, port)`` at which to look for the producer first; only a hint.
    """

    producer: Producer | None = None
    at: Mapping[str, Any] | None = None
    nbytes: int | None = None
    hint: tuple[str, int] | None = None


ANYWHERE = Where()


def make_metadata(
    transport: str, edge: Edge, producer: Producer, key: Key, nbytes: int, at: dict[str, Any]
) -> Metadata:
    """Build the metadata of a payload that was put."""
    return {
        _MARK: METADATA_VERSION,
        "transport": transport,
        "edge": list(edge),
        "producer": list(producer),
        "key": list(key),
        "nbytes": nbytes,
        "at": at,
    }


def read_metadata(metadata: object, *, transport: str, edge: Edge, key: Key, producer: Producer | None = None) -> Where:
    """Turn what a caller passed as metadata into what is known of the payload's whereabouts.

    Metadata that is not ours means: look the payload up by key. Host and port in it are a hint.

    Parameters
    ----------
    producer
        The caller's explicit choice; it wins over a hint and must agree with metadata of ours.

    Raises
    ------
    IncompatibleMetadataError
        Ours, but of another version, transport, edge, key or producer, or damaged.
    """
    if metadata is None or not (type(metadata) is dict or _is_mapping(metadata)) or not metadata:
        return ANYWHERE if producer is None else Where(producer=producer)
    version = metadata.get(_MARK)
    if version is None:
        return Where(producer=producer, hint=_hint(metadata))
    if version != METADATA_VERSION:
        raise IncompatibleMetadataError(
            f"the metadata has version {version!r}, this omni-connector reads version {METADATA_VERSION}",
            hint="Install the same omni-connector-core on both sides of the edge",
        )
    if metadata.get("transport") != transport:
        raise IncompatibleMetadataError(
            f"the metadata comes from the transport {metadata.get('transport')!r}, this side runs {transport!r}",
            hint="Name the same connector on both sides of the edge",
        )
    try:
        (replica, rank), nbytes, at = metadata["producer"], metadata["nbytes"], metadata["at"]
        ours = tuple(metadata["edge"]) == edge and tuple(metadata["key"]) == key
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleMetadataError(f"the metadata is damaged: {error!r}") from error
    if not ours:
        raise _of_another(metadata["edge"], metadata["key"], edge, key)
    numbers = type(replica) is int and type(rank) is int and type(nbytes) is int
    if not numbers or not (type(at) is dict or _is_mapping(at)):
        raise IncompatibleMetadataError(_WRONG_TYPE)
    # what Producer(replica, rank) would call in Python
    their_producer: Producer = tuple.__new__(Producer, (replica, rank))
    if producer is not None and producer != their_producer:
        raise IncompatibleMetadataError(f"the metadata is of {their_producer}, the call asks for {producer}")
    return Where(their_producer, at, nbytes)


def _of_another(their_edge: Any, their_key: Any, edge: Edge, key: Key) -> IncompatibleMetadataError:
    """Say what is wrong with metadata whose edge or key is not the one that was asked for."""
    try:
        their_edge, their_key = Edge(*their_edge), Key(*their_key)
    except TypeError as error:
        return IncompatibleMetadataError(f"the metadata is damaged: {error!r}")
    if [type(field) for field in (*their_edge, *their_key)] != [str, str, str, int, str]:
        return IncompatibleMetadataError(_WRONG_TYPE)
    name, theirs, ours = ("edge", their_edge, edge) if their_edge != edge else ("key", their_key, key)
    return IncompatibleMetadataError(f"the metadata is of {name} {theirs}, the call asks for {name} {ours}")


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)  # which asks the abstract class, in Python: ask `type` first


def _hint(metadata: Mapping[Any, Any]) -> tuple[str, int] | None:
    for host_name, port_name in (("host", "port"), ("source_host", "source_port")):
        host, port = metadata.get(host_name), metadata.get(port_name)
        if isinstance(host, str) and isinstance(port, int) and 0 < port < 65536:
            return host, port
    return None
