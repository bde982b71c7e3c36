"""Level 3: a request through stages in processes of their own, whole and in chunks, with replicas and aborts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_connector_contract_tests.harness import flows
from omni_connector_contract_tests.harness.ends import DEFAULT_TIMEOUT_S, End, Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, requires
from omni_connector_core import (
    AmbiguousKeyError,
    PeerLostError,
    Producer,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)

__all__ = ["TestReplicas", "TestStageFlow"]

STAGES = ["encode", "prefill", "decode"]


def edge(ends: Ends, number: int, role: str, **more: Any) -> dict[str, Any]:
    """Arguments for one end of the edge that leads out of a stage."""
    config = {"timeout_s": DEFAULT_TIMEOUT_S, **ends.backend.config}
    ids = (STAGES[number], STAGES[number + 1])
    return {"config": config, "edge": ids, "role": role, "namespace": ends.namespace, **more}


def expected(seed: int, stages: list[str], nbytes: int = 40_000, parts: int = 1) -> str:
    """Compute what a single process makes of the same input."""
    made = np.array_split(Bulk(nbytes, seed=seed).build(), parts)
    for stage in stages:
        made = [flows.transform(part, stage) for part in made]
    return fingerprint(np.concatenate(made))


def start(ends: Ends) -> tuple[End, End, End]:
    """Open the first stage's outgoing end and the incoming ends of the two others."""
    first = ends.open("producer", on="producer", edge=("encode", "prefill"))
    middle = ends.open("consumer", on="middle", edge=("encode", "prefill"))
    last = ends.open("consumer", on="consumer", edge=("prefill", "decode"))
    return first, middle, last


class TestStageFlow(ContractTests):
    """Start the stages, send a request, verify the output."""

    level = 3

    @pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
    def test_requests_pass_three_stages_and_come_out_right(self, ends: Ends, chunked: bool) -> None:
        first, middle, last = start(ends)
        parts = 5 if chunked else 1
        then = edge(ends, 1, "producer")
        names = [f"request-{n}" for n in range(4)]
        ended = [last.start_act(flows.run_stage, "decode", name, None, chunked=chunked) for name in names]
        middle_runs = [middle.start_act(flows.run_stage, "prefill", names[0], then, chunked=chunked)]
        for n, name in enumerate(names):
            payload = np.array_split(Bulk(40_000, seed=n).build(), parts)
            if chunked:
                first.act(flows.write_stream, name, payload)
            else:
                first.put(name, payload[0])
        for name in names[1:]:  # the kept outgoing connector is made by the first
            middle_runs[-1].result()
            middle_runs.append(middle.start_act(flows.run_stage, "prefill", name, then, chunked=chunked))
        for n, pending in enumerate(ended):
            assert pending.result() == expected(n, ["prefill", "decode"], parts=parts)
        assert [run.result() for run in middle_runs] == [expected(n, ["prefill"], parts=parts) for n in range(4)]
        assert middle.act(flows.close_outgoing) == 0
        eventually(lambda: first.usage().bytes_held == 0)

    def test_an_abort_in_the_middle_leaves_nothing_on_any_edge(self, ends: Ends) -> None:
        first, middle, last = start(ends)
        waiting = last.start_act(flows.run_stage, "decode", "r", None, chunked=True)
        first.act(flows.write_stream, "r", [Bulk(9_000, seed=n) for n in range(5)], stop_after=4, window=4)
        middle.act(flows.read_some, "r", 2, leave=True)
        with pytest.raises(RequestAbandonedError):
            first.act(flows.write_on, "r", Bulk(10))
        last.cleanup("r")
        with pytest.raises((RequestAbandonedError, TransferTimeoutError)):
            waiting.result()
        for end in (first, middle, last):
            eventually(lambda end=end: end.usage().pending == 0)  # type: ignore[misc]
            eventually(lambda end=end: end.usage().bytes_held == 0)  # type: ignore[misc]


