"""Who may hold a key, by what metadata, the runtime's peers and the host's folder say; and what they must be told."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from omni_connector_core.context import TransportContext
from omni_connector_core.errors import IncompatibleMetadataError, PeerLostError
from omni_connector_core.metadata import Where
from omni_connector_core.onesided.discovery import Directory, Watch
from omni_connector_core.onesided.messages import Cleanup, Scope, new_number
from omni_connector_core.recent import Recent

__all__ = ["Producers", "Whereabouts"]

_BATCH = 500
"""How many request ids fit into a message for certain."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A producer that may be asked.

    Attributes
    ----------
    address
        ``host:port`` of its control server.
    instance
        Which connector is meant; empty: any at that address.
    producer
        Its replica and rank; None: not known.
    certain
        It is known to have been there, so that its silence means that it is lost; else it may still come.
    """

    address: str
    instance: str = ""
    producer: tuple[int, int] | None = None
    certain: bool = False

    def __str__(self) -> str:
        who = "a producer" if self.producer is None else f"replica {self.producer[0]} rank {self.producer[1]}"
        return f"{who} at {self.address}"


class Producers:
    """Finds the producers of one edge."""

    def __init__(self, context: TransportContext) -> None:
        self.scope = Scope(context.backend, context.namespace, *context.edge)
        self._peers = [
            Whereabouts(address, producer=(peer.replica, peer.rank))
            for peer, address in context.peers.items()
            if peer.stage == context.edge.producer
        ]
        self._directory: Directory | None = None
        self._watches: list[Watch] = []
        self._closed = False
        self._lost: set[tuple[int, int]] = set()
        self._abandoned: Recent[str, None] = Recent()
        self._abandoned_lock = threading.Lock()
        self._informed: Recent[str, None] = Recent()

    @property
    def directory(self) -> Directory:
        """The edge's folder on this host, made on first use."""
        if self._directory is None:
            self._directory = Directory.of(self.scope)
        return self._directory

    def find(self, where: Where) -> list[Whereabouts]:
        """Say whom to ask, now.

        Raises
        ------
        IncompatibleMetadataError
            The metadata's own part is damaged.
        PeerLostError
            One producer is meant, it died, and no other of the same replica and rank has come.
        """
        if where.at is not None:
            return [_from_metadata(where)]
        living, dead = self.directory.producers()
        self._lost.update((found.replica, found.rank) for found in dead)
        self._lost.difference_update((found.replica, found.rank) for found in living)
        here = [
            Whereabouts(found.address, found.instance, (found.replica, found.rank), certain=True) for found in living
        ]
        known = {place.address for place in here}
        far = [place for place in self._peers if place.address not in known]
        places = [p for p in here + far if where.producer is None or p.producer == where.producer]
        if where.hint is not None:
            host, port = where.hint
            hinted = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if hinted not in known and all(place.address != hinted for place in far):
                places.append(Whereabouts(hinted))
        if not places and where.producer in self._lost:
            raise PeerLostError(f"{where.producer} died, and none has come in its place")
        return places

    def lost(self, where: Whereabouts) -> None:
        """Remember that a producer is lost: who means that one need not wait for it."""
        if where.producer is not None:
            self._lost.add(where.producer)

    def take_watch(self) -> Watch:
        """Lend a watch on the folder; give it to `put_back_watch`. Closing one takes milliseconds, so they are kept."""
        try:
            return self._watches.pop()
        except IndexError:
            return Watch(self.directory)

    def put_back_watch(self, watch: Watch) -> None:
        """Take a watch back."""
        self._watches.append(watch)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close the watches, and each lent one when it comes back."""
        self._closed = True
        while self._watches:
            self._watches.pop().close()

    # ---- what a producer that comes later must know

    def abandon(self, request_id: str) -> None:
        """Remember a request that was cleaned up here, for as long as producers do."""
        with self._abandoned_lock:
            self._abandoned.note(request_id, None)

    def news_for(self, where: Whereabouts) -> list[Cleanup]:
        """Return what is to be said to a producer before the first question."""
        name = where.instance or where.address
        with self._abandoned_lock:
            if name in self._informed:
                return []
            self._informed.note(name, None)
            names = list(self._abandoned)
        return [Cleanup(new_number(), self.scope, names[n : n + _BATCH]) for n in range(0, len(names), _BATCH)]


def _from_metadata(where: Where) -> Whereabouts:
    assert where.at is not None
    address, instance = where.at.get("address"), where.at.get("instance")
    if not isinstance(address, str) or not isinstance(instance, str) or ":" not in address or not instance:
        raise IncompatibleMetadataError("the metadata is damaged: it has no control address")
    return Whereabouts(address, instance, where.producer, certain=True)
