"""The consumer's side of a KV-cache flow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

import numpy as np

from omni_connector_core.connector import OmniConnector
from omni_connector_core.errors import (
    DecodeError,
    IncompatibleKVError,
    PayloadExpiredError,
    PeerLostError,
    ProducerFailedError,
)
from omni_connector_core.key import Key, Producer
from omni_connector_core.kv.cache import Placement, place, planes_by_layer
from omni_connector_core.kv.plan import Tile, head_key, plan, tile_key
from omni_connector_core.kv.send import HEAD_VERSION
from omni_connector_core.kv.spec import KVSpec, Rank, check_compatible
from omni_connector_core.metadata import Where

__all__ = ["KVReceive", "KVReceiver"]

LAYERS_AHEAD = 8
LARGE_TILE_NBYTES = 1 << 20
"""From here on the copies of two tiles side by side save more than handing one to another thread costs."""


class KVReceiver:
    """One consumer rank's cache, ready to be received into.

    Parameters
    ----------
    connector
        The consuming end of the edge.
    spec
        This side, with this rank in it.
    producer
        The other side; its rank does not matter.
    caches
        This rank's layers, in order: each a CPU tensor or array of the spec's layout (for ``separate`` a pair).

    Raises
    ------
    IncompatibleKVError
        The sides cannot be bridged, or a cache is not what the spec says.
    """

    def __init__(self, connector: OmniConnector, spec: KVSpec, producer: KVSpec, caches: Sequence[Any]) -> None:
        check_compatible(producer, spec)
        self.connector, self.spec, self.producer = connector, spec, producer
        self.rank = spec.rank
        self.layers = spec.pp_ranges[self.rank.pp]
        self.planes = planes_by_layer(spec, caches)
        if connector.capabilities.direct_get_into:
            for cache in caches:
                for part in cache if spec.layout == "separate" else [cache]:
                    connector.register(part)

    def open(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        replica: int | None = None,
        timeout: float | None = None,
    ) -> KVReceive:
        """Begin to receive one request's cache.

        Parameters
        ----------
        block_ids
            The blocks of this rank's cache to receive into, in order of this rank's tokens.
        num_tokens
            Tokens of the request over all sequence-parallel ranks.
        replica
            Which replica of the producing stage serves the request; None: whichever has it.
        timeout
            Seconds for the whole transfer; None: the option `timeout_s`.
        """
        return KVReceive(self, request_id, block_ids, num_tokens, replica=replica, timeout=timeout)


class KVReceive:
    """One request's cache on its way in; made by `KVReceiver.open`.

    Iterate over it to get each layer's number as soon as that layer is complete, or call `all`. A context manager: leaving it
    before the last layer abandons the request on this edge, and everything that was sent for it is freed on both sides. When it
    was the named `replica` that ended the flow, the request is not abandoned, so that another may send it; what the failed one's
    other ranks have sent is theirs to clean up, or expires.
    """

    def __init__(
        self,
        receiver: KVReceiver,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        replica: int | None,
        timeout: float | None,
    ) -> None:
        self._receiver, self._request_id, self._replica = receiver, request_id, replica
        self._block_ids = list(block_ids)
        self._deadline = receiver.connector.deadline(timeout)
        spec, rank = receiver.spec, receiver.rank
        self._plan = plan(receiver.producer, spec, num_tokens)
        self._tiles = place(spec, self._plan.needed_by(rank), block_ids, num_tokens)
        self.num_tokens = len(spec.tokens_of(rank.sp, num_tokens))
        """Tokens of this rank: what it may reuse once all layers are here."""
        copiers = min(len(self._tiles), os.cpu_count() or 1) if self._large() else 1
        self._threads = ThreadPoolExecutor(copiers - 1, "omni-connector-kv") if copiers > 1 else None
        self._next = receiver.layers.start
        self._expected = receiver.layers.start
        self._greeted = False
        self._ended_there = False

    @property
    def layers_received(self) -> int:
        """How many of this rank's layers are complete."""
        return self._next - self._receiver.layers.start

    @property
    def complete(self) -> bool:
        """Whether all layers of this rank are here."""
        return self._next == self._receiver.layers.stop

    @property
    def invalid_blocks(self) -> list[int]:
        """Blocks whose contents must not be used: all of the request's until every layer is here, then none."""
        return [] if self.complete else list(self._block_ids)

    @property
    def reuse_length(self) -> int:
        """Tokens that this rank may reuse: its own range's once all layers are here, else 0."""
        return self.num_tokens if self.complete else 0

    def __iter__(self) -> Iterator[int]:
        while not self.complete:
            yield self.receive_layer()

    def all(self) -> int:
        """Receive what is left; returns the reuse length, in tokens."""
        for _ in self:
            pass
        return self.reuse_length

    def receive_layer(self) -> int:
        """Wait for the next layer and copy it into the cache: one copy, none besides where the backend reads directly.

        Returns
        -------
        int
            The layer's number in the model.

        Raises
        ------
        IncompatibleKVError
            The producer's cache, or its idea of this side, is another than this side was told. Nothing was copied.
        ProducerFailedError, PeerLostError, RequestAbandonedError, PayloadExpiredError, TransferTimeoutError
            The layer does not come; see `invalid_blocks`.
        """
        layer = self._next
        try:
            self._greet()
            self._expect()
            self._receive_all(layer)
        except (ProducerFailedError, PeerLostError, PayloadExpiredError):
            self._ended_there = True
            raise
        self._next += 1
        if self.complete:
            self._end_threads()
        return layer

    def _receive_all(self, layer: int) -> None:
        """Receive a layer's tiles, those of several producer ranks side by side: their copies run without the GIL."""
        if self._threads is None:
            for tile, placement in self._tiles:
                self._receive(layer, tile, placement)
            return
        others = [self._threads.submit(self._receive, layer, *tile) for tile in self._tiles[1:]]
        try:
            self._receive(layer, *self._tiles[0])
        finally:
            wait(others)  # whatever fails, nobody writes to the cache once this returns
        for other in others:
            other.result()

    def _receive(self, layer: int, tile: Tile, placement: Placement) -> None:
        receiver, connector = self._receiver, self._receiver.connector
        planes = receiver.planes[layer]
        key = tile_key(self._request_id, layer, tile)
        producer = self._producer(Rank(tile.source[0], self._pp_of(layer), tile.source[1]))
        timeout = self._deadline.remaining_s()
        pieces = placement.pieces(planes) if connector.capabilities.direct_get_into else None
        if pieces is not None:
            connector.get_into(key, pieces, timeout=timeout, producer=producer)
            return
        part = connector.get(key, timeout=timeout, producer=producer)
        if not (isinstance(part, np.ndarray) and part.shape == placement.shape and part.dtype == placement.dtype):
            raise DecodeError(f"the payload is not the part of layer {layer} that was planned", key=key)
        placement.scatter(planes, part)

    def _large(self) -> bool:
        return all(placement.nbytes >= LARGE_TILE_NBYTES for _, placement in self._tiles)

    def _end_threads(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _greet(self) -> None:
        """Compare what the producers say of themselves with what this side was told, before any bytes move."""
        if self._greeted:
            return
        receiver = self._receiver
        for rank in self._plan.producers_for(receiver.rank):
            key = head_key(self._request_id, rank)
            head = receiver.connector.get(key, timeout=self._deadline.remaining_s(), producer=self._producer(rank))
            if not isinstance(head, dict) or head.get("version") != HEAD_VERSION:
                raise IncompatibleKVError(
                    "the producer speaks another version of the KV flow", field="version", key=key
                )
            for side, ours in (("producer", receiver.producer.group()), ("consumer", receiver.spec.group())):
                theirs = KVSpec(**{**head[side], "pp_ranges": tuple(head[side]["pp_ranges"])}).group()
                if side == "producer":
                    check_compatible(theirs, receiver.spec)
                _same_group(side, theirs, ours)
            if head["num_tokens"] != self._plan.num_tokens:
                raise IncompatibleKVError(
                    f"the producer sends {head['num_tokens']} tokens, this side expects {self._plan.num_tokens}",
                    field="num_tokens",
                    key=key,
                )
        self._greeted = True

    def _expect(self) -> None:
        """Announce layers, half of `LAYERS_AHEAD` at a time, so that they are under way while earlier ones are copied."""
        if self._expected > self._next + LAYERS_AHEAD // 2:
            return
        last = min(self._next + LAYERS_AHEAD, self._receiver.layers.stop)
        for producer, keys in self._by_producer(self._expected, last).items():
            self._receiver.connector.transport.expect(keys, Where(producer=producer))
        self._expected = last

    def _by_producer(self, first: int, stop: int) -> dict[Producer | None, list[Key]]:
        """List the parts of some layers by who sends them; None: any replica may."""
        keys: dict[Producer | None, list[Key]] = {}
        for layer, (tile, _) in itertools.product(range(first, stop), self._tiles):
            producer = self._producer(Rank(tile.source[0], self._pp_of(layer), tile.source[1]))
            keys.setdefault(producer, []).append(tile_key(self._request_id, layer, tile))
        return keys

    def _producer(self, rank: Rank) -> Producer | None:
        return None if self._replica is None else Producer(self._replica, self._receiver.producer.number_of(rank))

    def _pp_of(self, layer: int) -> int:
        return next(pp for pp, span in enumerate(self._receiver.producer.pp_ranges) if span.start <= layer < span.stop)

    def close(self) -> None:
        """Give the request up unless it is complete; idempotent."""
        connector = self._receiver.connector
        self._end_threads()
        if self.complete or connector.closed:
            return
        for producer, keys in self._by_producer(self._next, self._expected).items():
            for key in keys:
                connector.forget(key, producer=producer)
        if self._replica is None or not self._ended_there:
            connector.cleanup(self._request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _same_group(side: str, theirs: KVSpec, ours: KVSpec) -> None:
    for field in ("tp_size", "pp_ranges", "sp_size"):
        if getattr(theirs, field) != getattr(ours, field):
            raise IncompatibleKVError(
                f"the two sides disagree about the {side}'s {field}: {getattr(theirs, field)} at the producer, "
                f"{getattr(ours, field)} at the consumer",
                field=field,
            )
