"""The producing end of an edge over a store: puts, endings, and the thread that keeps the store tidy.

See `omni_connector_core.store.transport` for the protocol.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    CapacityError,
    ClosedError,
    OmniConnectorError,
    PayloadConflictError,
    PayloadExpiredError,
    PayloadTooLargeError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.frame import Frame
from omni_connector_core.key import Key, Producer
from omni_connector_core.liveness import this_process
from omni_connector_core.recent import MEMORY_OF_ENDINGS_S
from omni_connector_core.store import notices, witness
from omni_connector_core.store.bell import Bells
from omni_connector_core.store.book import Book, Entry
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.mailbox import Mailbox
from omni_connector_core.store.objects import NewObject, NoRoomError, ObjectStore
from omni_connector_core.store.patience import patiently
from omni_connector_core.store.presence import BEAT_S, Presence
from omni_connector_core.store.records import Descriptor, Slot, pack
from omni_connector_core.store.tickets import Tickets

__all__ = ["ProducerEnd"]

log = logging.getLogger(__name__)

BUSY_TICK_S, TICK_S = 0.05, 0.25
"""How often the keeper looks into its mailbox, with payloads pending and without; a consumer's cleanup waits for that."""
IDLE_S = 5.0
"""So long after the last payload was pending, the keeper looks at every heartbeat only."""
SETTLE_S = 0.25
"""How often the keeper looks which payloads were read."""
KEEPER_CALL_S = 5.0
"""Deadline of each of the keeper's own calls."""
SLACK_S = 60.0
"""How much longer than its ttl a payload may live in a store that expires by itself."""
BATCH = 512
"""Names in one call."""
FIRST_PAUSE_S = 1e-3
LONGEST_PAUSE_S = 0.05


