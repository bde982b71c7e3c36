"""Level 4: a KV cache from one group of ranks to another, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from omni_connector_contract_tests.harness import caches
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, WITHIN_SECONDS_S, eventually
from omni_connector_contract_tests.suite.base import ContractTests, requires, without
from omni_connector_core import (
    CapacityError,
    IncompatibleKVError,
    PayloadExpiredError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
)
from omni_connector_core.kv import KVSpec
from omni_connector_core.kv.spec import Span

__all__ = ["TestKVEndings", "TestKVFlow"]

TOKENS = 21
LAYERS = 3


def kv(**fields: Any) -> KVSpec:
    values = {"num_layers": LAYERS, "num_kv_heads": 4, "head_size": 16, "block_size": 4, "dtype": "float16"}
    return KVSpec(**{**values, **fields})


def size_of(spec: KVSpec) -> int:
    return len(list(spec.ranks()))


def group(ends: Ends, role: str, spec: KVSpec) -> list[End]:
    """Open an end per rank; ranks beyond the second share the peers of the first two."""
    return [
        ends.open(role, on=f"{role} {number % 2}" if number else role, rank=number) for number in range(size_of(spec))
    ]


def transfer(
    ends: Ends, producer: KVSpec, consumer: KVSpec, request_id: str = "r", *, readers: int = 1, replica: int | None = 0
) -> list[dict[str, Any]]:
    """Send from every rank to every rank; returns what the consumers tell."""
    senders, receivers = group(ends, "producer", producer), group(ends, "consumer", consumer)
    receiving = [
        end.start_act(caches.receive, caches.of_rank(consumer, n), producer, request_id, TOKENS, replica=replica)
        for n, end in enumerate(receivers * readers)
        for n in [n % len(receivers)]
    ]
    sending = [
        end.start_act(caches.send, caches.of_rank(producer, n), consumer, request_id, TOKENS, readers=readers)
        for n, end in enumerate(senders)
    ]
    for pending in sending:
        pending.result()
    told = [pending.result() for pending in receiving]
    for sender in senders:
        eventually(lambda sender=sender: sender.usage().pending == 0, message="parts still pending")  # type: ignore[misc]
        eventually(lambda sender=sender: sender.usage().bytes_held == 0, message="bytes still held")  # type: ignore[misc]
    return told


def complete(told: list[dict[str, Any]]) -> None:
    """Check that every consumer has all of its cache, and knows it."""
    for one in told:
        assert one["error"] is None
        assert one["faults"] == 0
        assert one["invalid"] == []
        assert one["reuse"] == one["tokens"]


class TestKVFlow(ContractTests):
    """Every cell of the cache arrives where it belongs, whatever the shapes of the two groups."""

    level = 4

    @pytest.mark.parametrize(("from_tp", "to_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 8), (8, 2)])
    def test_tensor_parallel_sizes_may_differ(self, ends: Ends, from_tp: int, to_tp: int) -> None:
        complete(transfer(ends, kv(tp_size=from_tp), kv(tp_size=to_tp)))

    @pytest.mark.parametrize("layout", ["kv_first", "block_first", "heads_first", "separate"])
    def test_layouts_and_block_sizes_may_differ(self, ends: Ends, layout: str) -> None:
        complete(transfer(ends, kv(layout=layout), kv(block_size=8)))
        complete(transfer(ends, kv(block_size=3), kv(layout=layout), "back"))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    def test_every_dtype_arrives_bit_for_bit(self, ends: Ends, dtype: str) -> None:
        complete(transfer(ends, kv(dtype=dtype), kv(dtype=dtype)))

    def test_a_latent_cache_is_whole_at_every_rank(self, ends: Ends) -> None:
        complete(transfer(ends, kv(layout="latent", num_kv_heads=1), kv(layout="latent", num_kv_heads=1, tp_size=2)))

    def test_pipeline_ranges_may_differ(self, ends: Ends) -> None:
        complete(transfer(ends, kv(pp_ranges=(Span(0, 1), Span(1, 3))), kv(pp_ranges=(Span(0, 2), Span(2, 3)))))

    def test_each_sequence_parallel_rank_gets_its_own_tokens_and_is_told_their_number(self, ends: Ends) -> None:
        told = transfer(ends, kv(), kv(sp_size=2))
        complete(told)
        assert [one["reuse"] for one in told] == [11, 10]
        complete(transfer(ends, kv(sp_size=2), kv(tp_size=2), "gathered"))

    @requires("fan_out")
    def test_two_groups_of_consumers_read_what_is_sent_once(self, ends: Ends) -> None:
        told = transfer(ends, kv(), kv(), readers=2)
        assert len(told) == 2
        complete(told)

    def test_a_layer_is_usable_before_the_next_is_sent(self, ends: Ends) -> None:
        receiving = ends.consumer.start_act(caches.receive, kv(), kv(), "r", TOKENS, layers=1)
        ends.producer.act(caches.send, kv(), kv(), "r", TOKENS, layers=1)
        told = receiving.result()
        assert (told["layers"], told["faults"]) == (1, 0)
        assert told["invalid"] == told["blocks"]
        assert told["reuse"] == 0

    def test_caches_of_two_requests_do_not_mix(self, ends: Ends) -> None:
        for request_id in ("a", "b"):
            ends.producer.act(caches.send, kv(), kv(), request_id, TOKENS)
        for request_id in ("b", "a"):
            complete([ends.consumer.act(caches.receive, kv(), kv(), request_id, TOKENS)])

    def test_two_replicas_that_hold_the_same_request_are_told_apart(self, ends: Ends) -> None:
        for replica in range(2):
            end = ends.open("producer", on=f"replica {replica}", replica=replica)
            end.act(caches.send, kv(), kv(), "r", TOKENS)
        complete([ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS, replica=1)])
        complete([ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS, replica=0)])


class TestKVEndings(ContractTests):
    """A flow that does not reach its last layer gives everything back, and nothing of it counts as a cache."""

    level = 4

    def test_an_abort_at_the_producer_reaches_the_consumer(self, ends: Ends) -> None:
        receiving = ends.consumer.start_act(caches.receive, kv(), kv(), "r", TOKENS)
        ends.producer.act(caches.send, kv(), kv(), "r", TOKENS, layers=2, fail="the request was aborted")
        told = receiving.result()
        assert isinstance(told["error"], ProducerFailedError)
        assert told["error"].reason == "the request was aborted"
        self._nothing_valid(ends, told, layers=2)

    @pytest.mark.parametrize(("ending", "error"), [("fail", ProducerFailedError), ("cleanup", RequestAbandonedError)])
    def test_a_consumer_that_waits_for_a_layer_is_told_within_a_second(
        self, ends: Ends, ending: str, error: type[Exception]
    ) -> None:
        receiving = ends.consumer.start_act(caches.receive, kv(), kv(), "r", TOKENS, timeout=60.0)
        ends.producer.act(caches.send, kv(), kv(), "r", TOKENS, layers=1)
        eventually(lambda: ends.producer.usage().pending == 0)
        if ending == "fail":
            ends.producer.act(caches.fail_send, "r", "no")
        else:
            ends.producer.cleanup("r")
        told = receiving.result(2 * WITHIN_A_SECOND_S)
        assert isinstance(told["error"], error)
        self._nothing_valid(ends, told, layers=1)

    def test_a_request_that_failed_on_one_replica_may_be_sent_by_another(self, ends: Ends) -> None:
        two = kv(tp_size=2)
        ranks = [
            [ends.open("producer", on=f"replica {r}", replica=r, rank=rank) for rank in range(2)] for r in range(2)
        ]
        ranks[0][0].act(caches.send, caches.of_rank(two, 0), kv(), "r", TOKENS, layers=1, fail="out of memory")
        ranks[0][1].act(caches.send, caches.of_rank(two, 1), kv(), "r", TOKENS)
        told = ends.consumer.act(caches.receive, kv(), two, "r", TOKENS, replica=0)
        assert isinstance(told["error"], ProducerFailedError)
        assert told["invalid"] == told["blocks"]
        for end in ranks[0]:
            end.cleanup("r")
            eventually(lambda end=end: end.usage().pending == 0)  # type: ignore[misc]
        for rank, end in enumerate(ranks[1]):
            end.act(caches.send, caches.of_rank(two, rank), kv(), "r", TOKENS)
        complete([ends.consumer.act(caches.receive, kv(), two, "r", TOKENS, replica=1)])

    def test_an_unread_cache_expires_and_is_counted(self, ends: Ends) -> None:
        sent = ends.producer.act(caches.send, kv(), kv(), "r", TOKENS, ttl=0.3)
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        assert ends.producer.stats()["expired"] >= sent
        told = ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS)
        assert isinstance(told["error"], PayloadExpiredError)
        assert told["untouched"]
        assert ends.consumer.stats()["failures"] == {"get:PayloadExpiredError": 1}

    def test_a_consumer_that_leaves_stops_the_producer(self, ends: Ends) -> None:
        ends.producer.act(caches.send, kv(), kv(), "r", TOKENS, layers=2)
        told = ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS, layers=1)
        self._nothing_valid(ends, told, layers=1)
        with pytest.raises(RequestAbandonedError):
            ends.producer.act(caches.send_on, "r")

    @requires("bounded")
    def test_a_part_that_finds_no_room_fails_the_flow_and_gives_everything_back(self, ends: Ends) -> None:
        wide = kv(num_layers=6, num_kv_heads=32, head_size=256, block_size=64)
        tokens = 200  # 6.5 MB a layer: the second does not fit into 8 MiB
        producer = ends.open("producer", config={"capacity_bytes": "8MiB"})
        with pytest.raises(CapacityError):
            producer.act(caches.send_blank, wide, tokens, timeout=0.5)
        told = ends.consumer.act(caches.receive_blank, wide, tokens)
        assert isinstance(told, ProducerFailedError)
        eventually(lambda: producer.usage().pending == 0)
        eventually(lambda: producer.usage().bytes_held == 0)

    @pytest.mark.parametrize(
        ("told", "field"),
        [
            ({"tp_size": 2}, "tp_size"),
            ({"sp_size": 2}, "sp_size"),
            ({"pp_ranges": (Span(0, 1), Span(1, 3))}, "pp_ranges"),
        ],
    )
    def test_sides_that_misunderstand_each_other_find_out_before_bytes_move(
        self, ends: Ends, told: dict[str, Any], field: str
    ) -> None:
        ends.producer.act(caches.send, kv(), kv(**told), "r", TOKENS, layers=1)
        came = ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS)
        assert isinstance(came["error"], IncompatibleKVError)
        assert came["error"].field == field
        assert came["untouched"]
        self._nothing_valid(ends, came, layers=0)
        with pytest.raises(RequestAbandonedError):
            ends.producer.act(caches.send_on, "r")

    @pytest.mark.parametrize(
        "change", [{"dtype": "float32"}, {"num_kv_heads": 8}, {"num_layers": 4}, {"head_size": 32}]
    )
    def test_another_model_at_the_producer_is_found_out(self, ends: Ends, change: dict[str, Any]) -> None:
        other = kv(**change)
        ends.producer.act(caches.send, other, other, "r", TOKENS, layers=1)
        came = ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS)
        assert isinstance(came["error"], IncompatibleKVError)
        assert came["error"].field in change
        assert came["untouched"]

    @requires("cross_process")
    def test_a_producer_that_dies_between_layers_is_told_within_seconds(self, ends: Ends) -> None:
        mortal = ends.open("producer", on="mortal")
        receiving = ends.consumer.start_act(caches.receive, kv(), kv(), "r", TOKENS, timeout=60.0)
        mortal.act(caches.send, kv(), kv(), "r", TOKENS, layers=2)
        eventually(lambda: mortal.usage().pending == 0)
        ends.process(mortal).kill()
        told = receiving.result(WITHIN_SECONDS_S)
        assert isinstance(told["error"], PeerLostError)
        assert told["invalid"] == told["blocks"]
        eventually(lambda: ends.consumer.usage().bytes_held == 0)

    @requires("cross_process")
    @without("outlives_producer")
    def test_layers_that_died_with_their_producer_never_become_a_cache(self, ends: Ends) -> None:
        mortal = ends.open("producer", on="mortal")
        mortal.act(caches.send, kv(), kv(), "r", TOKENS)
        assert ends.consumer.exists("r") == [False]
        ends.process(mortal).kill()
        again = ends.open("producer", on="mortal")
        again.act(caches.send, kv(), kv(), "other", TOKENS)
        told = ends.consumer.act(caches.receive, kv(), kv(), "r", TOKENS, timeout=1.0)
        assert told["error"] is not None
        assert told["untouched"]

    def _nothing_valid(self, ends: Ends, told: dict[str, Any], layers: int) -> None:
        assert told["layers"] == layers
        assert told["faults"] == 0
        assert told["invalid"] == told["blocks"]
        assert told["reuse"] == 0
        for end in (ends.producer, ends.consumer):
            eventually(lambda end=end: end.usage().pending == 0)  # type: ignore[misc]
            eventually(lambda end=end: end.usage().bytes_held == 0)  # type: ignore[misc]
