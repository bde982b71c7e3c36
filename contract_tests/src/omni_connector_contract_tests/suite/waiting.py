"""Level 1: polling, waiting and deadlines (point 3), and handles of submitted transfers (point 16)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, observes
from omni_connector_core import NOT_READY, TransferTimeoutError

__all__ = ["TestHandles", "TestWaiting"]

A_WAIT_S = 0.4


class TestWaiting(ContractTests):
    """Nothing waits longer than it was told, wakes late, or burns a core meanwhile."""

    def test_poll_says_not_ready(self, ends: Ends) -> None:
        assert ends.consumer.poll("k") is NOT_READY
        ends.producer.put("other", 1)
        assert ends.consumer.poll("k") is NOT_READY

    def test_poll_finds_what_was_put(self, ends: Ends) -> None:
        ends.producer.put("k", "payload")
        assert ends.consumer.act(acts.poll_until_there, "k", 2.0) == "payload"
        assert ends.consumer.poll("k") is NOT_READY

    def test_poll_finds_a_payload_by_metadata(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", Bulk(200_000))
        found = eventually(lambda: [p for p in [ends.consumer.poll("k", metadata)] if p is not NOT_READY])
        assert fingerprint(found[0]) == fingerprint(Bulk(200_000))

    def test_poll_finds_what_is_put_after_the_first_poll(self, ends: Ends) -> None:
        assert ends.consumer.poll("k") is NOT_READY
        ends.producer.put("k", None)
        assert ends.consumer.act(acts.poll_until_there, "k", 2.0) is None

    def test_news_says_when_a_poll_can_find_something(self, ends: Ends) -> None:
        for n in range(3):
            seen = ends.consumer.act(acts.news)
            assert ends.consumer.poll(f"k{n}") is NOT_READY
            ends.producer.put(f"k{n}", n)
            assert ends.consumer.act(acts.poll_at_news, f"k{n}", seen, 2.0) == n

    def test_poll_never_blocks(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        assert ends.consumer.act(acts.median_poll_s, "k", 20) < 0.05

    def test_get_waits_for_a_payload_that_comes_later(self, ends: Ends) -> None:
        waiting = ends.consumer.start("get", "k")
        ends.producer.put("k", "payload")
        assert waiting.result() == "payload"

    def test_the_consumer_may_start_before_the_producer(self, ends: Ends) -> None:
        waiting = ends.consumer.start("get", "k")
        assert ends.consumer.poll("other") is NOT_READY  # the consumer runs, and there is no producer
        ends.producer.put("k", "payload")
        assert waiting.result() == "payload"

    def test_a_waiting_get_wakes_within_a_second(self, ends: Ends) -> None:
        ends.producer.put("first", 0)
        ends.consumer.get("first")
        for n in range(3):
            waiting = ends.consumer.start_act(acts.get_and_tell_when, f"k{n}")
            assert ends.consumer.poll("nothing") is NOT_READY
            put_at_s = ends.producer.act(acts.call_and_tell_when, "put", f"k{n}", n)
            got_at_s, error = waiting.result()
            assert error is None
            assert got_at_s - put_at_s < WITHIN_A_SECOND_S

    def test_get_times_out_when_told(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        seconds, _, error = ends.consumer.act(acts.timed, "get", "k", timeout=A_WAIT_S)
        assert isinstance(error, TransferTimeoutError)
        assert isinstance(error, TimeoutError)
        assert A_WAIT_S * 0.9 <= seconds < A_WAIT_S + WITHIN_A_SECOND_S
        assert error.retryable

    def test_get_times_out_when_there_is_no_producer(self, ends: Ends) -> None:
        seconds, _, error = ends.consumer.act(acts.timed, "get", "k", timeout=A_WAIT_S)
        assert isinstance(error, TransferTimeoutError)
        assert A_WAIT_S * 0.9 <= seconds < A_WAIT_S + WITHIN_A_SECOND_S

    def test_a_timeout_of_zero_does_not_wait(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        seconds, _, error = ends.consumer.act(acts.timed, "get", "k", timeout=0)
        assert isinstance(error, TransferTimeoutError)
        assert seconds < WITHIN_A_SECOND_S

    @observes("timeout_s")
    def test_the_default_timeout_is_the_option(self, ends: Ends) -> None:
        consumer = ends.open("consumer", config={"timeout_s": A_WAIT_S})
        seconds, _, error = consumer.act(acts.timed, "get", "k")
        assert isinstance(error, TransferTimeoutError)
        assert A_WAIT_S * 0.9 <= seconds < A_WAIT_S + WITHIN_A_SECOND_S

    def test_waiting_does_not_spin(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        ends.consumer.get("other")
        assert ends.consumer.act(acts.share_of_a_core, "get", "k", timeout=1.0) < 0.25

    def test_waiting_for_nobody_does_not_spin(self, ends: Ends) -> None:
        assert ends.consumer.act(acts.share_of_a_core, "get", "k", timeout=1.0) < 0.25

    def test_a_payload_may_come_after_a_timeout(self, ends: Ends) -> None:
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.1)
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"

    def test_a_timed_out_get_takes_no_read(self, ends: Ends) -> None:
        ends.producer.put("other", 0)
        for _ in range(3):
            with pytest.raises(TransferTimeoutError):
                ends.consumer.get("k", timeout=0.05)
        ends.producer.put("k", "payload")
        other = ends.open("consumer", on="second consumer")
        assert other.get("k") == "payload"


class TestHandles(ContractTests):
    """`submit_put` and `submit_get` return at once; `done` never blocks."""

    def test_submitted_puts_arrive(self, ends: Ends) -> None:
        payloads = {f"k{n}": Bulk(10_000, seed=n) for n in range(8)}
        metadata = ends.producer.act(acts.submit_puts, payloads)
        for key, payload in payloads.items():
            assert ends.consumer.get_fingerprint(key, metadata[key]) == fingerprint(payload)

    def test_a_submitted_get_is_done_when_the_payload_is_there(self, ends: Ends) -> None:
        assert not ends.consumer.act(acts.submit_get, "handle", "k")
        assert not ends.consumer.act(acts.handle_done, "handle")
        ends.producer.put("k", "payload")
        eventually(lambda: ends.consumer.act(acts.handle_done, "handle"))
        assert ends.consumer.act(acts.handle_result, "handle") == "payload"
        assert ends.consumer.act(acts.handle_result, "handle") == "payload"

    def test_the_result_of_a_submitted_get_can_be_waited_for(self, ends: Ends) -> None:
        ends.consumer.act(acts.submit_get, "handle", "k")
        with pytest.raises(TransferTimeoutError):
            ends.consumer.act(acts.handle_result, "handle", 0.1)
        waiting = ends.consumer.start_act(acts.handle_result, "handle")
        ends.producer.put("k", False)
        assert waiting.result() is False

    def test_a_cancelled_get_leaves_the_payload_to_others(self, ends: Ends) -> None:
        assert not ends.consumer.act(acts.submit_get, "handle", "k")
        ends.consumer.act(acts.handle_cancel, "handle")
        ends.producer.put("k", "payload")
        other = ends.open("consumer", on="second consumer")
        assert other.get("k") == "payload"
