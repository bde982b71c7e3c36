"""Peers that hang, die, restart and crowd; pools that are full. Every one bounded by the caller's deadline."""

import os
import threading
import time

import numpy as np
import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_core import CapacityError, PayloadTooLargeError, PeerLostError, TransferTimeoutError
from omni_connector_core.services import free_ports

pytest.importorskip("mooncake.engine", exc_type=ImportError)

SOON_S = 12.0
"""A peer that hangs is lost after 5 s of silence; the machine may be busy."""


@pytest.fixture
def ends():
    peers = Peers(processes=True, patience_s=60)
    made = Ends(Backend("mooncake_te", {"capacity_bytes": "128MiB"}), peers)
    try:
        yield made
        made.close()
    finally:
        peers.shutdown()


def lost(ends, key, metadata, timeout=30.0):
    start = time.monotonic()
    with pytest.raises(PeerLostError):
        ends.consumer.get(key, metadata, timeout=timeout)
    return time.monotonic() - start


def test_the_first_contact_with_a_hung_peer_ends_soon(ends):
    metadata = ends.producer.put("k", Bulk(1000))
    ends.process(ends.producer).pause()
    assert lost(ends, "k", metadata) < SOON_S
    ends.process(ends.producer).resume()
    assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(1000))


def test_a_known_peer_that_hangs_is_lost_soon_and_found_again(ends):
    for name in ("first", "second", "third"):
        ends.producer.put(name, Bulk(1000))
    ends.consumer.get("first")
    ends.process(ends.producer).pause()
    assert lost(ends, "second", None) < SOON_S
    ends.process(ends.producer).resume()
    assert ends.consumer.get_fingerprint("third") == fingerprint(Bulk(1000))
    assert ends.consumer.get_fingerprint("second") == fingerprint(Bulk(1000))


def test_a_short_deadline_holds_for_a_hung_peer(ends):
    metadata = ends.producer.put("k", Bulk(1000))
    ends.process(ends.producer).pause()
    start = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        ends.consumer.get("k", metadata, timeout=0.5)
    assert time.monotonic() - start < 4.0
    ends.process(ends.producer).resume()


def test_a_peer_that_was_killed_is_lost_at_once(ends):
    metadata = ends.producer.put("k", Bulk(1000))
    ends.consumer.poll("other")
    ends.process(ends.producer).kill()
    assert lost(ends, "k", metadata) < 4.0


@pytest.mark.parametrize("attempt", range(3))
def test_a_peer_killed_in_the_middle_of_a_transfer(ends, attempt):
    payload = Bulk(100 << 20)
    metadata = ends.producer.put("k", payload)
    getting = ends.consumer.start("get", "k", metadata, timeout=60)
    eventually(lambda: ends.consumer.usage().bytes_held > 0 or getting.done())
    ends.process(ends.producer).kill()
    start = time.monotonic()
    try:
        assert fingerprint(getting.result()) == fingerprint(payload)
    except PeerLostError:
        assert time.monotonic() - start < SOON_S
    eventually(lambda: ends.consumer.usage().bytes_held == 0, within_s=10)  # also what was in quarantine


def test_a_restarted_peer_on_the_same_port(ends):
    config = {"control_port": free_ports(1)[0]}
    first = ends.open("producer", on="first", config=config)
    old = first.put("k", "old")
    assert old["at"]["address"].endswith(f":{config['control_port']}")
    ends.process(first).kill()
    second = ends.open("producer", on="second", config=config)
    new = second.put("k", "new")
    assert new["at"]["address"] == old["at"]["address"]
    assert lost(ends, "k", old) < 4.0
    assert ends.consumer.get("k", new) == "new"
    second.put("l", "newer")
    assert ends.consumer.get("l") == "newer"


def test_a_killed_consumers_read_goes_to_another(ends):
    payload = Bulk(100 << 20)
    metadata = ends.producer.put("k", payload)
    doomed = ends.open("consumer", on="doomed")
    getting = doomed.start("get", "k", metadata, timeout=60)
    eventually(lambda: doomed.usage().bytes_held > 0 or getting.done())
    ends.process(doomed).kill()
    if not getting.done() or isinstance(getting.future.exception(), Exception):
        assert ends.consumer.get_fingerprint("k", metadata, timeout=30) == fingerprint(payload)


def test_eight_threads_meet_a_peer_at_once(ends):
    ends.producer.act(put_many, 8)
    assert ends.consumer.act(get_at_once, 8) == [fingerprint(Bulk(100_000, seed=n)) for n in range(8)]


def put_many(acting, count):
    for n in range(count):
        acting.connector.put(f"k{n}", Bulk(100_000, seed=n).build())


def get_at_once(acting, count):
    found = [None] * count
    barrier = threading.Barrier(count)

    def get(n):
        barrier.wait()
        found[n] = fingerprint(acting.connector.get(f"k{n}", timeout=30))

    threads = [threading.Thread(target=get, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_full_pool_at_the_producer(ends):
    with pytest.raises(PayloadTooLargeError):
        ends.producer.put("huge", Bulk(129 << 20), timeout=30)
    ends.producer.put("k", Bulk(100 << 20))
    start = time.monotonic()
    with pytest.raises(CapacityError):
        ends.producer.put("l", Bulk(100 << 20), timeout=0.3)
    assert time.monotonic() - start < 5
    waiting = ends.producer.start("put", "l", Bulk(100 << 20), timeout=30)
    ends.consumer.get_fingerprint("k")
    waiting.result()  # as soon as the first was read
    assert ends.consumer.get_fingerprint("l") == fingerprint(Bulk(100 << 20))


def test_a_full_pool_at_the_consumer_loses_nothing(ends):
    for name in ("k", "l"):
        ends.producer.put(name, Bulk(60 << 20))
    ends.consumer.act(hold, "k")
    ends.consumer.act(hold_some, 30 << 20)
    with pytest.raises(CapacityError):
        ends.consumer.get("l", timeout=0.5)
    ends.consumer.act(let_go)
    assert ends.consumer.get_fingerprint("l") == fingerprint(Bulk(60 << 20))


def hold(acting, key):
    acting.kept[key] = acting.connector.get(key)


def hold_some(acting, nbytes):
    """Take room with a payload of this process' own, which has its own edge."""
    from omni_connector_core import create_connector

    context = acting.connector.transport.context
    options = {"capacity_bytes": context.options.capacity_bytes}
    other = create_connector(context.backend, options, namespace=context.namespace, edge=("x", "y"))
    other.put("filler", np.zeros(nbytes, np.uint8))
    acting.kept["other"] = other


def let_go(acting):
    acting.kept.pop("other").close()
    acting.kept.clear()


def test_an_idle_connector_uses_no_cpu(ends):
    ends.producer.put("k", 1)
    ends.consumer.get("k")
    ends.producer.put("l", 1)  # unread, so that there is something to look after
    for end in (ends.producer, ends.consumer):
        assert end.act(cpu_seconds_in, 1.0) < 0.03


def cpu_seconds_in(_, seconds):
    before = os.times()
    time.sleep(seconds)  # what is measured
    after = os.times()
    return after.user + after.system - before.user - before.system
