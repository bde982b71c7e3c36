"""What every one-sided backend is held to when peers hang, die, restart and crowd, and when pools are full.

A backend's own tests import this and say how it is configured::

    from omni_connector_contract_tests.one_sided import *

    @pytest.fixture(scope="session")
    def one_sided_backend():
        return Backend("my_backend", {"capacity_bytes": "128MiB"})

Every fault is bounded by the caller's deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import (
    CapacityError,
    PayloadTooLargeError,
    PeerLostError,
    TransferTimeoutError,
    create_connector,
)
from omni_connector_core.services import free_ports

__all__ = ["Backend", "TestOneSidedFaults", "one_sided_ends"]

CAPACITY_NBYTES = 128 << 20
SOON_S = 20.0
"""A peer that hangs is lost after 5 s of silence; the machine may be busy."""
IDLE_CPU_S = 0.03
"""Processor time that an idle connector may use in a second."""


@pytest.fixture
def one_sided_ends(one_sided_backend: Backend) -> Iterator[Ends]:
    """Two ends in processes that nobody used before, with 128 MiB of memory each."""
    peers = Peers(processes=True, patience_s=60)
    config = {**one_sided_backend.config, "capacity_bytes": CAPACITY_NBYTES}
    ends = Ends(Backend(one_sided_backend.name, config), peers)
    try:
        for end in (ends.producer, ends.consumer):
            assert end.health().ok  # the engine is up: its start is in no time that is measured
        yield ends
        ends.close()
    finally:
        peers.shutdown()


class TestOneSidedFaults:
    """A producer and a consumer that read each other's memory, and what can become of either."""

    @pytest.fixture(autouse=True)
    def _meet(self, one_sided_ends: Ends) -> None:
        self.ends = one_sided_ends

    def lost(self, key: str, metadata: Any, timeout: float = 30.0) -> float:
        """Get what cannot be had any more; returns after how many seconds that was said."""
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            self.ends.consumer.get(key, metadata, timeout=timeout)
        return time.monotonic() - start_s

    # ---- hangs

    def test_the_first_contact_with_a_hung_peer_ends_soon(self) -> None:
        ends = self.ends
        metadata = ends.producer.put("k", Bulk(1000))
        ends.process(ends.producer).pause()
        assert self.lost("k", metadata) < SOON_S
        ends.process(ends.producer).resume()
        assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(1000))

    def test_a_known_peer_that_hangs_is_lost_soon_and_found_again(self) -> None:
        ends = self.ends
        for name in ("first", "second", "third"):
            ends.producer.put(name, Bulk(1000))
        ends.consumer.get("first")
        ends.process(ends.producer).pause()
        assert self.lost("second", None) < SOON_S
        ends.process(ends.producer).resume()
        assert ends.consumer.get_fingerprint("third") == fingerprint(Bulk(1000))
        assert ends.consumer.get_fingerprint("second") == fingerprint(Bulk(1000))

    def test_a_short_deadline_holds_for_a_hung_peer(self) -> None:
        ends = self.ends
        metadata = ends.producer.put("k", Bulk(1000))
        ends.process(ends.producer).pause()
        start_s = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", metadata, timeout=0.5)
        assert time.monotonic() - start_s < 4.0
        ends.process(ends.producer).resume()

    # ---- deaths

    def test_a_peer_that_was_killed_is_lost_at_once(self) -> None:
        ends = self.ends
        metadata = ends.producer.put("k", Bulk(1000))
        ends.consumer.poll("other")
        ends.process(ends.producer).kill()
        assert self.lost("k", metadata) < 4.0

    @pytest.mark.parametrize("attempt", range(3))
    def test_a_peer_killed_in_the_middle_of_a_transfer(self, attempt: int) -> None:
        del attempt
        ends = self.ends
        payload = Bulk(100 << 20)
        metadata = ends.producer.put("k", payload)
        getting = ends.consumer.start("get", "k", metadata, timeout=60)
        eventually(lambda: ends.consumer.usage().bytes_held > 0 or getting.done())
        ends.process(ends.producer).kill()
        start_s = time.monotonic()
        try:
            assert fingerprint(getting.result()) == fingerprint(payload)
        except PeerLostError:
            assert time.monotonic() - start_s < SOON_S
        eventually(lambda: ends.consumer.usage().bytes_held == 0, within_s=10)  # also what was in quarantine

    def test_a_restarted_peer_on_the_same_port(self) -> None:
        ends = self.ends
        config = {"control_port": free_ports(1)[0]}
        first = ends.open("producer", on="first", config=config)
        old = first.put("k", "old")
        assert old["at"]["address"].endswith(f":{config['control_port']}")
        ends.process(first).kill()
        second = ends.open("producer", on="second", config=config)
        new = second.put("k", "new")
        assert new["at"]["address"] == old["at"]["address"]
        assert self.lost("k", old) < 4.0
        assert ends.consumer.get("k", new) == "new"
        second.put("l", "newer")
        assert ends.consumer.get("l") == "newer"

    def test_a_killed_consumers_read_goes_to_another(self) -> None:
        ends = self.ends
        payload = Bulk(100 << 20)
        metadata = ends.producer.put("k", payload)
        doomed = ends.open("consumer", on="doomed")
        getting = doomed.start("get", "k", metadata, timeout=60)
        eventually(lambda: doomed.usage().bytes_held > 0 or getting.done())
        ends.process(doomed).kill()
        if not getting.done() or isinstance(getting.future.exception(), Exception):
            assert ends.consumer.get_fingerprint("k", metadata, timeout=30) == fingerprint(payload)

    # ---- crowds and full pools

    def test_eight_threads_meet_a_peer_at_once(self) -> None:
        self.ends.producer.act(put_many, 8)
        assert self.ends.consumer.act(get_at_once, 8) == [fingerprint(Bulk(200_000, seed=n)) for n in range(8)]

    def test_a_full_pool_at_the_producer(self) -> None:
        ends = self.ends
        with pytest.raises(PayloadTooLargeError):
            ends.producer.put("huge", Bulk(129 << 20), timeout=30)
        ends.producer.put("k", Bulk(100 << 20))
        start_s = time.monotonic()
        with pytest.raises(CapacityError):
            ends.producer.put("l", Bulk(100 << 20), timeout=0.3)
        assert time.monotonic() - start_s < 5
        waiting = ends.producer.start("put", "l", Bulk(100 << 20), timeout=30)
        ends.consumer.get_fingerprint("k")
        waiting.result()  # as soon as the first was read
        assert ends.consumer.get_fingerprint("l") == fingerprint(Bulk(100 << 20))

    def test_a_full_pool_at_the_consumer_loses_nothing(self) -> None:
        ends = self.ends
        for name in ("k", "l"):
            ends.producer.put(name, Bulk(60 << 20))
        ends.consumer.act(hold, "k")
        ends.consumer.act(hold_some, 30 << 20)
        with pytest.raises(CapacityError):
            ends.consumer.get("l", timeout=0.5)
        ends.consumer.act(let_go)
        assert ends.consumer.get_fingerprint("l") == fingerprint(Bulk(60 << 20))

    def test_an_idle_connector_uses_no_cpu(self) -> None:
        ends = self.ends
        ends.producer.put("k", 1)
        ends.consumer.get("k")
        ends.producer.put("l", 1)  # unread, so that there is something to look after
        for end in (ends.producer, ends.consumer):
            assert end.act(cpu_seconds_in, 1.0) < IDLE_CPU_S


