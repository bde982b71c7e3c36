"""The reference: producer and consumer in one process, every step spelt out, every read a private copy."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omni_connector_core.capabilities import Capabilities, Usage
from omni_connector_core.claim import Claim
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    AmbiguousKeyError,
    CapacityError,
    ClosedError,
    OmniConnectorError,
    PayloadTooLargeError,
    PeerLostError,
    RequestAbandonedError,
    TransferTimeoutError,
)
from omni_connector_core.frame import Frame
from omni_connector_core.key import Edge, Key
from omni_connector_core.ledger import Ledger
from omni_connector_core.metadata import Where
from omni_connector_core.options import Options, byte_size, option
from omni_connector_core.recent import Recent
from omni_connector_core.transport import Memory, Transport

__all__ = ["MemoryOptions", "MemoryTransport"]


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """Options of the in-process reference."""

    capacity_bytes: int = option(
        parse=byte_size, default="1GiB", doc="The most bytes of unread payloads that one producer holds."
    )


class _Meeting:
    """Where the two ends of an edge find each other: one per namespace and edge."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.ledgers: dict[MemoryTransport, Ledger[bytearray]] = {}
        self.abandoned: Recent[str, None] = Recent()

    def announce(self) -> None:
        with self.lock:
            self.changed.notify_all()


_meetings: dict[tuple[str, Edge], _Meeting] = {}
_meetings_lock = threading.Lock()
_incarnations = itertools.count(1)


class MemoryTransport(Transport):
    """One `Ledger` of bytearrays per producer. Copies per transfer: 2; system calls: those of the locks."""

    capabilities = Capabilities(cross_process=False, zero_copy=False)
    options: MemoryOptions

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        with _meetings_lock:
            self._meeting = _meetings.setdefault((context.namespace, context.edge), _Meeting())
        self._incarnation = next(_incarnations)
        self._ledger: Ledger[bytearray] | None = None
        self._held = 0
        self._held_lock = threading.Lock()

    def _put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        ledger = self._own_ledger()
        capacity = self.options.capacity_bytes
        if frame.nbytes > capacity:
            raise PayloadTooLargeError(
                f"{frame.nbytes:,} bytes do not fit into {capacity:,}", hint="Raise capacity_bytes"
            )
        ledger.sweep()
        if key.request_id in self._meeting.abandoned:
            raise RequestAbandonedError("the request was cleaned up; nothing more is taken for it")
        ledger.check(key, overwrite=overwrite)
        if not ledger.room(lambda: self._take(frame.nbytes), deadline):
            raise CapacityError(f"no room for {frame.nbytes:,} bytes in {deadline.timeout_s:g} s")
        item = bytearray(frame.nbytes)
        frame.write_into(item)
        try:
            generation = ledger.publish(
                key, item, nbytes=frame.nbytes, readers=readers, ttl_s=ttl_s, overwrite=overwrite
            )
        except OmniConnectorError:
            self._give_back(item)
            raise
        self._meeting.announce()
        return {"incarnation": self._incarnation, "generation": generation}

    def _poll(self, key: Key, where: Where) -> Memory | None:
        with self._meeting.lock:
            return self._take_claim(key, where)

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        with self._meeting.lock:
            known = self._ledgers(where)
            while (memory := self._take_claim(key, where)) is None:
                if self.closed:
                    raise ClosedError("closed while waiting")
                if known and not self._ledgers(where):
                    raise PeerLostError("the producer closed its end")
                # a payload may expire while we wait: wake for that too
                sweeps = [ledger.sweep() for ledger in self._meeting.ledgers.values()]
                pause_s = min([deadline.remaining_s(), *(s for s in sweeps if s is not None)])
                if deadline.expired():
                    raise TransferTimeoutError(f"not there after {deadline.timeout_s:g} s")
                self._meeting.changed.wait(pause_s)
            return memory

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        answers = {
            transport: answer
            for transport, ledger in self._ledgers(where)
            if (answer := ledger.claim(key, self)) is not None
        }
        claims = {transport: answer for transport, answer in answers.items() if isinstance(answer, Claim)}
        if len(claims) > 1:
            for transport, claim in claims.items():
                self._meeting.ledgers[transport].release(claim.number, unread=True)
            holders = sorted(str(transport.context.producer) for transport in claims)
            raise AmbiguousKeyError(f"held by {' and by '.join(holders)}")
        for transport, claim in claims.items():
            memory = (ctypes.c_char * claim.nbytes).from_buffer_copy(claim.item)
            self._meeting.ledgers[transport].release(claim.number)
            return memory
        for answer in answers.values():
            assert isinstance(answer, OmniConnectorError)
            raise answer
        if key.request_id in self._meeting.abandoned:
            raise RequestAbandonedError("the request was cleaned up")
        if where.at is not None and not self._ledgers(where):
            raise PeerLostError("the producer closed its end")
        return None

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        with self._meeting.lock:
            ledgers = [ledger for _, ledger in self._ledgers(where)]
            for ledger in ledgers:
                ledger.sweep_if_due()
            return [any(ledger.exists(key) for ledger in ledgers) for key in keys]

    def _ledgers(self, where: Where) -> list[tuple[MemoryTransport, Ledger[bytearray]]]:
        """List the producers that may be meant; with the meeting's lock held."""
        incarnation = None if where.at is None else where.at.get("incarnation")
        return [
            (transport, ledger)
            for transport, ledger in self._meeting.ledgers.items()
            if where.producer in (None, transport.context.producer) and incarnation in (None, transport._incarnation)
        ]

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        return self._own_ledger().consumed(key, deadline)

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._own_ledger().fail(key, reason)
        self._meeting.announce()

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        if self.context.role is Role.PRODUCER:
            ledgers = [self._own_ledger()]
        else:
            with self._meeting.lock:
                self._meeting.abandoned.note(request_id, None)
                ledgers = list(self._meeting.ledgers.values())
        count = sum(ledger.cleanup(request_id) for ledger in ledgers)
        self._meeting.announce()
        return count

    def _usage(self) -> Usage:
        capacity = self.options.capacity_bytes
        if self._ledger is None:
            return Usage(capacity_bytes=capacity)
        self._ledger.sweep_if_due()
        pending = self._ledger.pending()
        return Usage(
            pending=pending.count,
            oldest_age_s=pending.oldest_age_s,
            bytes_held=self._held,
            capacity_bytes=capacity,
            expired=self._ledger.expired,
        )

    def _probe(self, *, deadline: Deadline) -> str:
        return f"in this process, {len(self._meeting.ledgers)} producers"

    def _close(self) -> None:
        with self._meeting.lock:
            if self._ledger is not None:
                del self._meeting.ledgers[self]
        if self._ledger is not None:
            self._ledger.close()
        self._meeting.announce()

    def _own_ledger(self) -> Ledger[bytearray]:
        if self._ledger is None:
            with self._meeting.lock:
                if self._ledger is None:
                    self._ledger = self._meeting.ledgers[self] = Ledger(self._give_back)
        return self._ledger

    def _take(self, nbytes: int) -> bool:
        with self._held_lock:
            if self._held + nbytes > self.options.capacity_bytes:
                return False
            self._held += nbytes
            return True

    def _give_back(self, item: bytearray) -> None:
        with self._held_lock:
            self._held -= len(item)
