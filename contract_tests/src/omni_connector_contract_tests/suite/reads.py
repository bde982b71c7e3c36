"""Level 1: how often a payload can be read (point 4), conflicts and replacement (point 5)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, requires, without
from omni_connector_core import NOT_READY, PayloadConflictError, TransferTimeoutError, UnsupportedError

__all__ = ["TestReads", "TestReplacing"]


class TestReads(ContractTests):
    """Exactly as many reads as were allowed, then the memory is free on both sides."""

    def test_a_payload_is_read_once(self, ends: Ends) -> None:
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"
        assert ends.consumer.poll("k") is NOT_READY
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.2)

    def test_two_consumers_do_not_get_the_same_read(self, ends: Ends) -> None:
        ends.producer.put("other", 0)
        first = ends.consumer.start("get", "k", timeout=1.0)
        second = ends.open("consumer", on="second consumer").start("get", "k", timeout=1.0)
        ends.producer.put("k", "payload")
        outcomes = []
        for waiting in (first, second):
            try:
                outcomes.append(waiting.result())
            except TransferTimeoutError:
                outcomes.append(None)
        assert sorted(outcomes, key=str) == [None, "payload"]

    def test_reading_frees_the_memory(self, ends: Ends) -> None:
        for n in range(3):
            ends.producer.put(f"k{n}", Bulk(200_000, seed=n))
        assert ends.producer.usage().pending == 3
        assert ends.producer.usage().bytes_held >= 300_000 or not ends.backend.capabilities.bounded
        for n in range(3):
            ends.consumer.get_fingerprint(f"k{n}")
        eventually(lambda: ends.producer.usage().pending == 0, message="payloads still pending")
        eventually(lambda: ends.producer.usage().bytes_held == 0, message="the producer still holds bytes")
        eventually(lambda: ends.consumer.usage().bytes_held == 0, message="the consumer still holds bytes")

    def test_a_producer_can_wait_until_its_payload_is_consumed(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000))
        assert not ends.producer.act(acts.consumed, "k", timeout=0.2)
        waiting = ends.producer.start_act(acts.consumed, "k")
        ends.consumer.get_fingerprint("k")
        assert waiting.result()

    def test_no_readers_at_all_is_an_error(self, ends: Ends) -> None:
        with pytest.raises(ValueError, match="readers"):
            ends.producer.put("k", 1, readers=0)

    @requires("fan_out")
    def test_n_readers_get_it_n_times_and_no_more(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", Bulk(50_000, seed=3), readers=3)
        ends_of = [ends.consumer, ends.open("consumer", on="second consumer"), ends.consumer]
        for n, consumer in enumerate(ends_of):
            assert consumer.get_fingerprint("k", metadata if n else None) == fingerprint(Bulk(50_000, seed=3))
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.2)
        with pytest.raises(TransferTimeoutError):
            ends_of[1].get("k", metadata, timeout=0.2)

    @requires("fan_out")
    def test_the_memory_is_freed_after_the_last_of_n_readers(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(50_000), readers=2)
        ends.consumer.get_fingerprint("k")
        assert ends.producer.usage().pending == 1
        ends.consumer.get_fingerprint("k")
        eventually(lambda: ends.producer.usage().pending == 0)
        eventually(lambda: ends.producer.usage().bytes_held == 0)

    @requires("fan_out")
    def test_n_waiting_readers_all_get_it(self, ends: Ends) -> None:
        others = [ends.consumer, ends.open("consumer", on="second consumer")]
        waiting = [consumer.start("get", "k") for consumer in others]
        ends.producer.put("k", ["payload"], readers=2)
        assert [pending.result() for pending in waiting] == [["payload"], ["payload"]]

    @requires("fan_out")
    def test_n_readers_cannot_change_what_the_others_see(self, ends: Ends) -> None:
        payload = Bulk(200_000, seed=5)
        ends.producer.put("k", payload, readers=2)
        ends.consumer.act(acts.hold, "array", "k")
        ends.consumer.act(acts.write_into_kept, "array")
        other = ends.open("consumer", on="second consumer")
        assert other.get_fingerprint("k") == fingerprint(payload)

    @without("fan_out")
    def test_fan_out_that_is_not_claimed_is_refused(self, ends: Ends) -> None:
        with pytest.raises(UnsupportedError, match="fan_out"):
            ends.producer.put("k", 1, readers=2)


class TestReplacing(ContractTests):
    """A live key is not overwritten by accident, and never half."""

    def test_putting_a_live_key_is_a_conflict(self, ends: Ends) -> None:
        ends.producer.put("k", "first")
        with pytest.raises(PayloadConflictError) as caught:
            ends.producer.put("k", "second")
        assert isinstance(caught.value, ValueError)
        assert ends.consumer.get("k") == "first"

    def test_after_a_conflict_the_key_is_free_again_once_read(self, ends: Ends) -> None:
        ends.producer.put("k", "first")
        with pytest.raises(PayloadConflictError):
            ends.producer.put("k", "second")
        ends.consumer.get("k")
        eventually(lambda: not ends.producer.exists("k")[0])
        ends.producer.put("k", "third")
        assert ends.consumer.get("k") == "third"

    @requires("overwrite")
    def test_overwrite_replaces_the_payload(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(60_000, seed=1))
        metadata = ends.producer.put("k", Bulk(90_000, seed=2), overwrite=True)
        assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(90_000, seed=2))
        assert ends.consumer.poll("k") is NOT_READY

    @requires("overwrite")
    def test_overwrite_found_by_key_gives_the_new_value(self, ends: Ends) -> None:
        ends.producer.put("k", "old")
        ends.producer.put("k", "new", overwrite=True)
        assert ends.consumer.get("k") == "new"
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.2)

    @requires("overwrite")
    def test_metadata_of_the_replaced_payload_never_gives_the_old_value(self, ends: Ends) -> None:
        stale = ends.producer.put("k", Bulk(60_000, seed=1))
        ends.producer.put("k", Bulk(60_000, seed=2), overwrite=True)
        assert ends.consumer.get_fingerprint("k", stale) == fingerprint(Bulk(60_000, seed=2))

    @requires("overwrite")
    def test_overwrite_of_a_key_that_is_not_live_is_a_put(self, ends: Ends) -> None:
        ends.producer.put("k", "payload", overwrite=True)
        assert ends.consumer.get("k") == "payload"

    @requires("overwrite")
    def test_overwrite_frees_what_it_replaces(self, ends: Ends) -> None:
        for n in range(4):
            ends.producer.put("k", Bulk(200_000, seed=n), overwrite=True)
        assert ends.producer.usage().pending == 1
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000, seed=3))
        eventually(lambda: ends.producer.usage().bytes_held == 0)

    @requires("overwrite")
    def test_what_was_got_before_is_untouched_by_an_overwrite(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "first", "k")
        for seed in (2, 3):
            ends.producer.put("k", Bulk(200_000, seed=seed), overwrite=True)
        assert ends.consumer.act(acts.look, "first") == fingerprint(Bulk(200_000, seed=1))
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000, seed=3))

    @requires("overwrite")
    def test_overwrite_sets_the_number_of_reads_anew(self, ends: Ends) -> None:
        if ends.backend.capabilities.fan_out:
            ends.producer.put("k", "old", readers=3)
        else:
            ends.producer.put("k", "old")
        ends.producer.put("k", "new", overwrite=True)
        assert ends.consumer.get("k") == "new"
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.2)

    @without("overwrite")
    def test_overwrite_that_is_not_claimed_is_refused(self, ends: Ends) -> None:
        with pytest.raises(UnsupportedError, match="overwrite"):
            ends.producer.put("k", 1, overwrite=True)