def put_many(acting: Acting, count: int) -> None:
    """Put `count` payloads."""
    for n in range(count):
        acting.connector.put(f"k{n}", Bulk(200_000, seed=n).build())


def get_at_once(acting: Acting, count: int) -> list[str]:
    """Get what `put_many` puts, each in a thread of its own; returns the fingerprints."""
    found = [""] * count
    barrier = threading.Barrier(count)

    def get(n: int) -> None:
        barrier.wait()
        found[n] = fingerprint(acting.connector.get(f"k{n}", timeout=30))

    threads = [threading.Thread(target=get, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def hold(acting: Acting, key: str) -> None:
    """Get a payload and keep it."""
    acting.kept[key] = acting.connector.get(key)


def hold_some(acting: Acting, nbytes: int) -> None:
    """Take room with a payload of this process' own, which has its own edge."""
    context = acting.connector.transport.context
    fields = type(context.options).__dataclass_fields__
    options = {name: getattr(context.options, name) for name in fields if name != "control_port"}
    other = create_connector(context.backend, options, namespace=context.namespace, edge=("x", "y"))
    other.put("filler", np.zeros(nbytes, np.uint8))
    acting.kept["other"] = other


def let_go(acting: Acting) -> None:
    """Give back what `hold` and `hold_some` took."""
    acting.kept.pop("other").close()
    acting.kept.clear()


def cpu_seconds_in(acting: Acting, seconds_s: float) -> float:
    """Do nothing for a while; returns the processor time that the process used meanwhile."""
    del acting
    before = os.times()
    time.sleep(seconds_s)  # what is measured
    after = os.times()
    return after.user + after.system - before.user - before.system
