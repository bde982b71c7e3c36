"""Two hosts with a worker each, the metastore on the consumer's: what a cut does to gets and puts, and that healed peers work on."""

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.two_hosts import ADDRESS
from omni_connector_contract_tests.network import HELD_S, LOST_S, NetworkBackend, network_ends, timed_get, two_hosts  # noqa: F401
from omni_connector_core import BackendUnavailableError, PeerLostError, TransferTimeoutError

pytest.importorskip("yr.datasystem", exc_type=ImportError)

SERVE = """
import json, sys
from omni_connector_yuanrong.service import start
with start(memory="192MiB", host=sys.argv[1], metastore=sys.argv[2] or None) as service:
    print(json.dumps([service.config(), service.metastore]), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def worker(hosts, host, metastore=""):
    """Run a worker on a host; gives its options and the metastore's address."""
    command = [*hosts.prefix(host), sys.executable, "-c", SERVE, ADDRESS[host], metastore]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        yield json.loads(service.stdout.readline())
        service.stdin.close()


@pytest.fixture(scope="module")
def network_backend(two_hosts):  # noqa: F811
    with worker(two_hosts, "b") as (there, metastore), worker(two_hosts, "a", metastore) as (here, _):
        yield NetworkBackend("yuanrong", {config["host"]: config for config in (here, there)}.__getitem__)


@pytest.fixture
def ends(network_ends):  # noqa: F811
    return network_ends


def test_payloads_cross(ends):
    producer, consumer = ends
    for n, nbytes in enumerate((1000, 1 << 20, 16 << 20)):
        payload = Bulk(nbytes, seed=n)
        metadata = producer.put(f"k{n}", payload)
        assert consumer.get_fingerprint(f"k{n}", metadata, timeout=30) == fingerprint(payload)


def test_a_get_waits_through_a_cut_of_three_seconds(ends, two_hosts):  # noqa: F811
    producer, consumer = ends
    metadata = producer.put("k", Bulk(1 << 20))
    with two_hosts.cut():
        getting = consumer.start("get", "k", metadata, timeout=60)
        time.sleep(3)  # the cut itself, not a wait for something
        assert not getting.done()
    assert getting.result().nbytes == 1 << 20


@pytest.mark.parametrize("fault", ["cut", "blackhole"])
def test_a_deadline_holds_through_a_cut_and_a_healed_peer_works_again(ends, two_hosts, fault):  # noqa: F811
    producer, consumer = ends
    metadata = producer.put("k", Bulk(1 << 20))
    with getattr(two_hosts, fault)():
        seconds, error, _ = consumer.act(timed_get, "k", metadata, 2.0)
        assert isinstance(error, TransferTimeoutError | PeerLostError)
        assert seconds < HELD_S
    assert consumer.get_fingerprint("k", metadata, timeout=60) == fingerprint(Bulk(1 << 20))
    producer.put("after", Bulk(1 << 20))
    assert consumer.get_fingerprint("after", timeout=60) == fingerprint(Bulk(1 << 20))


def test_a_producer_that_is_cut_off_for_good_is_lost(ends, two_hosts):  # noqa: F811
    producer, consumer = ends
    metadata = producer.put("k", Bulk(1000))
    with two_hosts.blackhole():
        seconds, error, _ = consumer.act(timed_get, "k", metadata, 60.0)
        assert isinstance(error, PeerLostError)
        assert seconds < LOST_S


def test_a_producer_that_is_cut_off_from_the_metastore_comes_back(ends, two_hosts):  # noqa: F811
    producer, consumer = ends
    assert producer.put("before", 1) is not None
    with two_hosts.cut():
        producer.act(failed_put, 2.0)
    metadata = producer.put("k", np.arange(1000), timeout=30.0)
    assert (consumer.get("k", metadata, timeout=30.0) == np.arange(1000)).all()


def failed_put(acting, timeout):
    start_s = time.monotonic()
    with pytest.raises(BackendUnavailableError):
        acting.connector.put("cut", 1, timeout=timeout)
    assert time.monotonic() - start_s < HELD_S