class ProducerEnd:
    """One open producer. Thread-safe; joins the edge when it is made.

    Round trips of a put: 1 (`ObjectStore.create` of payload, reads and descriptor together). Of a put over a key that was
    put before: 1 more to see whether that is still unread, and 1 to switch the descriptor.
    """

    def __init__(self, store: ObjectStore, directory: Directory, producer: Producer, *, deadline: Deadline) -> None:
        self._store = store
        self._directory = directory
        self.slot = Slot(*producer, secrets.token_hex(8), this_process())
        self.owner = directory.names.owner(producer, self.slot.incarnation)
        self.book = Book()
        self._bells = Bells(directory.names.scope)
        self._tickets = Tickets(self.slot, wanted=store.tickets)
        self._process = list(msgspec.structs.astuple(self.slot.process))
        self._handed_over: list[int] = []
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._tick_at_s = self._settled_s = 0.0
        self._recovering = threading.Lock()
        self._presence = Presence(store, directory, self.slot, self.owner, deadline=deadline)
        self._mailbox = Mailbox(store, self.owner)
        for request_id in notices.read(store, directory.names, deadline):
            self.book.abandon(request_id)
        self._keeper = threading.Thread(target=self._keep, name="omni-connector-store-keeper", daemon=True)
        self._keeper.start()
        # also when the process ends unclosed: a thread that is in an SDK's call when the interpreter goes aborts the process
        self._end_keeper = weakref.finalize(self, _end, self._closing, self._wake, self._keeper)

    # ---- for the transport -------------------------------------------------------------------------------------

    def put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        """Put a frame; returns what leads a consumer straight to it."""
        book, owner, store = self.book, self.owner, self._store
        book.check(key)
        book.hold(key)
        try:
            old = book.live.get(key)
            if old is not None and not self._are_unread([old], deadline)[0]:
                self.book.end(key)
                old = None
            if old is not None and not overwrite:
                raise PayloadConflictError("an earlier payload of this key is still unread")
            described = old is not None or key in book.endings
            generation = next(book.generations)
            ticket = readers == 1 and self._tickets.open and self._tickets.issue(generation)
            described_by = owner.descriptor(key)
            descriptor = pack(described_by, Descriptor(generation, frame.nbytes, readers, ticket=ticket))
            objects = [NewObject(owner.data(generation), frame)]
            if readers > 1:
                objects += [NewObject(name, b"1") for name in owner.reads(generation, readers)]
            if not described:
                objects.append(NewObject(described_by, descriptor))
            try:
                self._create(objects, key, ttl_s=ttl_s, deadline=deadline)
            except OmniConnectorError:
                self._tickets.take(generation)
                raise
            now = time.monotonic()
            entry = Entry(key, generation, frame.nbytes, readers, now, now + ttl_s)
            if described:
                try:
                    store.replace(described_by, descriptor, ttl_s=ttl_s + SLACK_S, deadline=deadline)
                except OmniConnectorError:
                    self.book.unreserve(entry.nbytes)
                    self._discard([entry], Deadline(KEEPER_CALL_S))
                    raise
            self._bells.ring(key.request_id)
            if old is not None:
                self._discard([old], deadline)
            book.add(entry)
        finally:
            book.release((key,))
        if key.request_id in book.abandoned:  # cleanup came while the bytes were on their way and did not see the key
            self._end(key, RequestAbandonedError("the request was cleaned up"), deadline)
            book.check(key)
        if entry.expires_s < self._tick_at_s:
            self._wake.set()
        return {
            "owner": self.slot.incarnation,
            "process": [*self._process],
            "generation": generation,
            "readers": readers,
            "ticket": ticket,
        }

    def fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        """End a key."""
        self._end(key, ProducerFailedError(reason), deadline)

    def cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        """Discard a request; returns how many unread payloads it had. What a call that raised left, the next one finishes."""
        keys = self.book.abandon(request_id)
        name, ttl_s = self.owner.abandoned(request_id), MEMORY_OF_ENDINGS_S
        mark = pack(name, Descriptor(ending=RequestAbandonedError.__name__, message="the request was cleaned up"))
        patiently(lambda: self._store.replace(name, mark, ttl_s=ttl_s, deadline=deadline), deadline)
        self._bells.ring(request_id)
        count = 0
        for key in keys:
            with self.book.changing(key):
                entry = self.book.live.get(key)
                if entry is not None:
                    count += patiently(partial(self._discard, [entry], deadline), deadline)
        patiently(lambda: self._remove([self.owner.descriptor(key) for key in keys], deadline), deadline)
        for key in keys:
            self.book.forget(key)
        return count

    def unread(self, keys: Sequence[Key], *, deadline: Deadline) -> list[bool]:
        """Say of each key whether its payload is still unread."""
        return self._are_unread([self.book.live.get(key) for key in keys], deadline)

    def _are_unread(self, entries: Sequence[Entry | None], deadline: Deadline) -> list[bool]:
        left = [False if entry is None else self._tickets.left(entry.generation) for entry in entries]
        reads = [
            self._reads(e) if e is not None and known is None else [] for e, known in zip(entries, left, strict=True)
        ]
        there = iter(self._exist([name for names in reads for name in names], deadline))
        return [
            any(list(itertools.islice(there, len(names)))) if known is None else known
            for names, known in zip(reads, left, strict=True)
        ]

    def pending(self) -> list[Entry]:
        """Return the payloads that are unread, as far as it is known without asking the store."""
        return [entry for entry in self.book.entries() if self._tickets.left(entry.generation) is not False]

    def settle(self, deadline: Deadline) -> None:
        """Forget payloads that were read, and end those that expired; leaves alone what is being put."""
        entries = self.book.entries()
        there: list[bool] = []
        for start in range(0, len(entries), BATCH):
            names = [self.owner.data(entry.generation) for entry in entries[start : start + BATCH]]
            *found, known = self._store.exist([*names, self._presence.slot_name], deadline=deadline)
            if not known:  # nothing was read: the store forgot everything
                self._recover(deadline)
                return
            there += found
        now = self._settled_s = time.monotonic()
        taken = [exists and self._tickets.left(e.generation) is False for e, exists in zip(entries, there, strict=True)]
        unread = [exists and not gone for exists, gone in zip(there, taken, strict=True)]
        read = {e.key: e for e, left in zip(entries, unread, strict=True) if not left}
        due = {e.key: e for e, left in zip(entries, unread, strict=True) if left and e.expires_s <= now}
        with self.book.changing_idle(read) as held:
            gone = [key for key in held if self.book.live.get(key) is read[key]]
            self._remove([self.owner.descriptor(key) for key in gone], deadline)
            for key in gone:
                self._tickets.take(read[key].generation)
                self.book.forget(key)
        # for consumers that died between taking the ticket and discarding
        self._remove([self.owner.data(e.generation) for e, gone in zip(entries, taken, strict=True) if gone], deadline)
        for key, entry in due.items():
            with self.book.changing_idle([key]) as held:
                if held and self.book.live.get(key) is entry and self._discard([entry], deadline):
                    self.book.expired += 1
                    self._tell(key, PayloadExpiredError("nobody read it within its time-to-live"), deadline)
                    self.book.end(key)

    def close(self, deadline: Deadline) -> None:
        """Leave the edge and take along everything that was not read."""
        self._end_keeper()
        owner, book = self.owner, self.book
        entries = book.entries()
        self._tickets.close()
        names = [self._presence.slot_name, owner.beat, owner.wanted, owner.handed_over, *self._mailbox.names()]
        names += [name for entry in entries for name in self._names(entry)]
        names += [owner.descriptor(key) for key in {*book.live, *book.endings}]
        names += map(owner.abandoned, book.abandoned)
        self._remove(names, deadline)
        witness.sweep(self._store, self._directory.names, deadline)

    # ---- endings and removal -----------------------------------------------------------------------------------

    def _end(self, key: Key, error: OmniConnectorError, deadline: Deadline) -> None:
        with self.book.changing(key):
            self._tell(key, error, deadline)
            entry = self.book.live.get(key)
            if entry is not None:
                self._discard([entry], deadline)
            self.book.end(key)

    def _tell(self, key: Key, error: OmniConnectorError, deadline: Deadline) -> None:
        name = self.owner.descriptor(key)
        record = pack(name, Descriptor(ending=error.code, message=error.message))
        self._store.replace(name, record, ttl_s=MEMORY_OF_ENDINGS_S, deadline=deadline)
        self._bells.ring(key.request_id)

    def _discard(self, entries: Iterable[Entry], deadline: Deadline) -> int:
        """Take every read that is left; returns how many of the payloads had one."""
        count = 0
        for entry in entries:
            ticket = self._tickets.take(entry.generation)
            if ticket is not None:
                count += ticket
                self._store.remove([self.owner.data(entry.generation)], deadline=deadline)
                continue
            reads = self._reads(entry)
            taken = False
            while self._store.take(reads, deadline=deadline) is not None:
                taken = True
            count += taken
            if entry.readers > 1:
                self._store.remove([self.owner.data(entry.generation)], deadline=deadline)
        return count

    def _reads(self, entry: Entry) -> list[str]:
        return self.owner.reads(entry.generation, entry.readers)

    def _names(self, entry: Entry) -> list[str]:
        return [self.owner.data(entry.generation), *(self._reads(entry) if entry.readers > 1 else ())]

    # ---- the store ---------------------------------------------------------------------------------------------

    def _create(self, objects: list[NewObject], key: Key, *, ttl_s: float, deadline: Deadline) -> None:
        """Create objects, waiting for room to the deadline."""
        pause_s = FIRST_PAUSE_S
        nbytes, capacity = objects[0].nbytes, self._store.capacity_bytes
        if capacity is not None and nbytes > capacity:
            raise PayloadTooLargeError(
                f"{nbytes:,} bytes do not fit into {capacity:,}", hint="Raise the option capacity_bytes"
            )
        while True:
            if self.book.reserve(nbytes, capacity):
                try:
                    return self._store.create(objects, ttl_s=ttl_s + SLACK_S, deadline=deadline)
                except NoRoomError:
                    self.book.unreserve(nbytes)
                except OmniConnectorError:
                    self.book.unreserve(nbytes)
                    raise
            self.settle(deadline)
            if deadline.expired():
                raise CapacityError(f"no room for {nbytes:,} bytes in {deadline.timeout_s:g} s")
            time.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            if self._closing.is_set():
                raise ClosedError("closed while waiting for room")
            self.book.check(key)

    def _exist(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), BATCH):
            found += self._store.exist(names[start : start + BATCH], deadline=deadline)
        return found

    def _remove(self, names: Sequence[str], deadline: Deadline) -> None:
        for start in range(0, len(names), BATCH):
            self._store.remove(names[start : start + BATCH], deadline=deadline)

    # ---- the keeper -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Beat, answer mail, forget what was read, end what expired; in a thread of its own.

        Round trips: 1 a tick for the mailbox, 1 a second for the heartbeat; with payloads pending 1 for each 512 of them
        every `SETTLE_S`, and what there is to remove.
        """
        busy_s = time.monotonic()
        while not self._closing.is_set():
            try:
                self._tick(Deadline(KEEPER_CALL_S))
            except ClosedError:
                return
            except OmniConnectorError as error:
                log.debug("the store did not answer its keeper: %s", error)
            now = time.monotonic()
            entries = self.book.entries()
            if entries:
                busy_s = now
                self._tick_at_s = min(now + BUSY_TICK_S, max(min(e.expires_s for e in entries), now + 0.01))
            else:
                self._tick_at_s = now + (TICK_S if now - busy_s < IDLE_S else BEAT_S)
            self._wake.wait(self._tick_at_s - now)
            self._wake.clear()

    def _tick(self, deadline: Deadline) -> None:
        now = time.monotonic()
        asked = [self._presence.slot_name, self.owner.mailbox, self.owner.wanted]
        slot_there, mail_there, wanted = self._store.exist(asked, deadline=deadline)
        if not slot_there:
            self._recover(deadline)
        self._presence.tend(deadline)
        if mail_there:
            self._mailbox.answer(lambda request_id: self.cleanup(request_id, deadline=deadline), deadline)
        if wanted:
            self._hand_over(deadline)
        entries = self.book.entries()
        if entries and (now - self._settled_s >= SETTLE_S or min(e.expires_s for e in entries) <= now):
            self.settle(deadline)
        keys, requests = self.book.outdated()
        with self.book.changing_idle(keys) as held:
            gone = [key for key in held if key in self.book.endings]
            self._remove([self.owner.descriptor(key) for key in gone], deadline)
            for key in gone:
                self.book.forget(key)
        self._remove([self.owner.abandoned(request_id) for request_id in requests], deadline)
        for request_id in requests:
            self.book.readmit(request_id)
        self._mailbox.tidy(deadline)

    def _hand_over(self, deadline: Deadline) -> None:
        """Let the store decide about all reads, now that somebody comes who cannot see the tickets."""
        read = self._handed_over
        read += self._tickets.hand_over()
        while read:
            self._store.take([self.owner.data(read[-1])], deadline=deadline)
            read.pop()
        self._store.replace(self.owner.handed_over, b"1", ttl_s=0, deadline=deadline)
        self._store.remove([self.owner.wanted], deadline=deadline)

    def _recover(self, deadline: Deadline) -> None:
        """Join anew: the store was restarted, or had taken this process for dead; first tell what it lost."""
        with self._recovering:
            if self._store.exist([self._presence.slot_name], deadline=deadline)[0]:
                return  # another thread was faster
            log.warning(
                "the store lost this producer's entry (restarted, or this process was silent too long): joining it anew"
            )
            entries = self.book.entries()
            there = self._exist([self.owner.data(entry.generation) for entry in entries], deadline)
            lost = {entry.key: entry for entry, exists in zip(entries, there, strict=True) if not exists}
            with self.book.changing_idle(lost) as held:  # what is just being put anew needs no telling
                for key in held:
                    if self.book.live.get(key) is lost[key]:
                        self._tell(
                            key,
                            PeerLostError("the store lost it: it was restarted, or took the producer for dead"),
                            deadline,
                        )
                        self._tickets.take(lost[key].generation)
                        self.book.end(key)
            self._presence.join(deadline)


def _end(closing: threading.Event, wake: threading.Event, keeper: threading.Thread) -> None:
    closing.set()
    wake.set()
    keeper.join(KEEPER_CALL_S)
