"""The transport: one producer's end and one consumer's end of an edge, of which a process uses one or both.

Per transfer: one copy, into the pool. When the consumer waits first, one system call at the producer's end (send; before it a look
at what was asked, when nobody is known to wait) and three at the consumer's (send, wait, receive), one wake-up, and none for the
release.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from omni_connector_core.capabilities import Usage
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, CapacityError, IncompatibleMetadataError
from omni_connector_core.frame import Frame, scatter
from omni_connector_core.key import Key
from omni_connector_core.metadata import Where
from omni_connector_core.transport import Memory, Transport
from omni_connector_shared_memory.consumer import ConsumerEnd
from omni_connector_shared_memory.interest import Claimed, Target
from omni_connector_shared_memory.meeting import Meeting
from omni_connector_shared_memory.options import SharedMemoryOptions
from omni_connector_shared_memory.plugin import CAPABILITIES
from omni_connector_shared_memory.pool import Pool
from omni_connector_shared_memory.producer import ProducerEnd

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport(Transport):
    """Moves frames between processes of one host.

    Parameters
    ----------
    context
        See `Transport`.
    """

    capabilities = CAPABILITIES
    options: SharedMemoryOptions

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        meeting = Meeting(self.options.runtime_dir, context.namespace, context.edge)
        self._meeting = meeting
        self._producer = ProducerEnd(meeting, context.producer, self.options)
        self._consumer = ConsumerEnd(meeting)
        if context.role is not Role.PRODUCER:
            # whatever is dead when we start has nothing to do with us; whoever dies from now on does
            meeting.sweep()
        _opened.add(self)

    def _put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        self._producer.put(key, frame, readers=readers, ttl_s=ttl_s, overwrite=overwrite, deadline=deadline)
        return {"incarnation": self._producer.address.incarnation}

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        claimed = self._claim(key, where, deadline)
        return claimed.link.take(claimed.found)

    def _poll(self, key: Key, where: Where) -> Memory | None:
        while (claimed := self._consumer.poll(_target(key, where))) is not None:
            if claimed.link.accept(claimed.found):
                return claimed.link.take(claimed.found)
        return None

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        claimed = self._claim(key, where, deadline)
        link, found = claimed.link, claimed.found
        try:
            nbytes = scatter(link.peek(found), buffers)
        except BaseException:
            link.give_back(found)
            raise
        link.finish(found)
        return nbytes

    def _claim(self, key: Key, where: Where, deadline: Deadline) -> Claimed:
        target = _target(key, where)
        while True:
            claimed = self._consumer.get(target, deadline)
            if claimed.link.accept(claimed.found):
                return claimed

    def _expect(self, keys: Sequence[Key], where: Where) -> None:
        self._consumer.expect([_target(key, where) for key in keys])

    def _forget(self, key: Key, where: Where) -> None:
        self._consumer.forget(_target(key, where))

    def news(self) -> int:
        """See `Transport.news`."""
        return self._consumer.news()

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        if self.context.role is Role.PRODUCER:
            self._producer.ledger.sweep_if_due()
            return [self._producer.ledger.exists(key) for key in keys]
        return self._consumer.exists(keys, where.producer)

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        return self._producer.consumed(key, deadline)

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._producer.fail(key, reason)

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        count = 0
        if self.context.role is not Role.CONSUMER:
            count += self._producer.cleanup(request_id)
        if self.context.role is not Role.PRODUCER:
            count += self._consumer.cleanup(request_id, deadline)
        return count

    def _usage(self) -> Usage:
        usage = self._producer.usage()
        held = self._consumer.held_nbytes(except_of=self._producer.address)
        return Usage(
            pending=usage.pending,
            oldest_age_s=usage.oldest_age_s,
            bytes_held=usage.bytes_held + held,
            capacity_bytes=usage.capacity_bytes,
            expired=usage.expired,
        )

    def _probe(self, *, deadline: Deadline) -> str:
        self._meeting.open()
        pool = Pool(1, 1, self.options.pool_dir)
        try:
            if pool.take(1) is None:
                raise CapacityError(pool.refusal)
        finally:
            pool.close()
        if not self._producer.serving:
            raise BackendUnavailableError(
                "the thread that answers consumers has ended", hint="Its traceback is in the log"
            )
        if self.context.role is Role.PRODUCER:
            return "shared memory can be had"
        return f"shared memory can be had; {self._consumer.ping(deadline)} producers answer"

    def _close(self) -> None:
        self._consumer.close()
        self._producer.close()

    def _abandon(self) -> None:
        self._consumer.abandon()
        self._producer.abandon()


def _target(key: Key, where: Where) -> Target:
    if where.at is None:
        return Target(key, where.producer)
    incarnation = where.at.get("incarnation")
    if incarnation is not None and type(incarnation) is not str:
        raise IncompatibleMetadataError("the metadata is damaged: its incarnation is no str")
    return Target(key, where.producer, incarnation)


_opened: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for transport in tuple(_opened):
        if not transport.closed:
            transport._abandon()
    _opened.clear()


# a child that kept copies of the sockets and the lock would keep its parent looking alive after the parent died
os.register_at_fork(after_in_child=_after_fork_in_child)
