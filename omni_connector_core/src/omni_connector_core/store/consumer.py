"""The consuming end of an edge over a store. See `omni_connector_core.store.transport` for the protocol."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    AmbiguousKeyError,
    BackendUnavailableError,
    ClosedError,
    IncompatibleMetadataError,
    PeerLostError,
    RequestAbandonedError,
    TransferTimeoutError,
    error_from_code,
)
from omni_connector_core.key import Key, Producer
from omni_connector_core.metadata import Where
from omni_connector_core.store import notices, tickets
from omni_connector_core.store.bell import Listener
from omni_connector_core.store.book import MEMORY_OF_ENDINGS_S
from omni_connector_core.store.directory import Directory, loss
from omni_connector_core.store.names import Owner
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.patience import patiently
from omni_connector_core.store.reading import load_readable
from omni_connector_core.store.records import Count, Descriptor, Mail, Slot, pack, unpack
from omni_connector_core.transport import Memory

__all__ = ["ConsumerEnd"]

REFRESH_S = 0.1
"""How old a waiting consumer's knowledge of who produces may be, seconds."""
LOSS_S = 10.0
"""For how long a consumer that comes late is told that the only producer is gone, instead of waiting for another."""
FIRST_PAUSE_S = 100e-6
LONGEST_PAUSE_S = 20e-3
SLOW_PAUSE_S = 0.1
"""Longest pause when the store is slow to answer: asking takes a fifth of the time."""
WANTED_S = 60.0
"""How long a request to hand over lies in the store when nobody answers it, seconds."""
BATCH = 256
"""Names in one call."""


class _Source:
    """What a consumer knows of a producer.

    Attributes
    ----------
    slot, owner
        Who it is, and the names of what is its own.
    named
        Its producer and process, as metadata names them.
    tickets
        The folder of its tickets; None as long as it was not seen.
    decided_by_store
        Whether it has handed the decision about its reads over to the store.
    """

    __slots__ = ("decided_by_store", "named", "owner", "slot", "tickets")

    def __init__(self, slot: Slot, owner: Owner) -> None:
        self.slot = slot
        self.owner = owner
        self.named = ((slot.replica, slot.rank), msgspec.to_builtins(slot.process))
        self.tickets: str | None = None
        self.decided_by_store = False

    def look(self) -> str | None:
        """Look for its tickets."""
        folder = tickets.folder_of(self.slot)
        self.tickets = folder if folder is not None and os.path.isdir(folder) else None
        return self.tickets


_Payload = tuple[_Source, Descriptor]


