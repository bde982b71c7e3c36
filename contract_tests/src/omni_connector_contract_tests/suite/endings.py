"""Level 1: payloads that never come: failed, cleaned up, expired (points 6, 7 and 8)."""

from __future__ import annotations

from typing import Any

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, observes
from omni_connector_core import (
    NOT_READY,
    Key,
    PayloadExpiredError,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)

__all__ = ["TestCleanup", "TestExpiry", "TestFail", "TestRaces"]

RACES = 400
"""A backend that frees memory under one reader in a hundred is caught."""


def end_while_waiting(ends: Ends, key: Any, end: End, method: str, *args: Any) -> BaseException | None:
    """Let the consumer wait for a key, then call a method at an end; returns the error, which came in time."""
    ends.producer.put("warm", 0)
    ends.consumer.get("warm")
    waiting = ends.consumer.start_act(acts.get_and_tell_when, key)
    assert ends.consumer.poll("nothing") is NOT_READY
    started_s = end.act(acts.call_and_tell_when, method, *args)
    ended_s, error = waiting.result()
    assert ended_s - started_s < WITHIN_A_SECOND_S, f"{method} took {ended_s - started_s:.2f} s to arrive"
    found: BaseException | None = error
    return found


class TestFail(ContractTests):
    """A failure declared by the producer reaches who waits, and who asks later."""

    def test_fail_reaches_a_waiting_consumer_within_a_second(self, ends: Ends) -> None:
        error = end_while_waiting(ends, "k", ends.producer, "fail", "k", "the encoder ran out of memory")
        assert isinstance(error, ProducerFailedError)
        assert error.reason == "the encoder ran out of memory"

    def test_fail_reaches_a_consumer_that_asks_later(self, ends: Ends) -> None:
        ends.producer.fail("k", "because \N{SNOWMAN}")
        with pytest.raises(ProducerFailedError) as caught:
            ends.consumer.get("k", timeout=WITHIN_A_SECOND_S)
        assert caught.value.reason == "because \N{SNOWMAN}"
        assert isinstance(caught.value, RuntimeError)

    def test_fail_reaches_a_consumer_that_polls(self, ends: Ends) -> None:
        ends.producer.fail("k", "reason")
        with pytest.raises(ProducerFailedError):
            ends.consumer.act(acts.poll_until_there, "k", 2.0)

    def test_a_reason_of_any_length_and_spelling_arrives(self, ends: Ends) -> None:
        for key, reason in (("long", "x" * 100_000), ("name", "cannot read 'caf\udce9.png'")):
            ends.producer.fail(key, reason)
            with pytest.raises(ProducerFailedError) as caught:
                ends.consumer.get(key, timeout=WITHIN_A_SECOND_S)
            assert caught.value.reason.startswith(reason[:10])
        with pytest.raises(ValueError, match="reason"):
            ends.producer.fail("none", None)  # type: ignore[arg-type]

    def test_fail_reaches_every_waiting_consumer(self, ends: Ends) -> None:
        consumers = [ends.consumer, ends.consumer, ends.open("consumer", on="second consumer")]
        waiting = [consumer.start("get", "k") for consumer in consumers]
        ends.producer.fail("k", "reason")
        for pending in waiting:
            with pytest.raises(ProducerFailedError):
                pending.result()

    def test_fail_is_about_one_key(self, ends: Ends) -> None:
        ends.producer.put(Key("r", 1), "payload")
        ends.producer.fail(Key("r", 2), "reason")
        assert ends.consumer.get(Key("r", 1)) == "payload"
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get(Key("r", 3), timeout=0.1)

    def test_fail_drops_a_payload_that_was_put(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", Bulk(200_000))
        ends.producer.fail("k", "reason")
        with pytest.raises(ProducerFailedError):
            ends.consumer.get("k", metadata, timeout=WITHIN_A_SECOND_S)
        eventually(lambda: ends.producer.usage().bytes_held == 0)

    def test_a_later_put_clears_the_failure(self, ends: Ends) -> None:
        ends.producer.fail("k", "reason")
        with pytest.raises(ProducerFailedError):
            ends.consumer.get("k", timeout=WITHIN_A_SECOND_S)
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"

    def test_an_error_says_where_it_happened(self, ends: Ends) -> None:
        ends.producer.fail("k", "reason")
        with pytest.raises(ProducerFailedError) as caught:
            ends.consumer.get("k", timeout=WITHIN_A_SECOND_S)
        assert caught.value.key == Key("k")
        assert caught.value.edge == ("0", "1")
        assert caught.value.backend == ends.backend.name
        assert not caught.value.retryable


class TestCleanup(ContractTests):
    """`cleanup` ends exactly one request, on both sides, for good."""

    def test_cleanup_discards_all_chunks_and_shards_and_counts_them(self, ends: Ends) -> None:
        for key in (Key("r"), Key("r", 1), Key("r", 2, "a"), Key("r", 2, "b")):
            ends.producer.put(key, Bulk(10_000))
        assert ends.producer.cleanup("r") == 4
        assert ends.producer.usage().pending == 0
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        with pytest.raises(RequestAbandonedError):
            ends.consumer.get(Key("r", 1), timeout=WITHIN_A_SECOND_S)

    def test_cleanup_goes_by_request_not_by_prefix(self, ends: Ends) -> None:
        for key in ("req-1", "req-10", "req-1-decode", "req", "req-1/0", "REQ-1"):
            ends.producer.put(key, key)
        assert ends.producer.cleanup("req-1") == 1
        for key in ("req-10", "req-1-decode", "req", "req-1/0", "REQ-1"):
            assert ends.consumer.get(key) == key

    def test_cleanup_is_idempotent(self, ends: Ends) -> None:
        ends.producer.put("r", 1)
        assert ends.producer.cleanup("r") == 1
        assert ends.producer.cleanup("r") == 0
        assert ends.producer.cleanup("never seen") == 0

    def test_cleanup_counts_only_what_is_unread(self, ends: Ends) -> None:
        ends.producer.put(Key("r", 1), 1)
        ends.producer.put(Key("r", 2), 2)
        ends.consumer.get(Key("r", 1))
        eventually(lambda: ends.producer.usage().pending == 1)
        assert ends.producer.cleanup("r") == 1

    def test_a_put_after_cleanup_is_refused(self, ends: Ends) -> None:
        ends.producer.cleanup("r")
        for key in (Key("r"), Key("r", 7), Key("r", 0, "shard")):
            with pytest.raises(RequestAbandonedError):
                ends.producer.put(key, 1)
        ends.producer.put("another", 2)
        assert ends.consumer.get("another") == 2

    def test_cleanup_reaches_a_waiting_consumer(self, ends: Ends) -> None:
        error = end_while_waiting(ends, Key("r", 3), ends.producer, "cleanup", "r")
        assert isinstance(error, RequestAbandonedError)

    def test_a_consumer_can_clean_up(self, ends: Ends) -> None:
        for chunk in range(3):
            ends.producer.put(Key("r", chunk), Bulk(10_000))
        ends.producer.put("other", "stays")
        assert ends.consumer.cleanup("r") == 3
        eventually(lambda: ends.producer.usage().pending == 1)
        assert ends.consumer.get("other") == "stays"

    def test_a_consumers_cleanup_ends_its_own_wait(self, ends: Ends) -> None:
        error = end_while_waiting(ends, "r", ends.consumer, "cleanup", "r")
        assert isinstance(error, RequestAbandonedError)

    def test_a_producer_learns_of_a_consumers_cleanup(self, ends: Ends) -> None:
        ends.producer.put(Key("r", 0), 1)
        ends.consumer.cleanup("r")

        def refused() -> bool:
            try:
                ends.producer.put(Key("r", 1), 2)
            except RequestAbandonedError:
                return True
            ends.producer.cleanup("nothing")
            return False

        assert refused() or eventually(refused, within_s=WITHIN_A_SECOND_S)

    def test_a_producer_that_starts_later_learns_of_a_consumers_cleanup(self, ends: Ends) -> None:
        ends.consumer.cleanup("r")
        ends.producer.put("other", 0)
        assert ends.consumer.get("other") == 0

        def refused() -> bool:
            try:
                ends.producer.put("r", 1, **({"overwrite": True} if ends.backend.capabilities.overwrite else {}))
            except RequestAbandonedError:
                return True
            return False

        eventually(refused, within_s=WITHIN_A_SECOND_S)

    def test_what_was_got_before_stays_after_cleanup(self, ends: Ends) -> None:
        ends.producer.put("r", Bulk(200_000, seed=1))
        before = ends.consumer.act(acts.hold, "array", "r")
        ends.producer.cleanup("r")
        ends.producer.put("other", Bulk(200_000, seed=2))
        assert ends.consumer.act(acts.look, "array") == before
        ends.consumer.get_fingerprint("other")


class TestRaces(ContractTests):
    """A payload ends while somebody takes it: it is had whole or not at all."""

    def test_what_ends_while_it_is_taken_is_had_whole_or_not_at_all(self, ends: Ends) -> None:
        ends.producer.put("warm", 0)
        ends.consumer.get("warm")
        payload = Bulk(60_000, seed=1)
        waiting = ends.consumer.start_act(acts.get_each, "k", 4, RACES)
        ends.producer.act(acts.put_and_end_at_once, "k", payload, 4, RACES)
        allowed = {fingerprint(payload), "ProducerFailedError", "RequestAbandonedError"}
        assert set(waiting.result()) <= allowed
        eventually(lambda: ends.producer.usage().pending == 0, message="payloads still pending")


class TestExpiry(ContractTests):
    """What nobody reads is freed after its time-to-live, and whoever comes late learns why."""

    def test_an_expired_payload_is_an_error_of_its_own(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", 1, ttl=0.1)
        eventually(lambda: not ends.producer.exists("k")[0])
        for given in (None, metadata):
            with pytest.raises(PayloadExpiredError) as caught:
                ends.consumer.get("k", given, timeout=WITHIN_A_SECOND_S)
            assert not isinstance(caught.value, TimeoutError)

    def test_expiry_frees_the_memory_and_is_counted(self, ends: Ends) -> None:
        for n in range(3):
            ends.producer.put(f"k{n}", Bulk(200_000), ttl=0.1)
        eventually(lambda: not any(ends.producer.exists("k0", "k1", "k2")))
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        assert ends.producer.usage().pending == 0
        assert ends.producer.stats()["expired"] == 3

    def test_expiry_happens_without_anybody_asking(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000), ttl=0.1)
        eventually(lambda: ends.producer.usage().bytes_held == 0)

    @observes("ttl_s")
    def test_the_default_time_to_live_is_the_option(self, ends: Ends) -> None:
        producer = ends.open("producer", config={"ttl_s": 0.1})
        producer.put("k", 1)
        eventually(lambda: not producer.exists("k")[0])
        with pytest.raises(PayloadExpiredError):
            ends.consumer.get("k", timeout=WITHIN_A_SECOND_S)

    def test_a_payload_lives_as_long_as_it_was_told(self, ends: Ends) -> None:
        ends.producer.put("short", 1, ttl=0.1)
        ends.producer.put("long", 2, ttl=60)
        eventually(lambda: not ends.producer.exists("short")[0])
        assert ends.producer.exists("long") == [True]
        assert ends.consumer.get("long") == 2

    def test_a_read_payload_does_not_expire(self, ends: Ends) -> None:
        ends.producer.put("k", 1, ttl=0.3)
        ends.producer.put("other", 1, ttl=0.3)
        assert ends.consumer.get("k") == 1
        eventually(lambda: not ends.producer.exists("other")[0])
        assert ends.producer.stats()["expired"] == 1
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.1)

    def test_an_expired_key_can_be_put_again(self, ends: Ends) -> None:
        ends.producer.put("k", "old", ttl=0.1)
        eventually(lambda: not ends.producer.exists("k")[0])
        ends.producer.put("k", "new")
        assert ends.consumer.get("k") == "new"

    def test_what_was_got_in_time_stays_after_its_time(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1), ttl=0.3)
        before = ends.consumer.act(acts.hold, "array", "k")
        ends.producer.put("other", 1, ttl=0.4)
        eventually(lambda: not ends.producer.exists("other")[0])
        ends.producer.put("next", Bulk(200_000, seed=2))
        assert ends.consumer.act(acts.look, "array") == before
        ends.consumer.get_fingerprint("next")
