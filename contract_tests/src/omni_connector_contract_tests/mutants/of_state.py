"""Mutants that wait wrongly, end wrongly, count wrongly, or leave something behind."""

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
    RequestAbandonedError,
    TransferTimeoutError,
    TransportContext,
    Usage,
)
from omni_connector_core.frame import Frame
from omni_connector_core.memory.transport import MemoryTransport
from omni_connector_core.metadata import Where
from omni_connector_core.transport import Memory

caught = functools.partial(caught_by, options="omni_connector_core.memory.transport:MemoryOptions")


# ---- waiting


@caught("TestWaiting::test_a_waiting_get_wakes_within_a_second")
class NeverWakes(MemoryTransport):
    """A waiting get looks again only at its deadline."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        if (memory := self._poll(key, where)) is None:
            time.sleep(deadline.remaining_s())
            memory = self._poll(key, where)
        if memory is None:
            raise TransferTimeoutError("not there")
        return memory


@caught("TestWaiting::test_get_times_out_when_told")
class IgnoresTimeouts(MemoryTransport):
    """A get waits two seconds longer than it was told."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        return super()._get(key, where, deadline=Deadline(deadline.remaining_s() + 2.0))


@caught("TestWaiting::test_get_times_out_when_told")
class GivesUpEarly(MemoryTransport):
    """A get that would have to wait times out at once."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        return super()._get(key, where, deadline=Deadline(deadline.remaining_s() / 4))


@caught("TestWaiting::test_waiting_does_not_spin")
class Spins(MemoryTransport):
    """A waiting get polls without a pause."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        while (memory := self._poll(key, where)) is None:
            if self.closed:
                raise ClosedError("closed while waiting")
            if deadline.expired():
                raise TransferTimeoutError("not there")
        return memory


@caught("TestWaiting::test_poll_never_blocks")
class PollBlocks(MemoryTransport):
    """`poll` waits a little for the payload to come."""

    def _poll(self, key: Key, where: Where) -> Memory | None:
        try:
            return super()._get(key, where, deadline=Deadline(0.1))
        except TransferTimeoutError:
            return None


@caught("TestWaiting::test_a_timed_out_get_takes_no_read")
class ATimeoutEatsTheNextPayload(MemoryTransport):
    """Who timed out is still served: the next payload of the key goes nowhere."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        try:
            return super()._get(key, where, deadline=deadline)
        except TransferTimeoutError:
            for ledger in self._meeting.ledgers.values():
                ledger.wait(key, ("timed out", deadline), lambda answer: None)
            raise


@caught("TestWaiting::test_get_times_out_when_told")
class RaisesErrorsOfItsOwn(MemoryTransport):
    """A timeout is a bare TimeoutError that says nothing."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        try:
            return super()._get(key, where, deadline=deadline)
        except TransferTimeoutError:
            raise TimeoutError from None


@caught("TestLifecycle::test_close_ends_a_wait")
class CloseLeavesWaiters(MemoryTransport):
    """A get that waits does not notice that the connector was closed."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        while (memory := self._poll(key, where)) is None:
            time.sleep(0.01)
            if deadline.expired():
                raise TransferTimeoutError("not there")
        return memory


# ---- endings


@caught("TestFail::test_fail_reaches_a_waiting_consumer_within_a_second")
class FailWakesNobody(MemoryTransport):
    """A failure is written down, and who waits already is not told."""

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._own_ledger().fail(key, reason)


@caught("TestFail::test_fail_reaches_a_consumer_that_asks_later")
class FailIsForgotten(MemoryTransport):
    """A failure is not written down."""

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._meeting.announce()


@caught("TestFail::test_fail_is_about_one_key")
class FailEndsTheRequest(MemoryTransport):
    """A failure of one chunk drops all of the request."""

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        ledger = self._own_ledger()
        for other in [k for k in ledger._live if k.request_id == key.request_id]:
            ledger.fail(other, reason)
        super()._fail(key, reason, deadline=deadline)


@caught("TestFail::test_fail_reaches_a_consumer_that_asks_later")
class LosesTheReason(MemoryTransport):
    """A failure arrives without its reason."""

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        super()._fail(key, "failed", deadline=deadline)


@caught("TestCleanup::test_cleanup_goes_by_request_not_by_prefix")
class CleansUpByPrefix(MemoryTransport):
    """Cleanup takes every request whose id begins alike."""

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        ids = {k.request_id for ledger in self._meeting.ledgers.values() for k in ledger._live}
        alike = {name for name in ids if name.startswith(request_id)} | {request_id}
        return sum(super(CleansUpByPrefix, self)._cleanup(name, deadline=deadline) for name in alike)


@caught("TestCleanup::test_cleanup_discards_all_chunks_and_shards_and_counts_them")
class CleansUpTheFirstChunkOnly(MemoryTransport):
    """Cleanup drops the payload whose key is the request id and no other."""

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        ledger = self._own_ledger()
        there = int(ledger.exists(Key(request_id)))
        ledger.fail(Key(request_id), "cleaned up")
        return there


@caught("TestCleanup::test_a_put_after_cleanup_is_refused")
class CleanupDoesNotLast(MemoryTransport):
    """A put after a cleanup is taken."""

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        count = super()._cleanup(request_id, deadline=deadline)
        self._meeting.abandoned.clear()
        for ledger in self._meeting.ledgers.values():
            ledger._abandoned.clear()
        return count


@caught("TestCleanup::test_a_producer_that_starts_later_learns_of_a_consumers_cleanup")
class CleanupReachesOnlyWhoIsThere(MemoryTransport):
    """A producer that starts after a cleanup knows nothing of it."""

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        count = super()._cleanup(request_id, deadline=deadline)
        self._meeting.abandoned.pop(request_id, None)
        return count


@caught("TestCleanup::test_a_consumers_cleanup_ends_its_own_wait")
class CleanupWakesNobody(MemoryTransport):
    """Who waits for a request that is cleaned up goes on waiting."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        while True:
            try:
                return super()._get(key, where, deadline=deadline)
            except RequestAbandonedError:
                if deadline.expired():
                    raise
                time.sleep(0.05)


@caught("TestExpiry::test_an_expired_payload_is_an_error_of_its_own")
class IgnoresTheTimeToLive(MemoryTransport):
    """Payloads live for ever."""

    def _put(self, key: Key, frame: Frame, *, ttl_s: float, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, ttl_s=1e6, **options)


@caught("TestExpiry::test_an_expired_payload_is_an_error_of_its_own")
class ExpiryLooksLikeATimeout(MemoryTransport):
    """Who comes for an expired payload waits for nothing."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        try:
            return super()._take_claim(key, where)
        except LookupError as error:
            if "time-to-live" in str(error):
                return None
            raise


@caught("TestExpiry::test_a_payload_lives_as_long_as_it_was_told")
class ExpiresTooEarly(MemoryTransport):
    """When one payload expires, all do."""

    def _put(self, key: Key, frame: Frame, *, ttl_s: float, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, ttl_s=min(ttl_s, 0.1), **options)


# ---- capacity and state


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
