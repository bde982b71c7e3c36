"""A request's payloads on one edge, whole or as a stream of chunks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from omni_connector_core import (
    Edge,
    OmniConnector,
    OmniConnectorError,
    Producer,
    RequestAbandonedError,
    Role,
    create_connector,
)
from omni_connector_core.streams import StreamWriter
from omni_connector_serve.runtime.messages import Announced, EdgeSpec, WorkerSpec

__all__ = ["Sink", "Source", "open_end"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


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
        self._writer: StreamWriter | None = None
        self._abandoned = False

    def put(self, value: Any) -> dict[str, Any] | None:
        """Put the request's only payload; returns its metadata, or None when nobody wants it any more."""
        put = partial(self._connector.put, self._request_id, value, readers=self._readers)
        return self._unless_abandoned(put)

    def write(self, value: Any) -> None:
        """Write the next chunk of a stream."""
        self._unless_abandoned(partial(self._stream().write, value))

    def end(self) -> None:
        """Say that no more chunks come."""
        self._unless_abandoned(self._stream().end)

    def fail(self, reason: str) -> None:
        """Say that what is missing will never come."""
        try:
            if self._writer is None:
                self._connector.fail(self._request_id, reason)
            else:
                self._writer.fail(reason)
        except OmniConnectorError as error:
            _log.warning("consumers of request %s are not told that it failed: %s", self._request_id, error)

    def _stream(self) -> StreamWriter:
        if self._writer is None:
            self._writer = self._connector.writer(self._request_id, readers=self._readers)
        return self._writer

    def _unless_abandoned(self, send: Callable[..., _T]) -> _T | None:
        if self._abandoned:
            return None
        try:
            return send(timeout=_left(self._deadline))
        except RequestAbandonedError:
            self._abandoned = True  # the consumer has what it needs, or the request was given up
            return None


class Source:
    """The consuming end, for one request.

    Attributes
    ----------
    gets : int
        Payloads taken so far.
    """

    def __init__(
        self, connector: OmniConnector, request_id: str, announced: Announced, producer: str, deadline: float
    ) -> None:
        self._connector = connector
        self._request_id = request_id
        self._announced = announced
        self._producer = producer
        self._deadline = deadline
        self._over = False
        self.gets = 0

    def whole(self) -> Any:
        """Get the request's only payload."""
        announced = self._announced
        if announced.stream:
            raise TypeError(f"{self._producer!r} streams to this stage: use task.stream({self._producer!r})")
        producer, timeout = Producer(announced.replica), _left(self._deadline)
        payload = self._connector.get(self._request_id, announced.metadata, timeout=timeout, producer=producer)
        self.gets += 1
        self._over = True
        return payload

    def stream(self) -> Iterator[Any]:
        """Iterate over the chunks, as they come."""
        if not self._announced.stream:
            yield self.whole()
            return
        timeout, producer = _left(self._deadline), Producer(self._announced.replica)
        reader = self._connector.reader(self._request_id, timeout=timeout, producer=producer)
        for chunk in reader:
            self.gets += 1
            yield chunk
        self._over = True

    def discard_unread(self) -> None:
        """Free what was not read, if anything; whoever still writes is told that nobody reads."""
        if not self._over:
            try:
                self._connector.cleanup(self._request_id)
            except OmniConnectorError as error:
                _log.warning("unread payloads of request %s stay until they expire: %s", self._request_id, error)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
