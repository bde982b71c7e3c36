"""How the two ends of an edge find each other in a store, and how a consumer notices that a producer is gone.

Each producer claims a slot, the first that is free, and writes there who it is. A consumer looks at a window of slots that
reaches `WINDOW` beyond the last one that it found taken. A producer is gone when its process is (seen at once on the
same host), when its slot is, or when its heartbeat did not rise for `SILENCE_S`.

A store that was restarted has forgotten every slot, and producers claim new ones as soon as they notice. A consumer tells
that from a producer's leaving by its witness (`omni_connector_core.store.witness`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, PeerLostError, TransferTimeoutError
from omni_connector_core.key import Producer
from omni_connector_core.store.names import Names
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.reading import load_readable
from omni_connector_core.store.records import Beat, Slot, unpack
from omni_connector_core.store.witness import Witness

__all__ = ["Directory", "loss"]

WINDOW = 32
"""Free slots that are looked at behind the last taken one: so many producers may leave at once and hide nobody."""
REJOIN_S = 15.0
"""How long producers have to claim new slots after the store was restarted, seconds; until then none is given up."""
SILENCE_S = 5.0
"""A producer of another host whose heartbeat (one a second) did not rise for so long is dead."""
LOOK_S = 1.0
"""Longest time before a look that counts as silence: nobody looks at who is well, and one look that fails says little."""


@dataclass(slots=True)
class _Pulse:
    """The heartbeat of a producer of another host, as this process saw it."""

    looked_s: float
    silent_s: float = 0.0
    count: int | None = None
    risen: bool = False


class Directory:
    """The producers of one edge. Thread-safe.

    Attributes
    ----------
    known
        Who was there at the last `refresh`, dead or alive, by slot number.
    refreshed_s
        When that was.
    """

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self.names = names
        self._store = store
        self.known: dict[int, Slot] = {}
        self.refreshed_s = -float("inf")
        self._taken: set[int] = set()
        self._alive: list[Producer] = []
        self._seen: dict[str, Slot] = {}
        self._silent: set[str] = set()
        self._lost: dict[str, tuple[Slot, float]] = {}
        self._pulses: dict[str, _Pulse] = {}
        self._witness = Witness(store, names)
        self._restarted_s = -float("inf")
        self._began_s = -float("inf")
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()

    def scan(self, deadline: Deadline) -> dict[int, Slot]:
        """Read every slot: 1 round trip to see which are taken, 1 to read those."""
        start, taken = 0, list[int]()
        witness, witnessed = self._witness.name, False
        end = WINDOW
        while start < end:
            numbers = range(start, end)
            asked = [self.names.slot(n) for n in numbers]
            if start == 0 and witness is not None:
                asked.append(witness)
            there = self._store.exist(asked, deadline=deadline)
            if len(there) > len(numbers):
                witnessed = there.pop()
            taken += [n for n, exists in zip(numbers, there, strict=True) if exists]
            start, end = end, (taken[-1] if taken else -1) + 1 + WINDOW
        asked = [self.names.slot(n) for n in taken] + ([] if witness is None else [witness])
        data = load_readable(self._store, asked, deadline)
        if witness is not None and self._witness.forgotten(witnessed, data.pop()):
            self._restarted_s = time.monotonic()
        self._taken = set(taken)
        slots = {}
        for number, raw in zip(taken, data, strict=True):
            # taken but not readable: its keeper does not answer, which says nothing of who it is
            slot = unpack(self.names.slot(number), raw, Slot) or self.known.get(number)
            if slot is not None:
                slots[number] = slot
        return slots

    def refresh(self, deadline: Deadline) -> None:
        """See who is there now; threads that ask at the same time share the answer.

        Round trips: 2, and 1 for each producer of another host.

        Raises
        ------
        TransferTimeoutError
            Another thread asks, and has no answer by the deadline; it learns why (a killed producer's slot, which lies in the
            producer's own memory, is waited for in vain until the store drops it).
        """
        asked_s = time.monotonic()
        if not self._refreshing.acquire(timeout=deadline.remaining_s() + 0.25):
            raise TransferTimeoutError(f"the store did not say within {deadline.timeout_s:g} s who is there")
        try:
            if self._began_s < asked_s:
                self._began_s = time.monotonic()
                self._refresh(deadline)
        finally:
            self._refreshing.release()

    def _refresh(self, deadline: Deadline) -> None:
        self._witness.keep(deadline)
        slots = self.scan(deadline)
        alive = {slot.incarnation: slot for slot in slots.values() if not self.gone(slot, deadline)}
        now = time.monotonic()
        with self._lock:
            for incarnation, slot in self._seen.items():
                if incarnation not in alive and incarnation not in self._lost and self._left(slot, slots):
                    self._lost[incarnation] = slot, now
            for incarnation, slot in alive.items():
                self._lost.pop(incarnation, None)
                if slot.process.here() or self._pulses[incarnation].risen:
                    self._seen[incarnation] = slot
            self.known = slots
            self._alive = [Producer(slot.replica, slot.rank) for slot in alive.values()]
            self.refreshed_s = now

    @property
    def all_here(self) -> bool:
        """Whether every producer that is known is a process of this host, who rings bells."""
        return all(slot.process.here() for slot in self.known.values())

    def doubt(self) -> None:
        """Take what is known for stale."""
        self.refreshed_s = -float("inf")

    def left(self, slot: Slot) -> bool:
        """Whether a producer has left, or died, as of the last refresh."""
        return self._left(slot, self.known)

    def _left(self, slot: Slot, slots: Mapping[int, Slot]) -> bool:
        if any(known.incarnation == slot.incarnation for known in slots.values()):
            return slot.process.dead() or slot.incarnation in self._silent
        return slot.process.dead() or time.monotonic() - self._restarted_s > REJOIN_S

    def close(self, deadline: Deadline) -> None:
        """Take the witness away."""
        self._witness.close(deadline)

    def stale(self, age_s: float) -> bool:
        """Whether the last refresh is longer ago than `age_s`."""
        return time.monotonic() - self.refreshed_s > age_s

    def newcomers(self, deadline: Deadline) -> bool:
        """Whether a slot is taken that was free at the last refresh; 1 round trip."""
        numbers = [n for n in range(max(self._taken, default=-1) + 1 + WINDOW) if n not in self._taken]
        return any(self._store.exist([self.names.slot(n) for n in numbers], deadline=deadline))

    def producers(self, wanted: Producer | None) -> list[Slot]:
        """Return the known producers, or the one that is wanted."""
        slots = list(self.known.values())
        return [s for s in slots if wanted is None or (s.replica, s.rank) == wanted]

    def lost(self, wanted: Producer | None, since_s: float) -> Slot | None:
        """Return a producer that this process saw alive and then saw go, after `since_s`, when none is left to wait for."""
        with self._lock:
            if any(wanted in (None, producer) for producer in self._alive):
                return None
            for slot, when_s in self._lost.values():
                if wanted in (None, (slot.replica, slot.rank)) and when_s >= since_s:
                    return slot
        return None

    def gone(self, slot: Slot, deadline: Deadline) -> bool:
        """Whether a producer's process has ended, as far as this process knows by now."""
        if slot.process.here():
            return slot.process.dead()
        name = self.names.owner(Producer(slot.replica, slot.rank), slot.incarnation).beat
        try:
            (data,) = load_readable(self._store, [name], deadline)
        except BackendUnavailableError:  # the host that keeps the heartbeat does not answer
            data = None
        beat = unpack(name, data, Beat)
        now = time.monotonic()
        with self._lock:
            pulse = self._pulses.setdefault(slot.incarnation, _Pulse(looked_s=now))
            pulse.silent_s += min(now - pulse.looked_s, LOOK_S)
            pulse.looked_s = now
            if beat is not None and beat.count != pulse.count:
                pulse.risen = pulse.count is not None
                pulse.count, pulse.silent_s = beat.count, 0.0
            silent = pulse.silent_s > SILENCE_S
            (self._silent.add if silent else self._silent.discard)(slot.incarnation)
            return silent


def loss(slot: Slot, store: ObjectStore) -> PeerLostError:
    """Return the error that says what is known of a producer that is not there any more."""
    who, process = f"replica {slot.replica} rank {slot.rank}", slot.process
    if process.here() and not process.dead():
        return PeerLostError(
            f"{who} closed its end, or the store dropped its payloads: its process {process.pid} lives, but may have been silent for "
            "too long",
            hint=f"If it was stopped or starved: it comes back by itself; raise {store.silence_option} to have the store wait longer. "
            "If it is well: the two are connected with different services, or as different tenants",
        )
    return PeerLostError(f"the process of {who} died, or closed its end")
