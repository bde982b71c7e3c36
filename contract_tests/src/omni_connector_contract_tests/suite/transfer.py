"""Level 1: a payload that is put can be got, unchanged, by key or by metadata (points 1, 2 and 4 of the contract)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_connector_contract_tests.harness.acts import get_after_reuse, put_and_scribble
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint, has_torch
from omni_connector_contract_tests.suite.base import ContractTests
from omni_connector_core import IncompatibleMetadataError, Key

__all__ = ["TestMetadata", "TestTransfer"]

VALUES: dict[str, Any] = {
    "none": None,
    "false": False,
    "zero": 0,
    "empty bytes": b"",
    "empty text": "",
    "empty list": [],
    "empty dict": {},
    "empty array": np.empty((0, 3), np.float32),
    "bytes": b"test_data",
    "text": "a \N{SNOWMAN} in the text",
    "big int": -(2**200),
    "nan": float("nan"),
    "tuple, not list": (1, [2, (3,)], {"a": (4.5, None)}),
    "array": np.arange(60, dtype=np.int16).reshape(3, 4, 5),
    "strided array": np.arange(100, dtype=np.float64)[::3],
    "scalar array": np.array(7, np.uint8),
    "dict": {"hidden": np.ones((4, 8), np.float16), "tokens": [1, 2, 3], "text": "x", "more": {"n": None}},
}

SIZES = (0, 1, 63, 64, 65, 4095, 4096, 4097, 65_536, 1_000_003, 3 * 2**20 + 8, 24 * 2**20)


class TestTransfer(ContractTests):
    """What was put comes out, exactly."""

    @pytest.mark.parametrize("name", VALUES)
    def test_a_payload_keeps_value_and_type(self, ends: Ends, name: str) -> None:
        ends.producer.put("k", VALUES[name])
        assert ends.consumer.get_fingerprint("k") == fingerprint(VALUES[name])

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_payload_of_any_size_arrives_whole(self, ends: Ends, nbytes: int) -> None:
        payload = Bulk(nbytes, seed=nbytes)
        ends.producer.put("k", payload)
        assert ends.consumer.get_fingerprint("k") == fingerprint(payload)

    @pytest.mark.parametrize("kind", ["bytes", "dict", *(["tensor"] if has_torch() else [])])
    def test_a_large_payload_of_any_kind_arrives_whole(self, ends: Ends, kind: str) -> None:
        payload = Bulk(2**21, seed=7, kind=kind)
        metadata = ends.producer.put("k", payload)
        assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(payload)

    def test_many_pieces_in_one_payload_arrive_in_order(self, ends: Ends) -> None:
        payload = [np.full(n % 97, n, np.int32) for n in range(500)]
        ends.producer.put("k", payload)
        assert ends.consumer.get_fingerprint("k") == fingerprint(payload)

    def test_put_returns_when_the_payload_can_be_fetched(self, ends: Ends) -> None:
        for n in range(20):
            metadata = ends.producer.put(f"k{n}", n)
            assert ends.producer.exists(f"k{n}") == [True]
            assert ends.consumer.get(f"k{n}", metadata if n % 2 else None, timeout=1.0) == n

    def test_the_caller_may_reuse_its_buffers_after_put(self, ends: Ends) -> None:
        expected = ends.producer.act(put_and_scribble, "k", 300_000)
        assert ends.consumer.get_fingerprint("k") == expected

    def test_many_payloads_do_not_mix(self, ends: Ends) -> None:
        payloads = {f"request-{n}": Bulk(1000 + 777 * n, seed=n) for n in range(40)}
        for key, payload in payloads.items():
            ends.producer.put(key, payload)
        for key in sorted(payloads, reverse=True):
            assert ends.consumer.get_fingerprint(key) == fingerprint(payloads[key])

    def test_memory_is_reused_only_after_the_read(self, ends: Ends) -> None:
        for n in range(30):
            ends.producer.put("first", Bulk(200_000, seed=n))
            ends.producer.put("second", Bulk(200_000, seed=1000 + n))
            assert ends.consumer.get_fingerprint("second") == fingerprint(Bulk(200_000, seed=1000 + n))
            assert ends.consumer.get_fingerprint("first") == fingerprint(Bulk(200_000, seed=n))

    def test_what_was_got_stays_while_the_next_ones_come(self, ends: Ends) -> None:
        for n in range(6):
            ends.producer.put(f"k{n}", Bulk(300_000, seed=n))
        assert ends.consumer.act(get_after_reuse, [f"k{n}" for n in range(6)]) == [
            fingerprint(Bulk(300_000, seed=n)) for n in range(6)
        ]

    def test_chunks_and_shards_of_a_request_are_payloads_of_their_own(self, ends: Ends) -> None:
        keys = [Key("r"), Key("r", 1), Key("r", 2, "layer-0"), Key("r", 2, "layer-1"), Key("r", 0, "layer-0")]
        for n, key in enumerate(keys):
            ends.producer.put(key, n)
        assert [ends.consumer.get(key) for key in reversed(keys)] == [4, 3, 2, 1, 0]

    def test_a_key_may_be_used_again_after_its_read(self, ends: Ends) -> None:
        for n in range(5):
            ends.producer.put("k", n)
            assert ends.consumer.get("k") == n


class TestMetadata(ContractTests):
    """Metadata is a shortcut and a statement of whose payload is meant; without it the key is enough."""

    def test_get_by_metadata(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        assert ends.consumer.get("k", metadata) == "payload"

    def test_get_by_key_alone(self, ends: Ends) -> None:
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k") == "payload"

    def test_metadata_survives_json(self, ends: Ends) -> None:
        metadata = ends.producer.put(Key("k", 3, "s"), "payload")
        through = json.loads(json.dumps(metadata, allow_nan=False))
        assert through == metadata
        assert ends.consumer.get(Key("k", 3, "s"), through) == "payload"

    def test_metadata_survives_msgpack(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        through = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata))
        assert through == metadata
        assert ends.consumer.get("k", through) == "payload"

    @pytest.mark.parametrize(
        "foreign",
        [{}, None, "text", 7, [1, 2], {"key": "k", "size": 12}, {"source_host": "192.0.2.1", "source_port": 50051}],
        ids=str,
    )
    def test_metadata_that_is_not_ours_means_look_up_by_key(self, ends: Ends, foreign: object) -> None:
        ends.producer.put("k", "payload")
        assert ends.consumer.get("k", foreign) == "payload"

    def test_metadata_under_its_key_is_not_ours(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        assert ends.consumer.get("k", {"k": metadata}) == "payload"

    def test_metadata_of_another_version_is_refused(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        with pytest.raises(IncompatibleMetadataError, match=r"version 99.*version 1"):
            ends.consumer.get("k", {**metadata, "omni_connector": 99})
        assert ends.consumer.get("k", metadata) == "payload"

    def test_metadata_of_another_transport_is_refused_and_both_are_named(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        with pytest.raises(IncompatibleMetadataError, match=rf"other_one.*{ends.backend.name}"):
            ends.consumer.get("k", {**metadata, "transport": "other_one"})
        assert ends.consumer.get("k", metadata) == "payload"

    def test_metadata_of_another_key_is_refused(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        with pytest.raises(IncompatibleMetadataError):
            ends.consumer.get("other", metadata)
        assert ends.consumer.get("k") == "payload"

    def test_damaged_metadata_is_refused(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        for field in ("edge", "producer", "key", "nbytes", "at"):
            with pytest.raises(IncompatibleMetadataError):
                ends.consumer.get("k", {**metadata, field: None})
        assert ends.consumer.get("k", metadata) == "payload"

    def test_metadata_of_a_payload_that_was_read_never_gives_it_again(self, ends: Ends) -> None:
        metadata = ends.producer.put("k", "payload")
        assert ends.consumer.get("k", metadata) == "payload"
        with pytest.raises(TimeoutError):
            ends.consumer.get("k", metadata, timeout=0.2)

    def test_metadata_of_an_earlier_payload_gives_the_one_that_is_there(self, ends: Ends) -> None:
        stale = ends.producer.put("k", Bulk(5000, seed=1))
        ends.consumer.get_fingerprint("k")
        ends.producer.put("k", Bulk(7000, seed=2))
        assert ends.consumer.get_fingerprint("k", stale) == fingerprint(Bulk(7000, seed=2))
