"""Level 1: what names a payload: key, edge, producer, namespace (point 11)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests
from omni_connector_core import (
    NOT_READY,
    AmbiguousKeyError,
    IncompatibleMetadataError,
    InvalidKeyError,
    Key,
    Producer,
    TransferTimeoutError,
)

__all__ = ["TestEdgesAndProducers", "TestKeys"]

AWKWARD = {
    "one character": "x",
    "spaces": " a  b ",
    "path": "../../etc/passwd",
    "dots": "..",
    "slashes": "/a//b/",
    "separators": "a:b#c=d@e_f-g",
    "percent": "%00%2F=2F",
    "nul": "a\0b",
    "newline": "a\nb\r\t",
    "quotes": "'\"`$(x)",
    "wide": "\N{SNOWMAN}\N{GRINNING FACE}e\u0301",
    "composed": "\u00e9",
    "longest": "k" * 1024,
    "longest of wide characters": "\N{SNOWMAN}" * 341,
    "like metadata": '{"key": 1}',
    "uuid of vllm": "chatcmpl-3f0c9a1e-77f7-4b86-9f3b-000000000000_0-8d2b1c",
}

ALIKE = [
    "a", "A", "a ", " a", "a/", "a:", "a:0", "a=3A0", "a#", "a\0", "a%", "\u00e9", "e\u0301", "a" * 1023 + "b", "a" * 1023 + "c",
    "a" * 1024, "b" + "a" * 1023, "1", "01", "1.0",
]  # fmt: skip


class TestKeys(ContractTests):
    """Any non-empty text up to 1,024 bytes is a key, and no two keys are the same."""

    @pytest.mark.parametrize("name", AWKWARD)
    def test_any_text_is_a_key(self, ends: Ends, name: str) -> None:
        key = AWKWARD[name]
        metadata = ends.producer.put(key, name)
        assert ends.consumer.get(key, metadata) == name
        ends.producer.put(key, name)
        assert ends.consumer.get(key) == name

    def test_keys_that_look_alike_are_different(self, ends: Ends) -> None:
        for n, key in enumerate(ALIKE):
            ends.producer.put(key, n)
        assert [ends.consumer.get(key) for key in ALIKE] == list(range(len(ALIKE)))

    def test_fields_of_a_key_do_not_run_into_each_other(self, ends: Ends) -> None:
        keys = [Key("a", 1, "b"), Key("a:1:b"), Key("a:1", 0, "b"), Key("a", 11), Key("a1", 1), Key("a", 0, "1")]
        for n, key in enumerate(keys):
            ends.producer.put(key, n)
        assert [ends.consumer.get(key) for key in keys] == list(range(len(keys)))

    def test_a_plain_text_is_the_request_id(self, ends: Ends) -> None:
        ends.producer.put("r", 1)
        assert ends.consumer.get(Key("r", 0, "")) == 1

    def test_the_largest_chunk_number_and_shard_are_keys(self, ends: Ends) -> None:
        key = Key("r" * 1024, 2**63 - 1, "s" * 256)
        ends.producer.put(key, 1)
        assert ends.consumer.get(key) == 1

    @pytest.mark.parametrize(
        "key",
        ["", "k" * 1025, "\N{SNOWMAN}" * 342, "\ud800", Key(""), Key("r", -1), Key("r", 0, "s" * 257), 7, None, b"k"],
        ids=lambda key: f"{type(key).__name__}-{ascii(key)[:24]}",
    )
    def test_what_is_no_key_is_refused_by_every_method(self, ends: Ends, key: object) -> None:
        with pytest.raises(InvalidKeyError):
            ends.producer.put(key, 1)
        for method in ("get", "poll", "exists"):
            with pytest.raises(InvalidKeyError):
                ends.consumer.call(method, [key] if method == "exists" else key)


class TestEdgesAndProducers(ContractTests):
    """The same key on two edges, of two producers, or in two namespaces: never mixed, never guessed."""

    def test_two_edges_do_not_collide(self, ends: Ends) -> None:
        edges = [("0", "1"), ("0", "2"), ("1", "2"), ("01", "2"), ("0", "12")]
        producers = [ends.open("producer", edge=edge) for edge in edges]
        consumers = [ends.open("consumer", edge=edge) for edge in edges]
        for n, producer in enumerate(producers):
            producer.put("k", n)
        assert [consumer.get("k") for consumer in consumers] == list(range(len(edges)))

    def test_metadata_of_another_edge_is_refused(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", 1)
        elsewhere = ends.open("consumer", edge=("0", "2"))
        with pytest.raises(IncompatibleMetadataError):
            elsewhere.get("k", metadata, timeout=0.2)
        assert ends.consumer.get("k", metadata) == 1

    def test_a_payload_stays_on_its_edge(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        elsewhere = ends.open("consumer", edge=("0", "2"))
        with pytest.raises(TransferTimeoutError):
            elsewhere.get("k", timeout=0.2)
        backwards = ends.open("consumer", edge=("1", "0"))
        assert backwards.poll("k") is NOT_READY
        assert ends.consumer.get("k") == 1

    def test_two_namespaces_do_not_meet(self, ends: Ends) -> None:
        elsewhere = ends.namespace + "-other"
        other_producer = ends.open("producer", namespace=elsewhere)
        other_consumer = ends.open("consumer", namespace=elsewhere)
        ends.producer.put("k", "here")
        other_producer.put("k", "there")
        assert other_consumer.get("k") == "there"
        assert other_consumer.poll("k") is NOT_READY
        assert other_consumer.cleanup("k") == 0
        assert ends.consumer.get("k") == "here"

    def test_metadata_says_which_replica_is_meant(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"producer {n}" if n else None, replica=n) for n in range(2)]
        metadata = [replica.put("k", Bulk(9000, seed=n)) for n, replica in enumerate(replicas)]
        for n in (1, 0):
            assert ends.consumer.get_fingerprint("k", metadata[n]) == fingerprint(Bulk(9000, seed=n))

    def test_the_caller_says_which_rank_is_meant(self, ends: Ends) -> None:
        ranks = [ends.open("producer", rank=n) for n in range(3)]
        for n, rank in enumerate(ranks):
            rank.put("k", n)
        for n in (2, 0, 1):
            assert ends.consumer.get("k", producer=Producer(0, n)) == n

    def test_a_producer_that_was_named_is_waited_for(self, ends: Ends) -> None:
        ends.open("producer", rank=0).put("k", 0)
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", producer=Producer(0, 1), timeout=0.2)
        waiting = ends.consumer.start("get", "k", producer=Producer(0, 1))
        ends.open("producer", rank=1).put("k", 1)
        assert waiting.result() == 1
        assert ends.consumer.get("k", producer=Producer(0, 0)) == 0

    def test_a_key_that_two_producers_hold_is_ambiguous_and_both_are_named(self, ends: Ends) -> None:
        first, second = ends.open("producer", replica=3, rank=1), ends.open("producer", replica=4, rank=2)
        first.put("k", "first")
        second.put("k", "second")
        eventually(lambda: ends.consumer.exists("k")[0])
        with pytest.raises(AmbiguousKeyError, match=r"replica 3 rank 1.*replica 4 rank 2") as caught:
            ends.consumer.get("k")
        assert isinstance(caught.value, LookupError)
        assert ends.consumer.get("k", producer=Producer(3, 1)) == "first"
        assert ends.consumer.get("k", producer=Producer(4, 2)) == "second"

    def test_metadata_tells_two_processes_of_one_label_apart(self, ends: Ends) -> None:
        first, second = ends.producer, ends.open("producer", on="second producer")
        metadata = [first.put("k", "first"), second.put("k", "second")]
        assert ends.consumer.get("k", metadata[1]) == "second"
        assert ends.consumer.get("k", metadata[0]) == "first"

    def test_one_of_two_producers_is_found_by_key_alone(self, ends: Ends) -> None:
        first, second = ends.open("producer", replica=0), ends.open("producer", replica=1, on="second producer")
        first.put("a", 1)
        second.put("b", 2)
        assert ends.consumer.get("b") == 2
        assert ends.consumer.get("a") == 1

    def test_cleanup_reaches_every_producer_of_the_edge(self, ends: Ends) -> None:
        first, second = ends.open("producer", replica=0), ends.open("producer", replica=1, on="second producer")
        first.put(Key("r", 0), 1)
        second.put(Key("r", 1), 2)
        assert ends.consumer.cleanup("r") == 2
        eventually(lambda: first.usage().pending == 0 and second.usage().pending == 0)
