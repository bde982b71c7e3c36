"""Mode `shared`: processes of one host over the memory of its `mooncake_client`."""

import time

import numpy as np
import pytest

from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_core import create_connector
from omni_connector_core.errors import BackendUnavailableError, CapacityError, PayloadTooLargeError, PeerLostError
from omni_connector_mooncake_store.service import start

OPTIONS = {"capacity_bytes": "64MiB", "arena_bytes": "128MiB"}


@pytest.fixture(scope="module")
def shared_service():
    with start(mode="shared", shared_bytes="256MiB") as service:
        yield service


@pytest.fixture
def shared_ends(shared_service, own_ends):
    return own_ends(shared_service, **OPTIONS)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 20, 40 << 20])
def test_payloads_of_any_size_arrive(shared_ends, nbytes):
    for number, key_only in enumerate((False, True)):
        metadata = shared_ends.producer.put(f"k{number}", Bulk(nbytes, seed=number))
        found = shared_ends.consumer.get_fingerprint(f"k{number}", None if key_only else metadata)
        assert found == fingerprint(Bulk(nbytes, seed=number))


def test_several_readers_endings_and_cleanup(shared_ends):
    producer, consumer = shared_ends.producer, shared_ends.consumer
    metadata = producer.put("several", {"x": 1}, readers=2)
    assert consumer.get("several", metadata) == consumer.get("several") == {"x": 1}
    producer.put("over", 1)
    producer.put("over", 2, overwrite=True)
    assert consumer.get("over") == 2
    for chunk in range(3):
        producer.put(f"request{chunk}", chunk)
    assert [consumer.cleanup(f"request{chunk}") for chunk in range(3)] == [1, 1, 1]


def test_a_full_store_refuses_and_loses_nothing(shared_ends):
    shared_ends.producer.act(fill_the_room)
    assert shared_ends.consumer.act(read_the_room) == list(range(6))


def fill_the_room(acting):
    for n in range(6):
        acting.connector.put(f"k{n}", np.full(10 << 20, n, np.uint8))
    with pytest.raises(CapacityError):
        acting.connector.put("more", np.zeros(10 << 20, np.uint8), timeout=0.2)
    with pytest.raises(PayloadTooLargeError):
        acting.connector.put("much more", np.zeros(65 << 20, np.uint8), timeout=5.0)


def read_the_room(acting):
    return [int(acting.connector.get(f"k{n}").max()) for n in range(6)]


def test_a_killed_producer_is_lost_and_its_successor_clears_up(shared_ends):
    """The store still has the bytes; nobody else would ever free them."""
    metadata = shared_ends.producer.put("k", Bulk(30 << 20))
    shared_ends.process(shared_ends.producer).kill()
    with pytest.raises(PeerLostError):
        shared_ends.consumer.get("k", metadata, timeout=20.0)
    with pytest.raises(PeerLostError):
        shared_ends.consumer.get("k", timeout=20.0)
    for n in range(8):  # 240 MiB: they would not fit beside what eight dead producers left
        successor = shared_ends.open("producer", on=f"successor {n}")
        successor.put("k", Bulk(30 << 20, seed=n))
        shared_ends.process(successor).kill()
    last = shared_ends.open("producer", on="last")
    last.put("k", Bulk(30 << 20, seed=9))
    assert shared_ends.consumer.get_fingerprint("k") == fingerprint(Bulk(30 << 20, seed=9))


def test_views_outlive_the_connector_and_the_mooncake_client():
    with start(mode="shared", shared_bytes="64MiB") as service:
        conn = create_connector(
            "mooncake_store", {**service.config(), "capacity_bytes": "16MiB", "arena_bytes": "32MiB"}
        )
        conn.put("k", np.arange(1_000_000))
        view = conn.get("k")
        conn.close()
        service.daemons["client"].kill()
        assert (view == np.arange(1_000_000)).all()


def test_a_restarted_mooncake_client_serves_again(own_ends):
    with start(mode="shared", shared_bytes="64MiB") as service:
        ends = own_ends(service, capacity_bytes="16MiB", arena_bytes="32MiB")
        metadata = ends.producer.put("before", 1)
        ends.producer.put("read", 1)
        ends.consumer.get("read")
        service.daemons["client"].kill()
        began = time.monotonic()
        with pytest.raises(BackendUnavailableError, match="mooncake_client"):
            ends.producer.put("during", 1, timeout=1.0)
        assert time.monotonic() - began < 3.0
        service.restart("client")
        ends.producer.put("after", 2, timeout=30.0)
        assert ends.consumer.get("after", timeout=30.0) == 2
        with pytest.raises(PeerLostError):
            ends.consumer.get("before", metadata, timeout=30.0)
