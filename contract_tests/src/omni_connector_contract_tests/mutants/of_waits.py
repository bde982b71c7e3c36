"""Mutants that wait wrongly, or end wrongly."""

from __future__ import annotations

import functools
import time
from typing import Any

from omni_connector_contract_tests.mutants.registry import caught_by
from omni_connector_core import (
    ClosedError,
    Deadline,
    Key,
    RequestAbandonedError,
    TransferTimeoutError,
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


@caught("TestWaiting::test_news_says_when_a_poll_can_find_something")
class HasNoNews(MemoryTransport):
    """Nothing is ever new."""

    def news(self) -> int:
        """Return the same number whatever is put."""
        return 0


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
    """A payload lives no longer than the most short-lived one before it."""

    _shortest_s = float("inf")

    def _put(self, key: Key, frame: Frame, *, ttl_s: float, **options: Any) -> dict[str, Any]:
        self._shortest_s = min(ttl_s, self._shortest_s)
        return super()._put(key, frame, ttl_s=self._shortest_s, **options)
