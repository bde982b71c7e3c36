"""A request's payloads on one edge, whole or as a stream of chunks, with errors of their own.

What goes wrong on an edge is thus told from what goes wrong in a stage, although it is raised inside the stage's code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from omni_connector_core import (
    Edge,
    Key,
    OmniConnector,
    OmniConnectorError,
    Producer,
    RequestAbandonedError,
    Role,
    create_connector,
)
from omni_connector_serve.runtime.messages import Announced, EdgeSpec, WorkerSpec

__all__ = ["InputError", "OutputError", "Sink", "Source", "open_end"]

_log = logging.getLogger(__name__)


class InputError(Exception):
    """A payload did not come."""

    def __init__(self, producer: str, cause: OmniConnectorError) -> None:
        super().__init__(f"input from {producer!r}: {cause.code}: {cause}")
        self.producer = producer


class OutputError(Exception):
    """A payload could not be put."""

    def __init__(self, consumer: str, cause: OmniConnectorError) -> None:
        super().__init__(f"output to {consumer!r}: {cause.code}: {cause}")


def open_end(edge: EdgeSpec, worker: WorkerSpec) -> OmniConnector:
    """Open the end of `edge` that `worker` is at."""
    return create_connector(
        edge.backend,
        dict(edge.options),
        edge=Edge(edge.producer, edge.consumer),
        role=Role.PRODUCER if edge.producer == worker.stage else Role.CONSUMER,
        namespace=worker.namespace,
        replica=worker.replica,
        rank=worker.rank,
    )


class Sink:
    """The producing end, for one request."""

    def __init__(self, connector: OmniConnector, request_id: str, edge: EdgeSpec, deadline: float) -> None:
        self.consumer = edge.consumer
        self._connector = connector
        self._request_id = request_id
        self._readers = edge.readers
        self._deadline = deadline
        self._chunks = 0
        self._abandoned = False

    def put(self, value: Any) -> dict[str, Any] | None:
        """Put the request's only payload; returns its metadata, or None when nobody wants it any more."""
        return self._put(self._request_id, value)

    def write(self, value: Any) -> None:
        """Put the next chunk."""
        self._put(Key(self._request_id, chunk=self._chunks), (value,))
        self._chunks += 1

    def end(self) -> None:
        """Say that no more chunks come."""
        self._put(Key(self._request_id, chunk=self._chunks), ())

    def fail(self, reason: str) -> None:
        """Say that what is missing will never come."""
        try:
            self._connector.fail(Key(self._request_id, chunk=self._chunks), reason)
        except OmniConnectorError as error:
            _log.warning("consumers of request %s are not told that it failed: %s", self._request_id, error)

    def _put(self, key: Key | str, payload: Any) -> dict[str, Any] | None:
        if self._abandoned:
            return None
        try:
            return self._connector.put(key, payload, timeout=_left(self._deadline), readers=self._readers)
        except RequestAbandonedError:
            self._abandoned = True  # the consumer has what it needs
            return None
        except OmniConnectorError as error:
            raise OutputError(self.consumer, error) from error


class Source:
    """The consuming end, for one request."""

    def __init__(
        self, connector: OmniConnector, request_id: str, announced: Announced, producer: str, deadline: float
    ) -> None:
        self._connector = connector
        self._request_id = request_id
        self._announced = announced
        self._producer = producer
        self._deadline = deadline
        self._exhausted = False
        self.gets = 0

    def whole(self) -> Any:
        """Get the request's only payload."""
        if self._announced.stream:
            raise TypeError(
                f"stage {self._producer!r} streams to this one: read it with task.stream({self._producer!r})"
            )
        payload = self._get(self._request_id, self._announced.metadata)
        self._exhausted = True
        return payload

    def stream(self) -> Iterator[Any]:
        """Iterate over the chunks, as they come."""
        if not self._announced.stream:
            yield self.whole()
            return
        chunk = 0
        while value := self._get(Key(self._request_id, chunk=chunk), None):
            yield value[0]
            chunk += 1
        self._exhausted = True

    def discard_unread(self) -> None:
        """Free what was not read, if anything."""
        if not self._exhausted:
            try:
                self._connector.cleanup(self._request_id)
            except OmniConnectorError as error:
                _log.warning("unread payloads of request %s stay until they expire: %s", self._request_id, error)

    def _get(self, key: Key | str, metadata: dict[str, Any] | None) -> Any:
        producer = Producer(self._announced.replica)
        try:
            payload = self._connector.get(key, metadata, timeout=_left(self._deadline), producer=producer)
        except OmniConnectorError as error:
            raise InputError(self._producer, error) from error
        self.gets += 1
        return payload


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