class ConsumerEnd:
    """Reads from the producers of one edge. Thread-safe; remembers the directory, and what was cleaned up."""

    def __init__(self, store: ObjectStore, directory: Directory, *, outlives: bool) -> None:
        self.directory = directory
        self._store = store
        self._outlives = outlives
        self._abandoned: dict[str, float] = {}
        self._sources: dict[str, _Source] = {}
        self._listener = Listener(directory.names.scope)

    def get(self, key: Key, where: Where, deadline: Deadline, *, closed: Callable[[], bool]) -> Memory:
        """Take a frame, waiting for it to the deadline.

        It looks when the bell rings, and now and then; often, with a pause that grows, where a producer may be who does not ring.
        """
        began_s = time.monotonic()
        trouble: BackendUnavailableError | None = None
        while True:
            asked_s = time.monotonic()
            heard = self._listener.heard(key.request_id)
            try:
                memory, trouble = self.attempt(key, where, deadline), None
                if memory is not None:
                    return memory
            except BackendUnavailableError as error:
                trouble = error
            except TransferTimeoutError as error:
                raise trouble or error from error.__cause__
            now = time.monotonic()
            if closed():
                raise ClosedError("closed while waiting")
            if now >= deadline.at_s:
                raise trouble or TransferTimeoutError(f"not there after {deadline.timeout_s:g} s")
            pause_s = max(LONGEST_PAUSE_S, min(4 * (now - asked_s), SLOW_PAUSE_S))
            if trouble is not None or heard is None or not self.directory.all_here:
                pause_s = min(max(FIRST_PAUSE_S, (now - began_s) / 10), pause_s)
            if self._listener.wait(key.request_id, heard, min(pause_s, deadline.at_s - now)):
                self.directory.doubt()  # it may be a newcomer who rang

    def news(self) -> int | None:
        """See `omni_connector_core.transport.Transport.news`."""
        rung = self._listener.rung() if self.directory.all_here else None
        return None if rung is None else rung + (int(time.monotonic() / LONGEST_PAUSE_S) << 32)

    def close(self, deadline: Deadline) -> None:
        """Leave nothing behind."""
        self._listener.close()
        self.directory.close(deadline)

    def attempt(self, key: Key, where: Where, deadline: Deadline) -> Memory | None:
        """Take a frame if it is there."""
        if key.request_id in self._abandoned:
            raise RequestAbandonedError("the request was cleaned up")
        if where.at is None or where.producer is None:
            return self._by_key(key, where.producer, deadline)
        at = where.at
        try:
            source = self._sources.get(at["owner"])
            if source is None or source.named != (where.producer, at["process"]):
                source = self._source(msgspec.convert([*where.producer, at["owner"], at["process"]], Slot))
            descriptor = msgspec.convert(
                [at["generation"], where.nbytes, at["readers"], "", "", at["ticket"]], Descriptor
            )
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise IncompatibleMetadataError(f"the metadata is damaged: {error}") from error
        memory = self._take(source, descriptor, deadline)
        return memory if memory is not None else self._missing(key, source, deadline)

    def _by_key(self, key: Key, wanted: Producer | None, deadline: Deadline) -> Memory | None:
        directory = self.directory
        while True:
            known = directory.producers(wanted)
            found = self._look(key, known, deadline)
            living = [payload for payload in found if not payload[0].slot.process.dead()]
            if found and not living and directory.stale(REFRESH_S):
                directory.refresh(deadline)  # a successor may have the slot, and the key, of one that died
                continue
            if found and wanted is None and directory.newcomers(deadline):
                directory.refresh(deadline)
                continue
            found = living or found
            if len(found) > 1:
                found = self._unread(found, deadline)
            if len(found) > 1:
                names = sorted(f"replica {source.slot.replica} rank {source.slot.rank}" for source, _ in found)
                raise AmbiguousKeyError(f"held by {' and by '.join(names)}")
            if found:
                return self._take(*found[0], deadline)
            if not directory.stale(REFRESH_S):
                return None
            directory.refresh(deadline)
            if {s.incarnation for s in directory.producers(wanted)} <= {s.incarnation for s in known}:
                break
        lost = directory.lost(wanted, since_s=time.monotonic() - LOSS_S)
        if lost is not None:
            raise loss(lost, self._store)
        return None

    def _missing(self, key: Key, source: _Source, deadline: Deadline) -> Memory | None:
        """Find out what became of a payload that is not where its metadata says."""
        slot = source.slot
        found = self._look(key, [slot], deadline)
        if found:  # overwritten, or read by others and the producer has not noticed, or only half created
            return self._take(*found[0], deadline)
        if self.directory.stale(REFRESH_S):
            self.directory.refresh(deadline)
        if self.directory.left(slot):
            raise loss(slot, self._store)
        return None

    def _look(self, key: Key, slots: Sequence[Slot], deadline: Deadline) -> list[_Payload]:
        """Return who says that the key is live; raise its ending when all who know it say that it ended."""
        sources = [self._source(slot) for slot in slots]
        names = [n for s in sources for n in (s.owner.descriptor(key), s.owner.abandoned(key.request_id))]
        data = load_readable(self._store, names, deadline)
        found: list[_Payload] = []
        endings: list[_Payload] = []
        records = [unpack(name, raw, Descriptor) for name, raw in zip(names, data, strict=True)]
        for source, of_key, abandoned in zip(sources, records[::2], records[1::2], strict=True):
            descriptor = abandoned or of_key
            if descriptor is not None:
                (endings if descriptor.ending else found).append((source, descriptor))
        if endings and not found:
            raise error_from_code(endings[0][1].ending, endings[0][1].message)
        return found

    def _unread(self, found: list[_Payload], deadline: Deadline) -> list[_Payload]:
        """Keep those whose payload is still there: a descriptor outlives its payload by a moment."""
        unread = self._are_unread(found, deadline)
        return [payload for payload, left in zip(found, unread, strict=True) if left]

    def _take(self, source: _Source, descriptor: Descriptor, deadline: Deadline) -> Memory | None:
        """Read a payload, then take one read of it; None when somebody else had the last one."""
        slot, owner, store = source.slot, source.owner, self._store
        if not self._outlives and slot.process.dead():
            raise PeerLostError(f"the process of replica {slot.replica} rank {slot.rank} died")
        data = owner.data(descriptor.generation)
        folder = source.tickets or source.look() if descriptor.ticket else None
        if descriptor.ticket and folder is None and not self._handed_over(source, deadline):
            return None
        try:
            memory = store.read(data, descriptor.nbytes, shared=descriptor.readers > 1, deadline=deadline)
        except BackendUnavailableError as error:
            if self.directory.gone(slot, deadline):
                raise PeerLostError(f"the process of replica {slot.replica} rank {slot.rank} died") from error
            raise
        if memory is None:
            return None
        if folder is not None:
            if not tickets.take(folder, descriptor.generation):
                if source.look():
                    return None
                return self._take(source, descriptor, deadline)  # handed over meanwhile
            store.discard(data, deadline=deadline)
            return memory
        reads = owner.reads(descriptor.generation, descriptor.readers)
        random.shuffle(reads)
        if store.take(reads, deadline=deadline) is None:
            return None
        if descriptor.readers > 1 and not any(store.exist(reads, deadline=deadline)):
            store.remove([data], deadline=deadline)
        return memory

    def _handed_over(self, source: _Source, deadline: Deadline) -> bool:
        """Whether the store decides about reads of a producer whose tickets are out of sight; asks for it where it does not.

        Round trips: 1, until it does. A producer hands over within 0.3 s.
        """
        if source.decided_by_store:
            return True
        slot, owner = source.slot, source.owner
        over, asked = self._store.exist([owner.handed_over, owner.wanted], deadline=deadline)
        if over:
            source.decided_by_store = True
        elif self.directory.gone(slot, deadline):
            raise PeerLostError(f"the process of replica {slot.replica} rank {slot.rank} died")
        elif not asked:
            self._store.claim(owner.wanted, b"1", ttl_s=WANTED_S, deadline=deadline)
        return over

    def _are_unread(self, payloads: Sequence[_Payload], deadline: Deadline) -> list[bool]:
        """Say of each payload whether a read of it is left, as far as can be seen from here. 1 round trip a batch."""
        names = [source.owner.data(descriptor.generation) for source, descriptor in payloads]
        there = [answer for part in _batches(names) for answer in self._store.exist(part, deadline=deadline)]
        for number, (source, descriptor) in enumerate(payloads):
            folder = source.look() if descriptor.ticket and there[number] else None
            if folder:
                there[number] = tickets.is_there(folder, descriptor.generation)
        return there

    def exists(self, keys: Sequence[Key], where: Where, deadline: Deadline) -> list[bool]:
        """Say for each key whether some producer has it unread."""
        if self.directory.stale(REFRESH_S):
            self.directory.refresh(deadline)
        sources = [self._source(slot) for slot in self.directory.producers(where.producer)]
        if not sources:
            return [False] * len(keys)
        names = [source.owner.descriptor(key) for key in keys for source in sources]
        data = load_readable(self._store, names, deadline)
        found = [unpack(name, raw, Descriptor) for name, raw in zip(names, data, strict=True)]
        live = {n: (sources[n % len(sources)], d) for n, d in enumerate(found) if d is not None and not d.ending}
        unread = dict(zip(live, self._are_unread(list(live.values()), deadline), strict=True))
        answers = [unread.get(number, False) for number in range(len(found))]
        return [any(answers[n : n + len(sources)]) for n in range(0, len(answers), len(sources))]

    def cleanup(self, request_id: str, deadline: Deadline, *, but: str | None) -> int:
        """Ask every producer that lives, save the incarnation `but`, to discard a request; returns the sum of their counts.

        Takes as long as their keepers need to look into their mailboxes (`omni_connector_core.store.producer`).
        """
        self._abandon(request_id)
        patiently(lambda: notices.post(self._store, self.directory.names, request_id, deadline), deadline)
        patiently(lambda: self.directory.refresh(deadline), deadline)
        others = [s for s in self.directory.producers(None) if s.incarnation != but]
        waiting = {s.incarnation: (s, Mail(secrets.token_hex(8), request_id)) for s in others}
        unposted = set(waiting)
        count, pause_s = 0, FIRST_PAUSE_S
        while waiting:
            for incarnation, (slot, mail) in list(waiting.items()):
                owner = self._source(slot).owner
                if incarnation in unposted:
                    if patiently(partial(self._post, owner, mail, deadline), deadline):
                        unposted.discard(incarnation)
                        continue
                else:
                    counted = patiently(partial(self._answer, owner, mail, deadline), deadline)
                    if counted is not None:
                        count += counted.discarded
                        patiently(partial(self._store.remove, [owner.answer(mail.id)], deadline=deadline), deadline)
                        del waiting[incarnation]
                        continue
                if self.directory.gone(slot, deadline):
                    del waiting[incarnation]
            if waiting and deadline.expired():
                raise TransferTimeoutError(f"{len(waiting)} producers did not answer in {deadline.timeout_s:g} s")
            time.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        return count

    def _post(self, owner: Owner, mail: Mail, deadline: Deadline) -> bool:
        ttl_s = max(deadline.remaining_s(), 1.0)
        return self._store.claim(owner.mailbox, pack(owner.mailbox, mail), ttl_s=ttl_s, deadline=deadline)

    def _answer(self, owner: Owner, mail: Mail, deadline: Deadline) -> Count | None:
        name = owner.answer(mail.id)
        (data,) = load_readable(self._store, [name], deadline)
        return unpack(name, data, Count)

    def _abandon(self, request_id: str) -> None:
        """Let gets of this process end, also where no producer is there to say so."""
        now = time.monotonic()
        for request, until_s in list(self._abandoned.items()):
            if until_s <= now:
                self._abandoned.pop(request, None)
        self._abandoned[request_id] = now + MEMORY_OF_ENDINGS_S

    def _source(self, slot: Slot) -> _Source:
        source = self._sources.get(slot.incarnation)
        if source is None or source.slot != slot:
            if len(self._sources) >= BATCH:
                self._sources.clear()
            owner = self.directory.names.owner(Producer(slot.replica, slot.rank), slot.incarnation)
            source = self._sources[slot.incarnation] = _Source(slot, owner)
        return source


def _batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
