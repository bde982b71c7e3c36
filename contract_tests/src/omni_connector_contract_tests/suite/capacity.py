"""Level 1: a full backend (point 9), and what it says of its state (point 14)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, observes, requires, without
from omni_connector_core import NOT_READY, CapacityError, PayloadTooLargeError

__all__ = ["TestCapacity", "TestState"]

CAPACITY = 8 * 2**20
SMALL = {"capacity_bytes": CAPACITY}
PIECE = 2**20


class TestCapacity(ContractTests):
    """Full is an error, in time, and never costs anybody a payload."""

    @requires("bounded")
    def test_what_never_fits_is_refused_at_once(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        seconds, _, error = producer.act(acts.timed, "put", "k", Bulk(CAPACITY * 2), timeout=20.0)
        assert isinstance(error, PayloadTooLargeError)
        assert not error.retryable
        assert seconds < WITHIN_A_SECOND_S
        producer.put("k", "fits")
        assert ends.consumer.get("k") == "fits"

    @observes("capacity_bytes")
    @requires("bounded")
    def test_a_full_backend_refuses_at_the_deadline_and_loses_nothing(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        metadata = {}
        with pytest.raises(CapacityError) as caught:
            for n in range(CAPACITY // PIECE + 1):
                metadata[n] = producer.put(f"k{n}", Bulk(PIECE, seed=n), timeout=0.1)
        assert caught.value.retryable
        assert isinstance(caught.value, MemoryError)
        count = len(metadata)
        assert count >= 3
        assert producer.usage().pending == count
        for n in range(count):
            assert ends.consumer.get_fingerprint(f"k{n}") == fingerprint(Bulk(PIECE, seed=n))
        assert ends.consumer.poll(f"k{count}") is NOT_READY

    @requires("bounded")
    def test_put_waits_for_room_to_its_deadline(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8))
        seconds, _, error = producer.act(acts.timed, "put", "k", Bulk(CAPACITY // 2), timeout=0.5)
        assert isinstance(error, CapacityError)
        assert 0.45 <= seconds < 0.5 + WITHIN_A_SECOND_S

    @requires("bounded")
    def test_waiting_for_room_does_not_spin(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8))
        assert producer.act(acts.share_of_a_core, "put", "k", Bulk(CAPACITY // 2), timeout=1.0) < 0.25

    @requires("bounded")
    def test_a_put_that_waits_goes_on_when_there_is_room(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8, seed=1))
        waiting = producer.start_act(acts.put_and_tell_that_it_began, "began", "second", Bulk(CAPACITY // 2, seed=2))
        eventually(lambda: producer.act(acts.is_kept, "began"))
        for _ in range(10):
            assert ends.consumer.poll("second") is NOT_READY
            assert not waiting.done()
        assert ends.consumer.get_fingerprint("first") == fingerprint(Bulk(CAPACITY * 5 // 8, seed=1))
        metadata = waiting.result()
        assert ends.consumer.get_fingerprint("second", metadata) == fingerprint(Bulk(CAPACITY // 2, seed=2))

    @requires("bounded")
    def test_expiry_makes_room(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8), ttl=0.3)
        producer.put("second", Bulk(CAPACITY // 2, seed=2))
        assert ends.consumer.get_fingerprint("second") == fingerprint(Bulk(CAPACITY // 2, seed=2))

    @requires("bounded")
    def test_cleanup_makes_room(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8))
        waiting = producer.start("put", "second", Bulk(CAPACITY // 2, seed=2))
        producer.cleanup("first")
        waiting.result()
        assert ends.consumer.get_fingerprint("second") == fingerprint(Bulk(CAPACITY // 2, seed=2))

    @requires("bounded")
    def test_a_refused_put_leaves_no_trace(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        producer.put("first", Bulk(CAPACITY * 5 // 8))
        held = producer.usage().bytes_held
        for _ in range(3):
            with pytest.raises(CapacityError):
                producer.put("k", Bulk(CAPACITY // 2), timeout=0.05)
        assert producer.usage().bytes_held == held
        assert producer.usage().pending == 1
        assert producer.exists("k") == [False]
        ends.consumer.get_fingerprint("first")
        eventually(lambda: producer.usage().bytes_held == 0)

    @requires("bounded")
    def test_the_capacity_can_be_used_again_and_again(self, ends: Ends) -> None:
        producer = ends.open("producer", config=SMALL)
        for n in range(30):
            producer.put("k", Bulk(CAPACITY // 2 + n * 4096, seed=n))
            assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(CAPACITY // 2 + n * 4096, seed=n))

    @without("bounded")
    def test_an_unbounded_backend_states_no_capacity(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        assert ends.producer.usage().capacity_bytes is None
        ends.consumer.get("k")


class TestState(ContractTests):
    """`health` probes, `usage` and `stats` count."""

    def test_health_is_ok_and_says_what_was_probed(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        for end in (ends.producer, ends.consumer):
            health = end.health()
            assert health.ok, health.detail
            assert health.detail
        assert ends.producer.health().usage.pending == 1
        ends.consumer.get("k")

    def test_health_of_a_closed_connector_says_so(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        ends.producer.call("close")
        health = ends.producer.health()
        assert not health.ok
        assert "closed" in health.detail

    def test_health_is_bounded(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        seconds, _, _ = ends.producer.act(acts.timed, "health", timeout=0.5)
        assert seconds < 0.5 + WITHIN_A_SECOND_S
        ends.consumer.get("k")

    def test_usage_counts_what_is_pending(self, ends: Ends) -> None:
        ends.producer.put("a", Bulk(200_000))
        ends.producer.put("b", Bulk(200_000))
        usage = ends.producer.usage()
        assert usage.pending == 2
        assert usage.oldest_age_s > 0
        if ends.backend.capabilities.bounded:
            assert usage.capacity_bytes is not None
            assert 400_000 <= usage.bytes_held <= usage.capacity_bytes
        ends.consumer.get_fingerprint("a")
        ends.consumer.get_fingerprint("b")
        eventually(lambda: ends.producer.usage().pending == 0)
        assert ends.producer.usage().oldest_age_s == 0.0

    def test_stats_count_both_ends(self, ends: Ends) -> None:
        for n in range(3):
            ends.producer.put(f"k{n}", Bulk(10_000))
            ends.consumer.get_fingerprint(f"k{n}")
        produced, consumed = ends.producer.stats(), ends.consumer.stats()
        assert (produced["puts"], produced["gets"]) == (3, 0)
        assert (consumed["puts"], consumed["gets"]) == (0, 3)
        assert produced["put_bytes"] == consumed["get_bytes"] >= 30_000
        assert produced["put_time"]["count"] == consumed["get_time"]["count"] == 3
        assert produced["backend"] == ends.backend.name

    def test_stats_count_failures_by_error(self, ends: Ends) -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                ends.consumer.get("k", timeout=0.01)
        assert ends.consumer.stats()["failures"] == {"get:TransferTimeoutError": 2}
