"""The producer's end: a pool of memory, the book of what is in it, and a server that consumers ask.

A put copies once and, when a consumer waits for the key, tells it so itself: no other thread is needed for that.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import dataclass

from omni_connector_core.capabilities import Usage
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    OmniConnectorError,
    PayloadTooLargeError,
)
from omni_connector_core.frame import Frame
from omni_connector_core.key import Key, Producer
from omni_connector_core.ledger import Ledger
from omni_connector_shared_memory.connection import Slot
from omni_connector_shared_memory.meeting import Address, Meeting, Place
from omni_connector_shared_memory.options import SharedMemoryOptions
from omni_connector_shared_memory.pool import LARGE_NBYTES, Block, Pool
from omni_connector_shared_memory.server import Server

__all__ = ["ProducerEnd"]

RECLAIM_EVERY = 8
"""After so many small payloads put to look at what consumers released; whoever lacks room, or asks what is held, looks at once."""
LOOK_AGAIN_S = 0.05
"""How often a put that waits for room looks by itself: a release and the wish to be told of it may have crossed."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What exists from the first put on."""

    place: Place
    pool: Pool
    server: Server


class ProducerEnd:
    """What one producing process holds of one edge. Thread-safe.

    Parameters
    ----------
    meeting
        Where consumers look for it.
    producer
        Which replica and rank it is.
    options
        The backend's.
    """

    def __init__(self, meeting: Meeting, producer: Producer, options: SharedMemoryOptions) -> None:
        self.address = Address(producer, uuid.uuid4().hex[:16])
        self.ledger: Ledger[Slot] = Ledger(self._free)
        self._meeting = meeting
        self._options = options
        self._running: _Running | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._waiting_for_room = 0
        self._puts = 0

    def start(self) -> _Running:
        """Take the producer's place in the meeting, once; later calls cost nothing.

        Raises
        ------
        BackendUnavailableError
        """
        if self._running is not None:
            return self._running
        with self._starting:
            if self._closed:
                raise ClosedError("the connector is closed")
            if self._running is None:
                try:
                    self._running = self._set_up()
                except OmniConnectorError:
                    raise
                except OSError as error:
                    raise BackendUnavailableError(
                        f"no place among the producers can be had: {error.strerror}",
                        hint="Raise the limit on open files, or set runtime_dir to a folder with room",
                    ) from error
            return self._running

    def _set_up(self) -> _Running:
        self._meeting.open()
        self._meeting.sweep()
        with contextlib.ExitStack() as undo:
            place = self._meeting.claim(self.address)
            undo.callback(place.leave)
            pool = Pool(self._options.capacity_bytes, self._options.pool_bytes, self._options.pool_dir)
            undo.callback(pool.close)
            listener = undo.enter_context(place.listen())
            server = Server(listener, self.ledger, pool)
            undo.pop_all()
        return _Running(place, pool, server)

    def put(self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline) -> None:
        """Copy a frame into the pool and publish it; see `Transport._put`."""
        pool, server = (running := self.start()).pool, running.server
        nbytes = frame.nbytes
        if nbytes > pool.capacity_nbytes:
            raise PayloadTooLargeError(
                f"{nbytes:,} bytes do not fit into a pool of {pool.capacity_nbytes:,}", hint="Raise capacity_bytes"
            )
        self.ledger.sweep_if_due()
        awaited = self.ledger.awaited(key)
        if not awaited:  # what is awaited is neither there nor abandoned
            self.ledger.check(key, overwrite=overwrite)
        if nbytes >= LARGE_NBYTES:  # warm memory is worth the wait; a small payload's consumer should not wait for it
            server.reclaim()
        block = pool.take(nbytes, len(frame.head))
        if block is None:
            block = self._wait_for_room(running, frame, deadline)
        try:
            frame.write_into(pool.view(block.offset, nbytes))
            if not awaited:
                server.attend()
        except BaseException:
            pool.give(block.start)
            raise
        try:
            generation = self.ledger.publish(
                key, Slot(block, readers > 1), nbytes=nbytes, readers=readers, ttl_s=ttl_s, overwrite=overwrite
            )
        except OmniConnectorError:  # of anything else, such as Ctrl-C, nobody knows whether the payload is live by now
            pool.give(block.start)
            raise
        if overwrite:
            server.recall(lambda claim: claim.key == key and claim.generation < generation)
        server.wake_by(time.monotonic() + ttl_s)
        if nbytes < LARGE_NBYTES:
            self._puts += 1
            if not self._puts % RECLAIM_EVERY:
                server.reclaim()

    def consumed(self, key: Key, deadline: Deadline) -> bool:
        """Wait until a payload is gone; see `Transport.consumed`."""
        if self._running is not None:
            self._running.server.attend()
        return self.ledger.claimed(key, deadline)  # a claim lasts as long as the consumer keeps its view

    def fail(self, key: Key, reason: str) -> None:
        """Tell the key's consumers that it will never come."""
        server = self.start().server
        self.ledger.fail(key, reason)
        server.recall(lambda claim: claim.key == key)

    def cleanup(self, request_id: str) -> int:
        """End a request; how many unread payloads that discarded."""
        return self.ledger.cleanup(request_id) if self._running is None else self._running.server.cleanup(request_id)

    @property
    def serving(self) -> bool:
        """Whether consumers are answered, if this end has been used at all."""
        return self._running is None or self._running.server.running

    def usage(self) -> Usage:
        """Say what is held, after looking at what consumers released."""
        if self._running is None:
            return Usage(capacity_bytes=self._options.capacity_bytes)
        self._running.server.reclaim()
        pending = self.ledger.pending()
        return Usage(
            pending=pending.count,
            oldest_age_s=pending.oldest_age_s,
            bytes_held=self._running.pool.taken_nbytes,
            capacity_bytes=self._running.pool.capacity_nbytes,
            expired=self.ledger.expired,
        )

    def close(self) -> None:
        """Leave the meeting; memory that consumers hold stays theirs."""
        with self._starting:
            self._closed = True
        self.ledger.close()
        if self._running is not None:
            self._running.server.close()
            self._running.place.leave()
            self._running.pool.close()

    def abandon(self) -> None:
        """In a forked child: close the parent's files, which would keep the parent looking alive."""
        if self._running is not None:
            self._running.server.abandon()
            self._running.place.abandon()
            self._running.pool.abandon()

    def _wait_for_room(self, running: _Running, frame: Frame, deadline: Deadline) -> Block:
        pool, server = running.pool, running.server
        block: Block | None = None

        def take() -> bool:
            nonlocal block
            block = pool.take(frame.nbytes, len(frame.head))
            return block is not None

        with self._starting:
            self._waiting_for_room += 1
            server.want(True)
        try:
            while not self._closed:
                server.reclaim()
                if self.ledger.room(take, Deadline(min(LOOK_AGAIN_S, deadline.remaining_s()))):
                    assert block is not None
                    return block
                if deadline.expired():
                    reason = f"; {pool.refusal}" if pool.refusal else ""
                    raise CapacityError(
                        f"no room for {frame.nbytes:,} bytes in {deadline.timeout_s:g} s: {pool.taken_nbytes:,} of "
                        f"{pool.capacity_nbytes:,} are held{reason}"
                    )
        finally:
            with self._starting:
                self._waiting_for_room -= 1
                server.want(self._waiting_for_room > 0)
        raise ClosedError("closed while waiting for room")

    def _free(self, slot: Slot) -> None:
        assert self._running is not None
        self._running.pool.give(slot.block.start)
