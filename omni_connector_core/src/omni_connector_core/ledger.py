"""A producer's book of its payloads: who may read what, until when, and who waits for it.

A pure state machine, shared by every backend in which the producer holds the payload until it is read. It moves no bytes and
knows no socket: an `item` is whatever the backend needs to find a payload's memory, `free` gives that memory back, and a
waiting consumer is a callback.

States of a key::

    (nothing) --put--> live --claim x readers--> (nothing); the memory follows when the last claim is released
                         |--fail----> failed  --put--> live
                         |--expire--> expired --put--> live
                         '--cleanup-> abandoned (the whole request; puts are refused)

Failed, expired and abandoned are remembered for a while, so that a consumer that comes late learns why.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Generic

from omni_connector_core.claim import Claim, Entry, ItemT, Pending, Reader
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    ClosedError,
    OmniConnectorError,
    PayloadConflictError,
    PayloadExpiredError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.key import Key
from omni_connector_core.recent import MEMORY_OF_ENDINGS_S, Recent

__all__ = ["Ledger"]

STALE_EXPIRIES = 1000
"""So many expiries of payloads that are gone may stand in the book, beside one for each live payload."""


Deliver = Callable[["Claim[ItemT] | OmniConnectorError"], None]


class Ledger(Generic[ItemT]):
    """The book. Thread-safe; `free` and the deliveries to waiters are called without its lock held.

    Parameters
    ----------
    free
        Gives a payload's memory back, called once per item, when nobody can read it any more.
    endings_s
        For how long failures, expiries and abandoned requests are remembered, seconds.
    """

    def __init__(self, free: Callable[[ItemT], None], *, endings_s: float = MEMORY_OF_ENDINGS_S) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watchers = 0
        self._numbers = itertools.count(1)
        self._live: dict[Key, Entry[ItemT]] = {}
        self._by_request: dict[str, set[Key]] = {}
        self._claims: dict[int, Claim[ItemT]] = {}
        self._waiters: dict[Key, dict[Reader, Deliver[ItemT]]] = {}
        self._endings: Recent[Key, tuple[type[OmniConnectorError], str]] = Recent(endings_s)
        self._abandoned: Recent[str, None] = Recent(endings_s)
        self._expiries: list[tuple[float, int, Key]] = []
        self._closed = False
        self.expired = 0
        """How many payloads expired unread."""

    # ---- the producer's side

    def check(self, key: Key, *, overwrite: bool) -> None:
        """Raise what `publish` would raise, before the bytes are copied."""
        with self._lock:
            self._check(key, overwrite)

    def _check(self, key: Key, overwrite: bool) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")
        if key.request_id in self._abandoned:
            raise RequestAbandonedError("the request was cleaned up; nothing more is taken for it")
        if not overwrite and key in self._live:
            raise PayloadConflictError("an earlier payload of this key is still unread")

    def publish(self, key: Key, item: ItemT, *, nbytes: int, readers: int, ttl_s: float, overwrite: bool) -> int:
        """Make a payload live and hand it to who waits for it.

        Returns
        -------
        int
            The payload's generation.

        Raises
        ------
        PayloadConflictError, RequestAbandonedError, ClosedError
            Nothing changed; the item is still the caller's.
        """
        now = time.monotonic()
        deliveries: list[tuple[Deliver[ItemT], Claim[ItemT]]] = []
        freed: list[ItemT] = []
        with self._lock:
            self._check(key, overwrite)
            if overwrite:
                self._finish({key})
            old = self._live.get(key)
            if old is not None:
                self._drop(old, freed)
            if self._endings:
                self._endings.pop(key, None)
            generation = next(self._numbers)
            entry = Entry(key, item, nbytes, generation, readers, now, now + ttl_s)
            waiters = self._waiters.get(key)
            if waiters:
                while waiters and entry.unclaimed:
                    reader = next(iter(waiters))
                    deliveries.append((waiters.pop(reader), self._issue(entry, reader)))
                if not waiters:
                    del self._waiters[key]
            if entry.unclaimed:
                self._enliven(entry)
                if len(self._expiries) > 2 * len(self._live) + STALE_EXPIRIES:
                    self._expiries = [(live.expires_s, live.generation, live.key) for live in self._live.values()]
                    heapq.heapify(self._expiries)
        if freed:
            self._give_back(freed)
        for deliver, claim in deliveries:
            deliver(claim)
        return generation

    def fail(self, key: Key, reason: str) -> None:
        """Tell the key's readers, waiting now or later, that it will never come."""
        self._end({key}, ProducerFailedError, reason)

    def cleanup(self, request_id: str) -> int:
        """Discard every unread payload of a request and refuse later ones; returns how many were discarded."""
        with self._lock:
            self._abandoned.note(request_id, None)
            keys = set(self._by_request.get(request_id, ()))
            keys.update(key for key in self._waiters if key.request_id == request_id)
            keys.update(claim.key for claim in self._claims.values() if claim.key.request_id == request_id)
        return self._end(keys, RequestAbandonedError, "the request was cleaned up")

    def sweep(self) -> float | None:
        """End what has expired and forget old endings.

        Returns
        -------
        float or None
            Seconds until the next payload expires; None when nothing is pending.
        """
        now = time.monotonic()
        due: set[Key] = set()
        next_s: float | None = None
        with self._lock:
            while self._expiries:
                at_s, generation, key = self._expiries[0]
                entry = self._live.get(key)
                if entry is not None and entry.generation == generation:
                    if at_s > now:
                        next_s = at_s - now
                        break
                    due.add(key)  # twice in the heap, if a read was given back
                heapq.heappop(self._expiries)
            self._endings.forget_old(now)
            self._abandoned.forget_old(now)
            self.expired += len(due)
        if due:
            self._end(due, PayloadExpiredError, "nobody read the payload within its time-to-live")
        return next_s

    def claimed(self, key: Key, deadline: Deadline) -> bool:
        """Wait until every read of the payload is claimed, or it ended; False if neither by the deadline."""
        return self._until(lambda: key not in self._live, deadline)

    def consumed(self, key: Key, deadline: Deadline) -> bool:
        """Wait until the payload is claimed or ended, and no claim on it is out; False if not by the deadline."""
        return self._until(
            lambda: key not in self._live and not any(claim.key == key for claim in self._claims.values()), deadline
        )

    def room(self, enough: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until `enough` says yes, asking after every payload that was freed; False at the deadline."""
        return self._until(enough, deadline)

    def notify(self) -> None:
        """Make those who wait for `consumed` and `room` look again (memory was freed in a way the ledger does not see)."""
        with self._lock:
            self._changed.notify_all()

    def _until(self, done: Callable[[], bool], deadline: Deadline) -> bool:
        while True:
            expiry_s = self.sweep()
            with self._lock:
                if done():
                    return True
                pause_s = deadline.remaining_s()
                if not pause_s:
                    return False
                self._watchers += 1
                self._changed.wait(pause_s if expiry_s is None else min(pause_s, expiry_s))
                self._watchers -= 1

    # ---- the consumers' side

    def claim(
        self, key: Key, reader: Reader, later: Deliver[ItemT] | None = None
    ) -> Claim[ItemT] | OmniConnectorError | None:
        """Take one read of a payload: a claim, the error that ended it, or None when it is not there yet.

        Parameters
        ----------
        later
            Called, once, with what becomes of the key, if None was returned. A reader waits for a key once: claiming again
            replaces the callback.
        """
        self.sweep_if_due()
        with self._lock:
            answer = self._answer(key, reader)
            if answer is None and later is not None:
                self._waiters.setdefault(key, {})[reader] = later
            return answer

    def wait(self, key: Key, reader: Reader, deliver: Deliver[ItemT]) -> None:
        """Claim a payload now or as soon as it is put; `deliver` is called once, maybe before this returns."""
        answer = self.claim(key, reader, deliver)
        if answer is not None:
            deliver(answer)

    def cancel(self, key: Key, reader: Reader) -> None:
        """Stop waiting; harmless when the reader does not."""
        with self._lock:
            self._stop_waiting(key, reader)

    def release(self, number: int, *, unread: bool = False) -> None:
        """End a claim; one that was ended before is ignored.

        Parameters
        ----------
        unread
            The reader did not use it: the read goes to whoever asks next.
        """
        freed: list[ItemT] = []
        deliver: Deliver[ItemT] | None = None
        with self._lock:
            claim = self._claims.pop(number, None)
            if claim is None:
                return
            entry = claim.entry
            entry.out -= 1
            if unread and self._revive(entry) and entry.key in self._waiters:
                reader = next(iter(self._waiters[entry.key]))
                deliver, claim = self._stop_waiting(entry.key, reader), self._claim(entry, reader)
            self._settle(entry, freed)
        self._give_back(freed)
        if deliver is not None:
            deliver(claim)

    def awaited(self, key: Key) -> bool:
        """Whether a reader waits for the key."""
        return key in self._waiters

    def exists(self, key: Key) -> bool:
        """Whether a payload is there to be read."""
        return key in self._live

    # ---- both

    def pending(self) -> Pending:
        """Count the payloads that have a read left."""
        now = time.monotonic()
        with self._lock:
            entries = self._live.values()
            oldest_s = min((entry.born_s for entry in entries), default=now)
            return Pending(len(entries), now - oldest_s, sum(entry.nbytes for entry in entries))

    def claims_out(self) -> int:
        """How many claims are out."""
        return len(self._claims)

    def close(self) -> None:
        """Tell who waits that the producer is gone, and free what nobody reads; claims that are out stay, and do not come back."""
        freed: list[ItemT] = []
        with self._lock:
            self._closed = True
            for claim in self._claims.values():
                claim.entry.final = True
            for entry in list(self._live.values()):
                self._drop(entry, freed)
            waiters = [deliver for group in self._waiters.values() for deliver in group.values()]
            self._waiters.clear()
            self._changed.notify_all()
        self._give_back(freed)
        for deliver in waiters:
            deliver(PeerLostError("the producer closed its end"))

    def sweep_if_due(self) -> None:
        """Sweep when the oldest expiry has passed; cheap otherwise."""
        expiries = self._expiries
        if expiries and expiries[0][0] <= time.monotonic():
            self.sweep()

    # ---- with the lock held

    def _answer(self, key: Key, reader: Reader) -> Claim[ItemT] | OmniConnectorError | None:
        entry = self._live.get(key)
        if entry is not None:
            return self._claim(entry, reader)
        if key.request_id in self._abandoned:
            return RequestAbandonedError("the request was cleaned up")
        ending = self._endings.get(key)
        if ending is None:
            return None
        _, (error, message) = ending
        return error(message)

    def _stop_waiting(self, key: Key, reader: Reader) -> Deliver[ItemT] | None:
        """Take a waiter out of the book; what would have told it, None if it does not wait."""
        waiters = self._waiters.get(key)
        if waiters is None:
            return None
        deliver = waiters.pop(reader, None)
        if not waiters:
            del self._waiters[key]
        return deliver

    def _revive(self, entry: Entry[ItemT]) -> bool:
        """Give a read back to a payload, unless its key has moved on meanwhile."""
        live = self._live.get(entry.key)
        if entry.final or live not in (None, entry):
            return False
        entry.unclaimed += 1
        if live is None:
            self._enliven(entry)
        return True

    def _enliven(self, entry: Entry[ItemT]) -> None:
        """Let a payload lie in wait for whoever asks."""
        key = entry.key
        self._live[key] = entry
        keys = self._by_request.get(key.request_id)
        if keys is None:
            self._by_request[key.request_id] = {key}
        else:
            keys.add(key)
        heapq.heappush(self._expiries, (entry.expires_s, entry.generation, key))

    def _claim(self, entry: Entry[ItemT], reader: Reader) -> Claim[ItemT]:
        """Give a read of a payload that lies in wait."""
        claim = self._issue(entry, reader)
        if not entry.unclaimed:
            self._bury(entry)
        return claim

    def _issue(self, entry: Entry[ItemT], reader: Reader) -> Claim[ItemT]:
        entry.unclaimed -= 1
        entry.out += 1
        claim = Claim(next(self._numbers), reader, entry)
        self._claims[claim.number] = claim
        return claim

    def _finish(self, keys: AbstractSet[Key]) -> None:
        """Let no read of these keys come back that is out."""
        for claim in self._claims.values():
            if claim.key in keys:
                claim.entry.final = True

    def _end(self, keys: AbstractSet[Key], error: type[OmniConnectorError], message: str) -> int:
        freed: list[ItemT] = []
        deliveries: list[Deliver[ItemT]] = []
        count = 0
        with self._lock:
            self._finish(keys)
            for key in keys:
                entry = self._live.get(key)
                if entry is not None:
                    count += 1
                    self._drop(entry, freed)
                self._endings.note(key, (error, message))
                deliveries.extend(self._waiters.pop(key, {}).values())
        self._give_back(freed)
        for deliver in deliveries:
            deliver(error(message))
        return count

    def _drop(self, entry: Entry[ItemT], freed: list[ItemT]) -> None:
        """Take a live payload out of reach; its memory follows when the last claim on it ends."""
        entry.dropped = entry.final = True
        entry.unclaimed = 0
        self._bury(entry)
        self._settle(entry, freed)

    def _bury(self, entry: Entry[ItemT]) -> None:
        """Forget a key whose payload nobody can claim any more."""
        del self._live[entry.key]
        keys = self._by_request[entry.key.request_id]
        keys.discard(entry.key)
        if not keys:
            del self._by_request[entry.key.request_id]
        if self._watchers:
            self._changed.notify_all()

    def _settle(self, entry: Entry[ItemT], freed: list[ItemT]) -> None:
        if not entry.unclaimed and not entry.out:
            freed.append(entry.item)

    def _give_back(self, freed: list[ItemT]) -> None:
        for item in freed:
            self._free(item)
        if freed and self._watchers:
            self.notify()
