"""Connectors while workers are killed and started again, and beside threads and forks."""

from __future__ import annotations

import contextlib
import statistics
import time

import numpy as np
import pytest
import yuanrong_acts as acts

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_core.errors import (
    BackendUnavailableError,
    CapacityError,
    OmniConnectorError,
    PayloadTooLargeError,
    PeerLostError,
    TransferTimeoutError,
)


@pytest.fixture(scope="module")
def peers():
    peers = Peers(processes=True, patience_s=60)
    yield peers
    peers.shutdown()


@pytest.fixture
def ends(cluster, peers):
    """A producer at worker 0 and a consumer at worker 1, each in a process of its own."""

    class AtTheirWorkers(Ends):
        def open(self, role, *, on=None, config=None, **arguments):
            own = cluster.config(1 if (on or role) == "consumer" else 0, request_timeout_s=1.0)
            return super().open(role, on=on, config={**own, **(config or {})}, **arguments)

    ends = AtTheirWorkers(Backend("yuanrong", {}), peers)
    yield ends
    cluster.repair()
    ends.close()


def puts(connector):
    """Whether a put succeeds."""
    try:
        connector.put("again", b"it works", timeout=1, overwrite=True)
    except OmniConnectorError:
        return False
    return True


def works(connector):
    """Whether a put and a get succeed."""
    try:
        return puts(connector) and connector.get("again", timeout=1) == b"it works"
    except OmniConnectorError:
        return False


# ---- two workers


def test_payloads_cross_workers_in_both_ways_of_asking(ends):
    for number, nbytes in enumerate([1, 1000, 600_000, 5_000_000]):
        payload = np.arange(nbytes).astype(np.uint8)
        metadata = ends.producer.put(f"with{number}", payload)
        ends.producer.put(f"without{number}", payload)
        assert np.array_equal(ends.consumer.get(f"with{number}", metadata), payload)
        assert np.array_equal(ends.consumer.get(f"without{number}"), payload)


def test_an_overwritten_payload_is_never_read_at_the_other_worker(ends):
    for number in range(10):
        ends.producer.put("key", b"old")
        assert ends.consumer.exists("key") == [True]
        ends.producer.put("key", b"new %d" % number, overwrite=True)
        assert ends.consumer.get("key") == b"new %d" % number


def test_readers_at_two_workers_each_read_once(ends):
    other = ends.open("consumer", on="other")
    ends.producer.put("key", b"for two", readers=2)
    assert ends.consumer.get("key") == b"for two"
    assert other.get("key") == b"for two"
    with pytest.raises(TransferTimeoutError):
        ends.consumer.get("key", timeout=0.3)
    eventually(lambda: ends.producer.usage().pending == 0)


# ---- workers die


def test_the_producers_worker_dies_and_takes_its_payloads_along(cluster, ends):
    metadata = ends.producer.put("key", np.zeros(2_000_000, np.uint8))
    assert ends.consumer.exists("key") == [True]
    cluster.service.daemons["worker0"].kill()
    began_s = time.monotonic()
    with pytest.raises((PeerLostError, BackendUnavailableError)):
        ends.consumer.get("key", metadata, timeout=10)
    with pytest.raises(BackendUnavailableError):
        ends.producer.put("key2", b"x", timeout=2)
    assert not ends.producer.health().ok
    assert time.monotonic() - began_s < 20
    cluster.service.restart("worker0")
    eventually(lambda: ends.producer.act(_puts), within_s=20)
    with pytest.raises(OmniConnectorError):
        ends.consumer.get("key", metadata, timeout=3)


def test_the_consumers_worker_dies_and_comes_back(cluster, ends):
    ends.producer.put("before", b"before")
    assert ends.consumer.get("before") == b"before"
    cluster.service.daemons["worker1"].kill()
    with pytest.raises(BackendUnavailableError):
        ends.consumer.get("key", timeout=3)
    metadata = ends.producer.put("key", b"put meanwhile")
    cluster.service.restart("worker1")

    def arrives():
        try:
            return ends.consumer.get("key", metadata, timeout=1)
        except OmniConnectorError:
            return None

    assert eventually(arrives, within_s=20) == b"put meanwhile"


def test_views_of_a_dead_workers_memory_stay_valid(cluster, name):
    connector = cluster.connector(namespace=name)
    connector.put("key", np.full(3_000_000, 7, np.uint8))
    view = connector.get("key")
    cluster.service.daemons["worker0"].kill()
    assert (view == 7).all()
    cluster.service.restart("worker0")
    assert (view == 7).all()
    eventually(lambda: works(connector), within_s=20)
    assert (view == 7).all()