class TestReplicas(ContractTests):
    """The same item through two replicas of a stage: neither is skipped, overwritten or mixed."""

    level = 3

    def test_the_same_item_of_two_replicas_stays_two_payloads(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        metadata = [replica.put("image-uuid", Bulk(20_000, seed=n)) for n, replica in enumerate(replicas)]
        for n in (1, 0):
            assert ends.consumer.get_fingerprint("image-uuid", metadata[n]) == fingerprint(Bulk(20_000, seed=n))
        for n, replica in enumerate(replicas):
            replica.put("image-uuid-2", Bulk(20_000, seed=10 + n))
        for n in (0, 1):
            got = ends.consumer.get_fingerprint("image-uuid-2", producer=Producer(n))
            assert got == fingerprint(Bulk(20_000, seed=10 + n))

    def test_without_a_hint_two_replicas_are_not_guessed_between(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        for n, replica in enumerate(replicas):
            replica.put("image-uuid", Bulk(2_000, seed=n))
        with pytest.raises(AmbiguousKeyError) as caught:
            ends.consumer.get("image-uuid")
        assert "replica 0" in str(caught.value)
        assert "replica 1" in str(caught.value)
        assert ends.consumer.get_fingerprint("image-uuid", producer=Producer(1)) == fingerprint(Bulk(2_000, seed=1))
        assert ends.consumer.get_fingerprint("image-uuid") == fingerprint(Bulk(2_000, seed=0))

    def test_streams_of_two_replicas_do_not_mix(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        chunks = [[Bulk(1_000, seed=100 * n + c) for c in range(6)] for n in range(2)]
        for replica, mine in zip(replicas, chunks, strict=True):
            replica.act(flows.write_stream, "r", mine)
        for n in (1, 0):
            read = ends.consumer.act(flows.read_stream, "r", producer=Producer(n))
            assert read == [fingerprint(chunk) for chunk in chunks[n]]

    def test_a_stream_is_never_continued_by_another_replica(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        replicas[0].act(flows.write_stream, "r", [Bulk(1_000, seed=n) for n in range(3)], stop_after=2)
        assert len(ends.consumer.act(flows.read_some, "r", 2)) == 2
        replicas[0].cleanup("r")
        replicas[0].close()
        chunks = [Bulk(1_000, seed=10 + n) for n in range(4)]
        replicas[1].act(flows.write_stream, "r", chunks)
        read, error, _ = ends.consumer.act(flows.read_to_the_end, "r")
        assert read == []
        assert isinstance(error, PeerLostError | RequestAbandonedError)

    def test_a_stream_retried_on_another_replica_is_read_from_its_start(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        replicas[0].act(flows.write_stream, "r", [Bulk(1_000, seed=n) for n in range(3)], stop_after=2)
        assert len(ends.consumer.act(flows.read_some, "r", 1, producer=Producer(0))) == 1
        replicas[0].act(flows.fail_stream, "r", "out of memory")
        assert isinstance(ends.consumer.act(flows.read_to_the_end, "r")[1], ProducerFailedError)
        chunks = [Bulk(1_000, seed=10 + n) for n in range(4)]
        replicas[1].act(flows.write_stream, "r", chunks)
        read = ends.consumer.act(flows.read_stream, "r", producer=Producer(1))
        assert read == [fingerprint(chunk) for chunk in chunks]

    def test_a_request_retried_on_another_replica_is_the_second_ones(self, ends: Ends) -> None:
        replicas = [ends.open("producer", on=f"replica {n}", replica=n) for n in range(2)]
        replicas[0].put("r", Bulk(2_000, seed=0))
        assert replicas[0].cleanup("r") == 1
        replicas[1].put("r", Bulk(2_000, seed=1))
        assert ends.consumer.get_fingerprint("r", producer=Producer(1)) == fingerprint(Bulk(2_000, seed=1))

    @requires("cross_process")
    def test_what_a_restarted_replica_had_put_before_is_not_delivered_as_new(self, ends: Ends) -> None:
        mortal = ends.open("producer", on="mortal")
        stale = mortal.put("r", Bulk(2_000, seed=0))
        ends.process(mortal).kill()
        again = ends.open("producer", on="mortal")
        again.put("r", Bulk(2_000, seed=1))
        fresh = fingerprint(Bulk(2_000, seed=1))
        if ends.backend.capabilities.outlives_producer:
            assert ends.consumer.get_fingerprint("r", stale) == fingerprint(Bulk(2_000, seed=0))
        else:
            with pytest.raises(PeerLostError):
                ends.consumer.get("r", stale)
            assert ends.consumer.get_fingerprint("r") == fresh
