"""A transport over any store: the rules of the contract, out of named objects and two atomic operations.

Who writes what
---------------
A payload is one object, written once, under a name that is used once: ``d:<generation>`` below the random incarnation
of its producer (`omni_connector_core.store.names`). A *descriptor* for each key says which generation is live, or how
the key ended. Only its producer ever writes or removes a descriptor, so none is lost to a race, and overwriting is: create the
new payload, switch the descriptor, take the old payload.

A read counts when its *read object* was taken (`ObjectStore.take` is atomic): the payload itself when there is one
reader, else one of ``readers`` one-byte objects, and who takes the last of these removes the payload. A reader takes after
it has the bytes; if it comes away empty-handed somebody else was first, the bytes may be torn, and they are dropped.
Where that is worth it (`ObjectStore.tickets`), reads on the producer's host are taken by a file instead, without a request
(`omni_connector_core.store.tickets`). Expiry, `fail`, `cleanup` and overwriting take too, so each is exact: after they returned
nobody reads the payload, and whoever read it took it before.

Round trips, n readers
----------------------
======================================  =============================================================
put                                     1: create payload, read objects and descriptor together
put over a key that was put before      + 1 is it still unread, + 1 switch the descriptor, + 1 take the old one
get with metadata                       2: read, take. n > 1: + 1 look for the last. With a ticket 1
get by key, producers known             4: descriptors, new producers, read, take. With a ticket 3
a poll that finds nothing               1: descriptors; every `REFRESH_S` + 2 for slots
exists                                  2 for any number of keys
======================================  =============================================================

Without metadata a consumer finds producers by their slots (`omni_connector_core.store.directory`), asks all of them
for the key in one call, and looks once more for new slots before it believes that only one has it.

A producer has one thread, the keeper (`ProducerEnd`): heartbeat, expiry, descriptors of what was read, and the mailbox in which
a consumer's `cleanup` leaves a request id and waits for the count.

When a process dies its payloads are lost (`PeerLostError`), also in a store that still has the bytes: `Capabilities` says
so. The next incarnation of the same replica and rank removes them, where the store can list names. When the store itself
is restarted, producers join anew and tell consumers which payloads were lost.

A take whose answer is lost (the service died in that very moment) loses the read: at most once, never twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omni_connector_core import liveness
from omni_connector_core.capabilities import Usage
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import ClosedError, OmniConnectorError, TransferTimeoutError
from omni_connector_core.frame import Frame
from omni_connector_core.key import Key
from omni_connector_core.metadata import Where
from omni_connector_core.store.consumer import ConsumerEnd
from omni_connector_core.store.directory import Directory
from omni_connector_core.store.names import Names
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, patiently
from omni_connector_core.store.producer import ProducerEnd
from omni_connector_core.transport import Memory, Transport

__all__ = ["StoreTransport"]

ResultT = TypeVar("ResultT")

POLL_S = 5.0
"""Deadline of the calls of one `poll` or `exists`: these never wait for a payload, but a service may hang."""
CLOSE_S = 5.0
USAGE_S = 1.0
"""Deadline of the one call by which a producer learns what was read."""


class StoreTransport(Transport):
    """A transport over an `ObjectStore`, which a plugin connects in `_connect`.

    Copies per transfer: those of the store's `create` and `read`.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._consumer_end: ConsumerEnd | None = None
        self._producer_end: ProducerEnd | None = None

    @abstractmethod
    def _connect(self, *, deadline: Deadline) -> ObjectStore:
        """Open the store, or raise `BackendUnavailableError`; called by the first operation, and again if it raised."""

    # ---- the producing end

    def _put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        def put() -> dict[str, Any]:
            producer = self._producer_end or self._producer(deadline)
            return producer.put(key, frame, readers=readers, ttl_s=ttl_s, overwrite=overwrite, deadline=deadline)

        return patiently(put, deadline, check=self._check_open)

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._patiently(lambda: self._producer(deadline).fail(key, reason, deadline=deadline), deadline)

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        own, pause_s = self._producer_end, FIRST_PAUSE_S
        while own is not None and any(self._patiently(lambda: own.unread([key], deadline=deadline), deadline)):
            if deadline.expired():
                return False
            time.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        return True

    # ---- the consuming end

    def _poll(self, key: Key, where: Where) -> Memory | None:
        deadline = Deadline(POLL_S)
        try:
            return self._consumer(deadline).attempt(key, where, deadline)
        except TransferTimeoutError:  # somebody hangs
            return None

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        consumer = self._consumer_end or self._patiently(lambda: self._consumer(deadline), deadline)
        return consumer.get(key, where, deadline, closed=lambda: self.closed)

    def news(self) -> int | None:
        """See `Transport.news`; None while a producer of another host is known."""
        consumer = self._consumer_end
        return None if consumer is None else consumer.news()

    # ---- both

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        deadline = Deadline(POLL_S)
        return self._patiently(lambda: self._consumer(deadline).exists(keys, where, deadline), deadline)

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        if self.context.role is Role.PRODUCER:
            return self._patiently(lambda: self._producer(deadline), deadline).cleanup(request_id, deadline=deadline)
        own = self._producer_end
        count = own.cleanup(request_id, deadline=deadline) if own is not None else 0
        consumer = self._patiently(lambda: self._consumer(deadline), deadline)
        return count + consumer.cleanup(request_id, deadline, but=None if own is None else own.slot.incarnation)

    def _usage(self) -> Usage:
        own, store = self._producer_end, self._store
        if own is not None:
            with contextlib.suppress(OmniConnectorError):  # a store that does not answer: what was known last
                own.settle(Deadline(USAGE_S))
        pending = own.pending() if own is not None else []
        return Usage(
            pending=len(pending),
            oldest_age_s=max((time.monotonic() - entry.born_s for entry in pending), default=0.0),
            bytes_held=(own.book.held_bytes if own is not None else 0) + (store.held_bytes if store is not None else 0),
            capacity_bytes=store.capacity_bytes if store is not None else None,
            expired=own.book.expired if own is not None else 0,
        )

    def _probe(self, *, deadline: Deadline) -> str:
        store, _ = self._open(deadline)
        return store.probe(deadline=deadline)

    def _close(self) -> None:
        with self._lock:
            store, own, consumer = self._store, self._producer_end, self._consumer_end
            # what cannot be removed now is lost with the service, or purged by the next incarnation
            with contextlib.suppress(OmniConnectorError):
                if own is not None:
                    own.close(Deadline(CLOSE_S))
                if consumer is not None:
                    consumer.close(Deadline(CLOSE_S))
            if store is not None:
                store.close()
            liveness.forget()

    # ---- opening

    def _producer(self, deadline: Deadline) -> ProducerEnd:
        if self._producer_end is None:
            store, directory = self._open(deadline)
            with self._lock:
                if self._producer_end is None:
                    self._check_open()
                    self._producer_end = ProducerEnd(store, directory, self.context.producer, deadline=deadline)
        return self._producer_end

    def _consumer(self, deadline: Deadline) -> ConsumerEnd:
        if self._consumer_end is None:
            self._open(deadline)
            assert self._consumer_end is not None
        return self._consumer_end

    def _open(self, deadline: Deadline) -> tuple[ObjectStore, Directory]:
        with self._lock:
            if self._store is None or self._consumer_end is None:
                self._check_open()
                self._store = self._connect(deadline=deadline)
                names = Names(self.context.namespace, self.context.edge, longest=self._store.longest_name)
                self._consumer_end = ConsumerEnd(
                    self._store, Directory(self._store, names), outlives=self.capabilities.outlives_producer
                )
            return self._store, self._consumer_end.directory

    def _patiently(self, operation: Callable[[], ResultT], deadline: Deadline) -> ResultT:
        return patiently(operation, deadline, check=self._check_open)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the connector is closed")
