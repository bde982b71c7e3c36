"""Level 1: how a connector may be used, and misused (points 2, 13 and 17)."""

from __future__ import annotations

import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import WITHIN_A_SECOND_S, WITHIN_SECONDS_S
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, observes, requires, without
from omni_connector_core import (
    ClosedError,
    EncodeError,
    OptionError,
    PeerLostError,
    RoleError,
    plugin_manager,
)

__all__ = ["TestLifecycle", "TestOptions", "TestThreads"]


class TestThreads(ContractTests):
    """Any thread, many at a time, an event loop: yes. A forked child: a clear error."""

    def test_many_threads_at_both_ends(self, ends: Ends) -> None:
        getting = ends.consumer.start_act(acts.get_many, "k", 120, 6)
        ends.producer.act(acts.put_many, "k", 120, 6)
        assert getting.result() == [fingerprint(Bulk(500 + 37 * n, seed=n)) for n in range(120)]

    def test_one_connector_at_both_ends(self, ends: Ends) -> None:
        both = ends.open("both")
        getting = both.start_act(acts.get_many, "k", 40, 4)
        both.act(acts.put_many, "k", 40, 4)
        assert getting.result() == [fingerprint(Bulk(500 + 37 * n, seed=n)) for n in range(40)]

    def test_from_a_running_event_loop(self, ends: Ends) -> None:
        ends.producer.act(acts.in_event_loop, "put", "k", "payload")
        assert ends.consumer.act(acts.in_event_loop, "get", "k") == "payload"

    def test_a_forked_child_gets_a_clear_error_and_harms_nobody(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000))
        assert ends.producer.act(acts.in_forked_child) == ["ForkedError"] * 3
        assert ends.consumer.act(acts.in_forked_child) == ["ForkedError"] * 3
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000))
        ends.producer.put("k", "again")
        assert ends.consumer.get("k") == "again"

    def test_two_waits_for_two_keys_do_not_disturb_each_other(self, ends: Ends) -> None:
        waiting = {key: ends.consumer.start("get", key) for key in ("a", "b", "c")}
        for key in ("c", "a", "b"):
            ends.producer.put(key, key)
            assert waiting[key].result() == key


