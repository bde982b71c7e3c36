"""A producer's place in the store: the slot through which consumers find it, and the heartbeat by which they see that it lives."""

from __future__ import annotations

import time

from omni_connector_core.deadline import Deadline
from omni_connector_core.key import Producer
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Owner
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.records import Beat, Slot, pack

__all__ = ["BEAT_S", "Presence"]

BEAT_S = 1.0
"""Longest time between two heartbeats, seconds."""


class Presence:
    """The slot and the heartbeat of one open producer; both are there when this is made.

    Attributes
    ----------
    slot_name
        Where its slot lies now.
    """

    def __init__(
        self, store: ObjectStore, directory: Directory, slot: Slot, owner: Owner, *, deadline: Deadline
    ) -> None:
        self._store = store
        self._directory = directory
        self._slot = slot
        self._owner = owner
        self._beats = 0
        self._beat_at_s = 0.0
        self.slot_name = self.join(deadline)

    def join(self, deadline: Deadline) -> str:
        """Beat, claim a slot, and clear up after an earlier incarnation of this replica and rank; returns the slot's name."""
        self.beat(deadline)
        store, directory, slot = self._store, self._directory, self._slot
        for number, other in directory.scan(deadline).items():
            same = (other.replica, other.rank) == (slot.replica, slot.rank)
            if same and other.incarnation != slot.incarnation and directory.gone(other, deadline):
                store.remove([directory.names.slot(number)], deadline=deadline)
                prefix = directory.names.owner(Producer(other.replica, other.rank), other.incarnation).prefix
                store.purge(prefix, deadline=deadline)
        number = 0
        while True:
            name = directory.names.slot(number)
            if store.claim(name, pack(name, slot), ttl_s=0, deadline=deadline):
                self.slot_name = name
                return name
            number += 1

    def tend(self, deadline: Deadline) -> None:
        """Beat, when it is time to."""
        if time.monotonic() - self._beat_at_s >= BEAT_S * 0.9:
            self.beat(deadline)

    def beat(self, deadline: Deadline) -> None:
        """Show that the producer lives."""
        self._beats += 1
        name = self._owner.beat
        self._store.replace(name, pack(name, Beat(self._beats)), ttl_s=0, deadline=deadline)
        self._beat_at_s = time.monotonic()
