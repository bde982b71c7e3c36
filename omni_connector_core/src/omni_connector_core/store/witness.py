"""How a consumer tells that a store was restarted from a producer's leaving.

A store that was restarted has forgotten every slot, and producers claim new ones as soon as they notice. A *witness* is a small object
of a consumer's own that is there as long as the store remembers. It lies in one of `PLACES` numbered places of the edge and says
whose it is, so that one of a process that died is found: by the next consumer of its host, and by a producer that closes. It
is renewed while the consumer looks, and expires by itself where the store can do that.
"""

from __future__ import annotations

import random
import secrets
import time

from omni_connector_core.deadline import Deadline
from omni_connector_core.liveness import this_process
from omni_connector_core.store.names import Names
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.reading import load_readable
from omni_connector_core.store.records import Owned, pack, unpack

__all__ = ["PLACES", "TTL_S", "Witness", "sweep"]

PLACES = 256
"""One call asks for all of them (0.13 ms on Mooncake). What finds none free has a name of its own, which nobody sweeps."""
TTL_S = 3600.0
"""So long a witness stays in a store that expires by itself; it is renewed at half of that."""


class Witness:
    """One consumer's witness. Not thread-safe.

    Attributes
    ----------
    name
        Of its object; None before `keep`, and when it is gone.
    """

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self.name: str | None = None
        self._store = store
        self._names = names
        self._owned = Owned(this_process(), secrets.token_hex(8))
        self._at_s = -float("inf")

    def keep(self, deadline: Deadline) -> None:
        """Make it, or renew it when half of its time is over. Round trips: 4 to make it, else seldom 1."""
        now = time.monotonic()
        if self.name is None:
            self.name, self._at_s = self._make(deadline), now
        elif TTL_S / 2 < now - self._at_s < TTL_S:
            self._store.replace(self.name, pack(self.name, self._owned), ttl_s=TTL_S, deadline=deadline)
            self._at_s = now

    def _make(self, deadline: Deadline) -> str:
        free = sweep(self._store, self._names, deadline)
        random.shuffle(free)
        for name in free:
            if self._store.claim(name, pack(name, self._owned), ttl_s=TTL_S, deadline=deadline):
                return name
        name = self._names.witness(secrets.token_hex(8))
        self._store.replace(name, pack(name, self._owned), ttl_s=TTL_S, deadline=deadline)
        return name

    def forgotten(self, there: bool, data: bytes | None) -> bool:
        """Whether the store has forgotten it, and so was restarted.

        Parameters
        ----------
        there, data
            Whether its object exists, and what could be read of it: after a restart another's may have its place.
        """
        found = None if self.name is None else unpack(self.name, data, Owned)
        if there and found in (None, self._owned):
            return False
        self.name = None
        return time.monotonic() - self._at_s < TTL_S  # else it expired

    def close(self, deadline: Deadline) -> None:
        """Take it away."""
        if self.name is None:
            return
        (data,) = load_readable(self._store, [self.name], deadline)
        if unpack(self.name, data, Owned) == self._owned:
            self._store.remove([self.name], deadline=deadline)


def sweep(store: ObjectStore, names: Names, deadline: Deadline) -> list[str]:
    """Remove the witnesses of processes of this host that died; returns the places that are free then.

    Round trips: 1, and 1 to read those that there are.
    """
    places = [names.witness(str(number)) for number in range(PLACES)]
    there = store.exist(places, deadline=deadline)
    taken = [place for place, exists in zip(places, there, strict=True) if exists]
    if not taken:
        return places
    data = load_readable(store, taken, deadline)
    found = [unpack(place, raw, Owned) for place, raw in zip(taken, data, strict=True)]
    dead = [place for place, owned in zip(taken, found, strict=True) if owned is not None and owned.process.dead()]
    if dead:
        store.remove(dead, deadline=deadline)
    return [place for place in places if place in dead or place not in taken]