class TestLifecycle(ContractTests):
    """Opening is cheap, closing is final and can be done twice, each end does its own part."""

    def test_construction_binds_no_port(self, ends: Ends) -> None:
        before = ends.producer.peer.ask(acts.RUN_LISTENING)
        for role in ("producer", "consumer", "both"):
            ends.open(role, on="producer", edge=("a", "b"))
        assert ends.producer.peer.ask(acts.RUN_LISTENING) == before

    def _wide_ports(self, ends: Ends) -> list[str]:
        ends.producer.put("k", 1)
        ends.consumer.get("k")
        ports = [port for end in (ends.producer, ends.consumer) for port in end.peer.ask(acts.RUN_LISTENING)]
        return [f"{host}:{port}" for host, port in ports if not host.startswith("127.") and host != "::1"]

    @requires("loopback_only")
    def test_ports_are_bound_to_loopback(self, ends: Ends) -> None:
        assert self._wide_ports(ends) == []

    @without("loopback_only")
    def test_a_backend_that_disclaims_loopback_really_listens_wider(self, ends: Ends) -> None:
        assert self._wide_ports(ends)

    def test_a_name_is_enough_to_open_and_close(self, ends: Ends) -> None:
        for role in ("producer", "consumer", "both"):
            end = ends.open(role, on="producer")
            end.call("close")

    def test_close_is_idempotent(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        ends.consumer.get("k")
        for end in (ends.producer, ends.consumer):
            for _ in range(3):
                end.call("close")

    @pytest.mark.parametrize(
        ("role", "method", "arguments"),
        [
            ("producer", "put", ("k", 1)),
            ("producer", "fail", ("k", "reason")),
            ("producer", "cleanup", ("k",)),
            ("consumer", "get", ("k",)),
            ("consumer", "poll", ("k",)),
            ("consumer", "exists", (["k"],)),
            ("consumer", "get_into", ("k", [])),
        ],
    )
    def test_a_closed_connector_says_so(self, ends: Ends, role: str, method: str, arguments: tuple[object]) -> None:
        end = ends.open(role)
        end.call("close")
        with pytest.raises(ClosedError):
            end.call(method, *arguments)

    def test_close_ends_a_wait(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        waiting = ends.consumer.start("get", "k", timeout=20.0)
        ends.consumer.get("other")
        ends.consumer.call("close")
        with pytest.raises(ClosedError):
            waiting.result(WITHIN_SECONDS_S)

    def test_a_clean_close_of_the_producer_reaches_who_waits_for_it(self, ends: Ends) -> None:
        ends.producer.put("other", 1)
        metadata = ends.producer.put("k", Bulk(50_000))
        ends.consumer.get("other")
        ends.producer.call("close")
        if ends.backend.capabilities.outlives_producer:
            assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(50_000))
        else:
            with pytest.raises(PeerLostError):
                ends.consumer.get("k", metadata, timeout=WITHIN_SECONDS_S)

    def test_a_new_connector_after_a_close_works(self, ends: Ends) -> None:
        for n in range(3):
            producer, consumer = ends.open("producer"), ends.open("consumer")
            producer.put("k", n)
            assert consumer.get("k") == n
            producer.close()
            consumer.close()

    def test_put_at_a_consumer_and_get_at_a_producer_are_errors(self, ends: Ends) -> None:
        with pytest.raises(RoleError):
            ends.consumer.put("k", 1)
        with pytest.raises(RoleError):
            ends.consumer.fail("k", "reason")
        for method in ("get", "poll"):
            with pytest.raises(RoleError):
                ends.producer.call(method, "k")


class TestOptions(ContractTests):
    """Options are checked, and what cannot be encoded is refused whole."""

    def test_the_plugin_and_the_transport_claim_the_same(self, ends: Ends) -> None:
        spec = ends.backend.describe()
        assert ends.producer.act(acts.capabilities_of_transport) == spec.capabilities
        assert spec.summary

    def test_an_unknown_option_is_an_error_that_lists_the_known_ones(self, ends: Ends) -> None:
        with pytest.raises(OptionError, match=r"time_out_s.*did you mean 'timeout_s'.*ttl_s"):
            ends.open("producer", config={"time_out_s": 1})

    def test_a_bad_value_is_an_error_that_names_the_option(self, ends: Ends) -> None:
        for config in ({"timeout_s": "soon"}, {"ttl_s": -1}, {"checksum": "md5"}):
            with pytest.raises(OptionError, match=next(iter(config))):
                ends.open("producer", config=config)

    def test_every_option_is_documented(self, ends: Ends) -> None:
        import dataclasses

        for field in dataclasses.fields(plugin_manager.spec(ends.backend.name).load_options()):
            assert field.metadata["doc"].endswith("."), f"option {field.name} is not documented"

    @observes("checksum")
    @pytest.mark.parametrize("checksum", ["none", "crc32"])
    def test_a_checksum_is_carried_and_checked(self, ends: Ends, checksum: str) -> None:
        producer = ends.open("producer", config={"checksum": checksum})
        producer.put("k", Bulk(200_000))
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000))
        producer.put("damaged", Bulk(200_000))
        assert ends.consumer.act(acts.damage_is_found, "damaged") is (checksum != "none")

    def test_a_payload_that_cannot_be_encoded_is_refused_and_nothing_is_put(self, ends: Ends) -> None:
        with pytest.raises(EncodeError, match=r"\['inside'\]\[2\]"):
            ends.producer.act(acts.put_unencodable, "k")
        assert ends.producer.exists("k") == [False]
        ends.producer.put("k", 1)
        assert ends.consumer.get("k") == 1

    def test_a_short_deadline_of_a_put_is_kept(self, ends: Ends) -> None:
        seconds, _, _ = ends.producer.act(acts.timed, "put", "k", 1, timeout=0.5)
        assert seconds < 0.5 + WITHIN_A_SECOND_S