def test_a_dead_workers_keys_still_exist_for_the_vendor_and_are_not_waited_for(cluster, name):
    """Trap: `exist` proves nothing about an object whose worker died."""
    from omni_connector_core.deadline import Deadline
    from omni_connector_core.store import NewObject
    from omni_connector_yuanrong import sdk
    from omni_connector_yuanrong.options import YuanrongOptions

    there = cluster.store(1, request_timeout_s=0.5)
    there.create([NewObject(name, b"x" * 600_000)], ttl_s=30, deadline=Deadline(5))
    here = sdk.open_session(YuanrongOptions(**cluster.config(0, request_timeout_s=0.5)), Deadline(8)).client
    assert here.exist([name]) == [True]
    cluster.service.daemons["worker1"].kill()
    assert here.exist([name]) == [True]
    store = cluster.store(0, request_timeout_s=0.5)
    began_s = time.monotonic()
    with contextlib.suppress(PeerLostError, BackendUnavailableError):
        assert store.read(name, 600_000, shared=False, deadline=Deadline(2)) is None
    assert time.monotonic() - began_s < 5


def test_the_metastore_dies_and_comes_back(cluster, ends):
    """Worker 0 runs it: meanwhile worker 1 cannot put, and says so within its timeout."""
    consumer_side = ends.open("both", on="consumer", edge=("1", "2"))
    eventually(lambda: consumer_side.act(_works), within_s=30)
    cluster.service.daemons["worker0"].kill()
    with pytest.raises(BackendUnavailableError):
        consumer_side.put("key", b"y", timeout=2)
    cluster.service.restart("worker0")
    eventually(lambda: consumer_side.act(_works), within_s=30)


def test_a_worker_that_hangs_is_reported_by_the_deadline(cluster, name):
    connector = cluster.connector(namespace=name, options={"request_timeout_s": 0.5})
    connector.put("key", b"x")
    cluster.service.daemons["worker0"].suspend()
    began_s = time.monotonic()
    try:
        with pytest.raises((BackendUnavailableError, TransferTimeoutError)):
            connector.get("key", timeout=1)
        assert not connector.health(timeout=1).ok
    finally:
        cluster.service.daemons["worker0"].resume()
    assert time.monotonic() - began_s < 10
    eventually(lambda: works(connector), within_s=20)


# ---- room


def test_a_full_worker_makes_put_wait_and_then_fail(cluster, name):
    connector = cluster.connector(namespace=name)
    payload = np.zeros(40_000_000, np.uint8)
    put = []
    with pytest.raises(CapacityError):
        for number in range(10):
            connector.put(number_key := f"k{number}", payload, timeout=1)
            put.append(number_key)
    assert 2 <= len(put) <= 4
    with pytest.raises(PayloadTooLargeError):
        connector.put("large", np.zeros(250_000_000, np.uint8), timeout=5)
    for key in put:  # none was thrown out
        assert connector.get(key).nbytes == payload.nbytes
    eventually(lambda: works(connector))


# ---- threads and forks


WAIT_S = 2.5


def test_a_waiting_get_does_not_hold_the_gil(ends):
    """The vendor's own waiting get freezes every thread for as long as it waits; ours asks, half a millisecond long, and sleeps."""
    pending = ends.consumer.start_act(acts.get_beside_a_ticking_thread, "key", 1.0)
    assert not pending.done()
    time.sleep(WAIT_S)  # what is measured
    ends.producer.put("key", b"late")
    payload, alone, beside = pending.result()
    assert payload == b"late"
    assert len(beside) > 200
    assert statistics.median(beside) < statistics.median(alone) + 5e-3  # a busy machine's request takes a few
    assert max(beside) < WAIT_S / 2  # the vendor's own wait: all of it


def test_a_forked_child_gets_a_clear_error_and_can_open_its_own(cluster, ends):
    ends.producer.put("key", b"for the child")
    assert ends.consumer.exists("key") == [True]
    config = cluster.config(1)
    error, payload = ends.consumer.act(acts.fork_and_get, config, ends.namespace, "key")
    assert error == "ForkedError"
    assert payload == b"for the child"
    ends.producer.put("key2", b"for the parent")
    assert ends.consumer.get("key2") == b"for the parent"


def _puts(acting):
    return puts(acting.connector)


def _works(acting):
    return works(acting.connector)
