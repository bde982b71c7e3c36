"""The producer's side of a KV-cache flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

from omni_connector_core.codec import Written
from omni_connector_core.connector import OmniConnector
from omni_connector_core.errors import ClosedError, ConfigError
from omni_connector_core.kv.cache import place, planes_by_layer
from omni_connector_core.kv.plan import head_key, plan, tile_key
from omni_connector_core.kv.spec import KVSpec, check_compatible

__all__ = ["KVSend", "KVSender"]

HEAD_VERSION = 1


class KVSender:
    """One producer rank's cache, ready to be sent.

    Parameters
    ----------
    connector
        The producing end of the edge.
    spec
        This side, with this rank in it.
    consumer
        The other side; its rank does not matter.
    caches
        This rank's layers, in order: each a CPU tensor or array of the spec's layout (for ``separate`` a pair).

    Raises
    ------
    IncompatibleKVError
        The sides cannot be bridged, or a cache is not what the spec says.
    """

    def __init__(self, connector: OmniConnector, spec: KVSpec, consumer: KVSpec, caches: Sequence[Any]) -> None:
        check_compatible(spec, consumer)
        self.connector, self.spec, self.consumer = connector, spec, consumer
        self.rank = spec.rank
        self.layers = spec.pp_ranges[self.rank.pp]
        self.planes = planes_by_layer(spec, caches)

    def open(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        readers: int = 1,
        timeout: float | None = None,
        ttl: float | None = None,
    ) -> KVSend:
        """Begin to send one request's cache.

        Parameters
        ----------
        block_ids
            The request's blocks in this rank's cache, in order of tokens.
        num_tokens
            Tokens of the request over all sequence-parallel ranks.
        readers
            How many groups of consumers read it, e.g. 2 with a guidance follower; sent once all the same.
        timeout, ttl
            As for `OmniConnector.put`, of every part.
        """
        return KVSend(self, request_id, block_ids, num_tokens, readers=readers, timeout=timeout, ttl=ttl)


class KVSend:
    """One request's cache on its way out; made by `KVSender.open`. Send each layer when it is computed, in order.

    A context manager: leaving it early fails what is not sent yet, so that no consumer waits for it.
    """

    def __init__(
        self,
        sender: KVSender,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        readers: int,
        timeout: float | None,
        ttl: float | None,
    ) -> None:
        self._sender, self._request_id = sender, request_id
        self._put = partial(sender.connector.put, timeout=timeout, ttl=ttl)
        spec, rank = sender.spec, sender.rank
        way = plan(spec, sender.consumer, num_tokens)
        self._tiles = place(spec, way.sent_by(rank), block_ids, num_tokens)
        self._unsent = list(self._tiles)
        self._readers = readers
        self._next = sender.layers.start
        consumers = way.consumers_of(rank)
        if consumers:
            head = {
                "version": HEAD_VERSION,
                "num_tokens": num_tokens,
                "producer": _plain(spec.group()),
                "consumer": _plain(sender.consumer.group()),
            }
            self._put(head_key(request_id, rank), head, readers=readers * len(consumers))

    @property
    def layers_sent(self) -> int:
        """How many of this rank's layers were sent."""
        return self._next - self._sender.layers.start

    def send_layer(self, layer: int | None = None) -> None:
        """Send the next layer; one copy, from the cache into transport memory.

        Parameters
        ----------
        layer
            Its number in the model, as a check; layers go in order.

        Raises
        ------
        CapacityError
            No room until the deadline; parts of the layer may be sent already: leave the block, or call again.
        """
        sender = self._sender
        if self._next >= sender.layers.stop:
            raise ClosedError("all layers of this rank were sent")
        if layer is not None and layer != self._next:
            raise ConfigError(f"layer {layer} is out of order; the next is {self._next}")
        planes = sender.planes[self._next]
        while self._unsent:
            tile, placement = self._unsent[0]
            part = Written(placement.shape, placement.dtype, partial(placement.gather, planes))
            key = tile_key(self._request_id, self._next, tile)
            self._put(key, part, readers=self._readers * len(tile.targets))
            self._unsent.pop(0)
        self._next += 1
        self._unsent = list(self._tiles)

    def send_all(self) -> None:
        """Send all layers that are left."""
        while self._next < self._sender.layers.stop:
            self.send_layer()

    def fail(self, reason: str) -> None:
        """Say that the layers not sent yet will not come; the consumers get what was sent, then the reason."""
        if self._next < self._sender.layers.stop:
            for tile, _ in self._unsent:
                self._sender.connector.fail(tile_key(self._request_id, self._next, tile), reason)
            self._next = self._sender.layers.stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sender.connector.closed:
            self.fail("the producer stopped early" if error is None else f"{type(error).__name__}: {error}")


def _plain(spec: KVSpec) -> dict[str, Any]:
    return {**asdict(spec), "pp_ranges": [list(span) for span in spec.pp_ranges]}
