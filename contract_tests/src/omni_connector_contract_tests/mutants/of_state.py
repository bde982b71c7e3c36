"""Mutants that count wrongly, or leave something behind."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from omni_connector_contract_tests.mutants.registry import caught_by
from omni_connector_core import (
    CapacityError,
    ClosedError,
    Deadline,
    Key,
    TransportContext,
    Usage,
)
from omni_connector_core.frame import Frame
from omni_connector_core.memory.transport import MemoryTransport
from omni_connector_core.metadata import Where

caught = functools.partial(caught_by, options="omni_connector_core.memory.transport:MemoryOptions")


# ---- capacity and state


@caught("TestReads::test_a_producer_can_wait_until_its_payload_is_consumed")
class ConsumedIsWhatIsPut(MemoryTransport):
    """The producer is told that its payload is consumed while nobody has it."""

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        return True


@caught("TestCapacity::test_a_full_backend_refuses_at_the_deadline_and_loses_nothing")
class EvictsWhenFull(MemoryTransport):
    """A put into a full pool throws out the oldest unread payload."""

    def _put(self, key: Key, frame: Frame, *, deadline: Deadline, **options: Any) -> dict[str, Any]:
        while True:
            try:
                return super()._put(key, frame, deadline=Deadline(0), **options)
            except CapacityError:
                self._own_ledger().claim(oldest := next(iter(self._own_ledger()._live)), "eviction")
                del oldest
                self._held = 0


@caught("TestCapacity::test_a_full_backend_refuses_at_the_deadline_and_loses_nothing")
class SucceedsOnAFullPool(MemoryTransport):
    """A put into a full pool says that it succeeded and stores nothing."""

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        try:
            return super()._put(key, frame, **options)
        except CapacityError:
            return {}


@caught("TestCapacity::test_a_put_that_waits_goes_on_when_there_is_room")
class RefusesAtOnceWhenFull(MemoryTransport):
    """A put into a full pool does not wait for room."""

    def _put(self, key: Key, frame: Frame, *, deadline: Deadline, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, deadline=Deadline(0), **options)


@caught("TestCapacity::test_a_refused_put_leaves_no_trace")
class ARefusedPutKeepsItsRoom(MemoryTransport):
    """What a refused put had asked for stays reserved."""

    def _take(self, nbytes: int) -> bool:
        if super()._take(nbytes):
            return True
        with self._held_lock:
            self._held += 1
        return False


@caught("TestState::test_usage_counts_what_is_pending")
class CountsNothing(MemoryTransport):
    """`usage` says that nothing is pending."""

    def _usage(self) -> Usage:
        return Usage(capacity_bytes=self.options.capacity_bytes)


@caught("TestState::test_health_is_bounded")
class HealthHangs(MemoryTransport):
    """`health` waits for an answer without a bound."""

    def _probe(self, *, deadline: Deadline) -> str:
        if self._usage().pending:
            time.sleep(1.7)
        return super()._probe(deadline=deadline)


@caught("TestState::test_health_is_ok_and_says_what_was_probed")
class HealthLies(MemoryTransport):
    """`health` is always well and has looked at nothing."""

    def _probe(self, *, deadline: Deadline) -> str:
        return ""


@caught("TestBatch::test_exists_answers_for_each_key")
class ExistsLies(MemoryTransport):
    """`exists` says yes."""

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        return [True for _ in keys]


@caught("TestBatch::test_exists_takes_no_read")
class ExistsReads(MemoryTransport):
    """`exists` takes the payload to see whether it is there."""

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        return [self._poll(key, where) is not None for key in keys]


@caught("TestMetadata::test_metadata_survives_json")
class MetadataIsNotJson(MemoryTransport):
    """Metadata holds bytes."""

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        return {**super()._put(key, frame, **options), "token": b"\xff"}


# ---- what is left behind


@caught("TestLeaks::test_transfers_leak_nothing")
class LeaksAFileDescriptor(MemoryTransport):
    """Every put leaves a file open."""

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        os.open("/dev/null", os.O_RDONLY)
        return super()._put(key, frame, **options)


@caught("TestLeaks::test_opening_and_closing_leaks_nothing")
class LeaksAThread(MemoryTransport):
    """Every connector leaves a thread behind."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@caught("TestLeaks::test_a_connector_that_was_never_used_leaks_nothing")
class LeaksAFile(MemoryTransport):
    """Every connector leaves a file in shared memory."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        open(f"/dev/shm/{context.namespace}-{id(self)}", "w").close()


@caught("TestLifecycle::test_construction_binds_no_port")
class BindsAtConstruction(MemoryTransport):
    """A port is bound before anything is put."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._socket = socket.create_server(("127.0.0.1", 0))

    def _close(self) -> None:
        self._socket.close()
        super()._close()


@caught("TestLifecycle::test_ports_are_bound_to_loopback")
class ListensToTheWorld(MemoryTransport):
    """The first put binds a port on all interfaces."""

    _socket: socket.socket | None = None

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.create_server(("0.0.0.0", 0))
        return super()._put(key, frame, **options)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        super()._close()


@caught("TestLifecycle::test_close_is_idempotent")
class ClosesOnce(MemoryTransport):
    """A second close is an error."""

    def close(self) -> None:  # type: ignore[misc]
        """Close, once."""
        if self._closed:
            raise ClosedError("closed already")
        super().close()
