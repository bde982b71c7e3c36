"""Level 3: chunk streams over the backend, between two processes."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import flows
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, WITHIN_SECONDS_S, eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, observes, requires
from omni_connector_core import (
    Key,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)

__all__ = ["TestStreamEndings", "TestStreams"]


def bulks(count: int, nbytes: int = 3_000) -> list[Bulk]:
    return [Bulk(nbytes + 17 * n, seed=n) for n in range(count)]


def prints(chunks: list[Bulk]) -> list[str]:
    return [fingerprint(chunk) for chunk in chunks]


def nothing_held(ends: Ends) -> None:
    for end in (ends.producer, ends.consumer):
        eventually(lambda end=end: end.usage().pending == 0, message="chunks still pending")  # type: ignore[misc]
        eventually(lambda end=end: end.usage().bytes_held == 0, message="bytes still held")  # type: ignore[misc]


class TestStreams(ContractTests):
    """In order, exactly once, with an end, in bounded memory."""

    level = 3

    def test_a_stream_arrives_in_order_and_ends(self, ends: Ends) -> None:
        chunks = bulks(20)
        reading = ends.consumer.start_act(flows.read_stream, "r")
        assert ends.producer.act(flows.write_stream, "r", chunks) == 20
        assert reading.result() == prints(chunks)
        nothing_held(ends)

    def test_the_writer_may_be_far_ahead_of_the_reader(self, ends: Ends) -> None:
        chunks = bulks(6)
        ends.producer.act(flows.write_stream, "r", chunks, window=8)
        assert ends.consumer.act(flows.read_stream, "r") == prints(chunks)

    def test_an_empty_stream_is_a_stream(self, ends: Ends) -> None:
        reading = ends.consumer.start_act(flows.read_stream, "r")
        ends.producer.act(flows.write_stream, "r", [])
        assert reading.result() == []

    def test_the_end_comes_with_the_last_chunk(self, ends: Ends) -> None:
        chunks = bulks(3)
        ends.producer.act(flows.write_stream, "r", chunks, mark_last=True)
        assert ends.producer.stats()["puts"] == 3
        assert ends.consumer.act(flows.read_stream, "r") == prints(chunks)

    def test_the_end_never_overtakes_the_last_chunk(self, ends: Ends) -> None:
        for n in range(10):
            chunks = bulks(n % 4 + 1, nbytes=200_000)
            reading = ends.consumer.start_act(flows.read_stream, f"r{n}")
            ends.producer.act(flows.write_stream, f"r{n}", chunks, mark_last=n % 2 == 0)
            assert reading.result() == prints(chunks)

    @pytest.mark.parametrize("window", [1, 2, 3, 7])
    def test_any_window_delivers_everything(self, ends: Ends, window: int) -> None:
        chunks = bulks(17)
        reading = ends.consumer.start_act(flows.read_stream, "r", window=8 - window)
        ends.producer.act(flows.write_stream, "r", chunks, window=window)
        assert reading.result() == prints(chunks)

    def test_a_slow_reader_bounds_the_writers_memory(self, ends: Ends) -> None:
        writing = ends.producer.start_act(flows.most_pending_while_writing, "r", 40, 1_000, 4)
        for _ in range(40):
            ends.consumer.act(flows.read_some, "r", 1, window=4)
        assert ends.consumer.act(flows.read_to_the_end, "r")[1] is None
        assert 1 <= writing.result() <= 4

    def test_a_writer_without_a_reader_stops_at_its_window(self, ends: Ends) -> None:
        chunks = bulks(4)
        ends.producer.act(flows.write_stream, "r", [*chunks, chunks[0]], stop_after=4, window=4)
        with pytest.raises(TransferTimeoutError, match="unread chunks"):
            ends.producer.act(flows.write_on, "r", Bulk(10), timeout=0.2)
        assert ends.producer.usage().pending == 4
        assert ends.consumer.act(flows.read_some, "r", 4) == prints(chunks)
        ends.producer.act(flows.write_on, "r", Bulk(10), last=True)
        assert ends.consumer.act(flows.read_to_the_end, "r")[0] == prints([Bulk(10)])

    @observes("stream_window")
    def test_the_default_window_is_the_option(self, ends: Ends) -> None:
        producer = ends.open("producer", config={"stream_window": 2})
        producer.act(flows.write_stream, "r", bulks(3), stop_after=2)
        with pytest.raises(TransferTimeoutError, match="2 unread chunks"):
            producer.act(flows.write_on, "r", Bulk(10), timeout=0.2)
        producer.cleanup("r")

    def test_two_streams_of_a_request_keep_apart(self, ends: Ends) -> None:
        audio, text = bulks(9), bulks(5, nbytes=40)
        reading = [ends.consumer.start_act(flows.read_stream, "r", shard=shard) for shard in ("audio", "text")]
        writing = [
            ends.producer.start_act(flows.write_stream, "r", chunks, shard=shard)
            for shard, chunks in (("audio", audio), ("text", text))
        ]
        assert [pending.result() for pending in writing] == [9, 5]
        assert [pending.result() for pending in reading] == [prints(audio), prints(text)]

    def test_streams_of_many_requests_do_not_mix(self, ends: Ends) -> None:
        names = [f"request-{n}" for n in range(8)]
        reading = {name: ends.consumer.start_act(flows.read_stream, name) for name in names}
        writing = [
            ends.producer.start_act(flows.write_stream, name, [Bulk(2_000, seed=100 * n + c) for c in range(12)])
            for n, name in enumerate(names)
        ]
        for pending in writing:
            pending.result()
        for n, name in enumerate(names):
            assert reading[name].result() == prints([Bulk(2_000, seed=100 * n + c) for c in range(12)])
        nothing_held(ends)

    @requires("fan_out")
    def test_every_one_of_several_readers_gets_all_of_it(self, ends: Ends) -> None:
        chunks = bulks(12)
        consumers = [ends.consumer, ends.open("consumer", on="second consumer")]
        reading = [consumer.start_act(flows.read_stream, "r") for consumer in consumers]
        ends.producer.act(flows.write_stream, "r", chunks, readers=2, window=4)
        assert [pending.result() for pending in reading] == [prints(chunks)] * 2


class TestStreamEndings(ContractTests):
    """A stream that does not reach its end tells the other side, and leaves nothing."""

    level = 3

    def test_a_failure_comes_after_what_was_written(self, ends: Ends) -> None:
        chunks = bulks(3)
        ends.producer.act(flows.write_stream, "r", [*chunks, chunks[0]], stop_after=3)
        ends.producer.act(flows.fail_stream, "r", "the vocoder overflowed")
        assert ends.consumer.act(flows.read_some, "r", 3) == prints(chunks)
        _, error, _ = ends.consumer.act(flows.read_to_the_end, "r")
        assert isinstance(error, ProducerFailedError)
        assert error.reason == "the vocoder overflowed"
        nothing_held(ends)

    def test_a_waiting_reader_learns_of_a_failure_within_a_second(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(2), stop_after=1)
        ends.consumer.act(flows.read_some, "r", 1)
        waiting = ends.consumer.start_act(flows.read_to_the_end, "r")
        ends.producer.act(flows.fail_stream, "r", "no")
        _, error, _ = waiting.result(WITHIN_A_SECOND_S + WITHIN_A_SECOND_S)
        assert isinstance(error, ProducerFailedError)

    def test_a_reader_that_leaves_stops_the_writer_and_frees_both_sides(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(9), stop_after=8, window=8)
        ends.consumer.act(flows.read_some, "r", 2, leave=True)
        nothing_held(ends)
        with pytest.raises(RequestAbandonedError):
            ends.producer.act(flows.write_on, "r", Bulk(10))

    def test_a_writer_that_waits_for_credit_is_woken_when_the_reader_leaves(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(3), stop_after=2, window=2)
        ends.consumer.act(flows.read_some, "r", 1, window=1)
        ends.producer.act(flows.write_on, "r", Bulk(10))
        waiting = ends.producer.start_act(flows.write_on, "r", Bulk(20), timeout=60.0)
        ends.consumer.act(flows.read_some, "r", 0, leave=True)
        with pytest.raises(RequestAbandonedError):
            waiting.result(WITHIN_SECONDS_S)

    def test_cleanup_at_the_producer_reaches_the_reader(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(3), stop_after=1)
        ends.consumer.act(flows.read_some, "r", 1)
        waiting = ends.consumer.start_act(flows.read_to_the_end, "r")
        ends.producer.cleanup("r")
        assert isinstance(waiting.result(WITHIN_SECONDS_S)[1], RequestAbandonedError)
        nothing_held(ends)

    def test_credits_come_back_after_an_abort(self, ends: Ends) -> None:
        for n in range(6):
            ends.producer.act(flows.write_stream, f"r{n}", bulks(5), stop_after=4, window=4)
            ends.consumer.act(flows.read_some, f"r{n}", 1, leave=True, window=4)
        nothing_held(ends)
        reading = ends.consumer.start_act(flows.read_stream, "whole")
        ends.producer.act(flows.write_stream, "whole", bulks(10), window=4)
        assert reading.result() == prints(bulks(10))

    def test_the_counters_say_who_waited_for_whom(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(3), stop_after=2, window=2)
        with pytest.raises(TransferTimeoutError):
            ends.producer.act(flows.write_on, "r", Bulk(10), timeout=0.1)
        assert ends.producer.stats()["failures"] == {"write:TransferTimeoutError": 1}
        ends.consumer.act(flows.read_some, "r", 2)
        ends.producer.act(flows.write_on, "r", Bulk(10))
        assert ends.producer.stats()["credit_time"]["count"] == 1
        ends.consumer.act(flows.read_some, "r", 1)
        with pytest.raises(TransferTimeoutError):
            ends.consumer.act(flows.read_some, "other", 1, timeout=0.1)
        assert ends.consumer.stats()["failures"] == {"get:TransferTimeoutError": 1}

    def test_an_unread_stream_expires(self, ends: Ends) -> None:
        ends.producer.act(flows.write_stream, "r", bulks(3), ttl=0.3)
        nothing_held(ends)
        assert ends.producer.stats()["expired"] >= 3

    @requires("cross_process")
    def test_a_reader_learns_within_seconds_that_the_writer_died(self, ends: Ends) -> None:
        mortal = ends.open("producer", on="mortal")
        mortal.act(flows.write_stream, "r", bulks(3), stop_after=2)
        ends.consumer.act(flows.read_some, "r", 2)
        waiting = ends.consumer.start_act(flows.read_to_the_end, "r")
        assert ends.consumer.exists(Key("other")) == [False]
        ends.process(mortal).kill()
        assert isinstance(waiting.result(WITHIN_SECONDS_S)[1], PeerLostError)

    @requires("cross_process")
    def test_a_writer_outlives_a_reader_that_died(self, ends: Ends) -> None:
        mortal = ends.open("consumer", on="mortal")
        reading = mortal.start_act(flows.read_some, "r", 3, window=4)
        ends.producer.act(flows.write_stream, "r", bulks(4), stop_after=3, window=4)
        reading.result()
        ends.process(mortal).kill()
        ends.producer.cleanup("r")
        with pytest.raises(RequestAbandonedError):
            ends.producer.act(flows.write_on, "r", Bulk(10))
        eventually(lambda: ends.producer.usage().pending == 0)
        eventually(lambda: ends.producer.usage().bytes_held == 0)
