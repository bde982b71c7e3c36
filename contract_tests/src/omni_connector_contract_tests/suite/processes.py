"""Level 1: processes that die, stop and come back (point 10)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, WITHIN_SECONDS_S, eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.peers import PeerGoneError
from omni_connector_contract_tests.harness.probes import check_gone, files_of
from omni_connector_contract_tests.suite.base import ContractTests, requires, without
from omni_connector_core import NOT_READY, PeerLostError, Producer, TransferTimeoutError

__all__ = ["TestDeath", "TestStandstill"]


def acquaint(ends: Ends, producer: End, consumer: End) -> None:
    """Let a consumer meet a producer."""
    producer.put("acquaint", 0)
    assert consumer.get("acquaint") == 0


@requires("cross_process")
class TestDeath(ContractTests):
    """SIGKILL, at either end, at any time: told within seconds, nothing wrong delivered, nothing left."""

    @without("outlives_producer")
    def test_a_waiting_consumer_learns_within_seconds_that_the_producer_died(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        waiting = ends.consumer.start("get", "k", timeout=60.0)
        assert ends.consumer.poll("other") is NOT_READY
        ends.process(producer).kill()
        with pytest.raises(PeerLostError) as caught:
            waiting.result(WITHIN_SECONDS_S)
        assert isinstance(caught.value, ConnectionError)

    @without("outlives_producer")
    def test_an_unread_payload_dies_with_its_producer(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        metadata = producer.put("k", Bulk(200_000))
        ends.process(producer).kill()
        seconds, _, error = ends.consumer.act(acts.timed, "get", "k", metadata, timeout=60.0)
        assert isinstance(error, PeerLostError)
        assert seconds < WITHIN_SECONDS_S

    @without("outlives_producer")
    def test_metadata_of_a_producer_that_died_unseen_is_an_error_within_seconds(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        metadata = producer.put("k", Bulk(200_000))
        ends.process(producer).kill()
        seconds, _, error = ends.consumer.act(acts.timed, "get", "k", metadata, timeout=60.0)
        assert isinstance(error, PeerLostError)
        assert seconds < WITHIN_SECONDS_S

    @requires("outlives_producer")
    def test_an_unread_payload_outlives_its_producer(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        metadata = {key: producer.put(key, Bulk(200_000, seed=n)) for n, key in enumerate(("a", "b"))}
        ends.process(producer).kill()
        assert ends.consumer.get_fingerprint("a", metadata["a"]) == fingerprint(Bulk(200_000, seed=0))
        assert ends.consumer.get_fingerprint("b") == fingerprint(Bulk(200_000, seed=1))

    def test_another_producer_is_waited_for_when_one_dies(self, ends: Ends) -> None:
        mortal = ends.open("producer", on="mortal", replica=1)
        acquaint(ends, mortal, ends.consumer)
        acquaint(ends, ends.producer, ends.consumer)
        waiting = ends.consumer.start("get", "k")
        assert ends.consumer.poll("other") is NOT_READY
        ends.process(mortal).kill()
        if not ends.backend.capabilities.outlives_producer:
            with pytest.raises(PeerLostError):  # now the consumer knows
                ends.consumer.get("other", producer=Producer(1, 0))
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("nothing", timeout=0.3)
        assert not waiting.done()
        ends.producer.put("k", "payload")
        assert waiting.result() == "payload"

    def test_what_was_got_stays_when_the_producer_dies(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        producer.put("k", Bulk(300_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        ends.process(producer).kill()
        again = ends.open("producer", on="mortal")
        for n in range(2, 5):
            again.put("k", Bulk(300_000, seed=n))
            assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(300_000, seed=n))
        assert ends.consumer.act(acts.look, "view") == fingerprint(Bulk(300_000, seed=1))

    @pytest.mark.parametrize("nbytes", [1_000, 30_000_000])
    def test_a_consumed_payload_needs_its_producer_no_more(self, ends: Ends, nbytes: int) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        waiting = ends.consumer.start_act(acts.hold, "view", "k")
        assert ends.consumer.poll("other") is NOT_READY
        with pytest.raises(PeerGoneError):
            producer.act(acts.put_and_die_once_consumed, "k", Bulk(nbytes))
        assert waiting.result() == fingerprint(Bulk(nbytes))
        ends.open("producer", on="mortal").put("next", "payload")
        assert ends.consumer.get("next") == "payload"

    def test_a_restarted_producers_payload_is_the_one_delivered(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        ends.process(producer).kill()
        again = ends.open("producer", on="mortal")
        metadata = again.put("k", "new")
        assert ends.consumer.get("k", metadata) == "new"
        again.put("k", "newer")
        assert ends.consumer.get("k") == "newer"

    @without("outlives_producer")
    def test_an_old_payload_is_not_delivered_as_new_after_a_restart(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        stale = producer.put("k", Bulk(80_000, seed=1))
        ends.process(producer).kill()
        ends.open("producer", on="mortal").put("k", Bulk(80_000, seed=2))
        with pytest.raises(PeerLostError):
            ends.consumer.get("k", stale)
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(80_000, seed=2))

    def test_a_consumer_that_dies_with_a_view_gives_the_memory_back(self, ends: Ends) -> None:
        consumer = ends.open("consumer", on="mortal")
        ends.producer.put("k", Bulk(300_000))
        consumer.act(acts.hold, "view", "k")
        ends.process(consumer).kill()
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        ends.producer.put("k", "next")
        assert ends.consumer.get("k") == "next"

    def test_a_payload_is_not_lost_to_a_consumer_that_died_waiting(self, ends: Ends) -> None:
        mortal = ends.open("consumer", on="mortal")
        acquaint(ends, ends.producer, mortal)
        mortal.start("get", "k")
        assert mortal.poll("other") is NOT_READY
        ends.process(mortal).kill()
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"

    def test_a_producer_killed_while_it_puts_delivers_whole_payloads_or_errors(self, ends: Ends) -> None:
        for n in range(4):
            producer = ends.open("producer", on="mortal", edge=(f"r{n}", "1"))
            consumer = ends.open("consumer", edge=(f"r{n}", "1"))
            acquaint(ends, producer, consumer)
            producer.start_act(acts.put_for_ever, 400_000)
            for got in range(1000):
                try:  # while the producer lives, a busy machine may take its time
                    found = consumer.get_fingerprint(f"k{got}", timeout=30 if got <= 3 * n else 2)
                except (PeerLostError, TransferTimeoutError):
                    break
                assert found == fingerprint(Bulk(400_000, seed=got % 4))
                if got == 3 * n:
                    ends.process(producer).kill()
            assert got >= 3 * n
            consumer.close()

    def test_what_dead_processes_left_is_swept_by_the_next_start(self, ends: Ends) -> None:
        before = files_of(ends.peers)
        for _ in range(2):
            producer = ends.open("producer", on="mortal")
            producer.put("k", Bulk(300_000))
            ends.process(producer).kill()
        foreign = ends.peers.folder / "not-ours.txt"
        foreign.write_text("stays")
        again = ends.open("producer", on="mortal")
        again.put("sweeper", "payload")
        assert ends.consumer.get("sweeper") == "payload"
        if ends.backend.capabilities.outlives_producer:
            ends.consumer.cleanup("k")
        again.close()
        ends.consumer.close()
        check_gone(lambda collect: sorted(files_of(ends.peers) - before - {str(foreign)}))
        assert foreign.read_text() == "stays"
        foreign.unlink()


@requires("cross_process")
class TestStandstill(ContractTests):
    """SIGSTOP: nobody waits beyond a deadline, and nothing is lost."""

    def test_a_stopped_producer_costs_the_consumer_no_more_than_its_deadline(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        process = ends.process(producer)
        process.pause()
        try:
            seconds, _, error = ends.consumer.act(acts.timed, "get", "k", timeout=0.5)
            assert isinstance(error, TransferTimeoutError)
            assert seconds < 0.5 + WITHIN_A_SECOND_S
            assert ends.consumer.poll("k") is NOT_READY
        finally:
            process.resume()
        producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"

    def test_a_payload_survives_its_producers_standstill(self, ends: Ends) -> None:
        producer = ends.open("producer", on="mortal")
        acquaint(ends, producer, ends.consumer)
        metadata = producer.put("k", Bulk(200_000, seed=1))
        process = ends.process(producer)
        process.pause()
        try:
            seconds, _, error = ends.consumer.act(acts.timed, "get", "k", metadata, timeout=0.5)
            assert error is None or isinstance(error, TransferTimeoutError)
            assert seconds < 0.5 + WITHIN_A_SECOND_S
        finally:
            process.resume()
        if error is not None:
            assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(200_000, seed=1))

    def test_a_stopped_consumer_does_not_stop_the_producer(self, ends: Ends) -> None:
        consumer = ends.open("consumer", on="mortal")
        acquaint(ends, ends.producer, consumer)
        waiting = consumer.start("get", "k", timeout=60.0)
        assert consumer.poll("other") is NOT_READY
        process = ends.process(consumer)
        process.pause()
        try:
            for n in range(20):
                seconds, _, error = ends.producer.act(acts.timed, "put", f"k{n}", n)
                assert error is None
                assert seconds < WITHIN_A_SECOND_S
                assert ends.consumer.get(f"k{n}") == n
            ends.producer.put("k", "payload")
        finally:
            process.resume()
        assert waiting.result() == "payload"

    @requires("cross_host")
    def test_metadata_alone_leads_there_with_no_folder_in_common(self, ends: Ends) -> None:
        elsewhere = ends.open("consumer", on="elsewhere")
        metadata = ends.producer.put("k", Bulk(300_000, seed=1))
        assert elsewhere.get_fingerprint("k", metadata) == fingerprint(Bulk(300_000, seed=1))
