"""What every backend that leaves the host is held to when the network fails: tests over `TwoHosts`.

A backend's own tests import this and say how it is configured on a host::

    from omni_connector_contract_tests.network import *

    @pytest.fixture(scope="module")
    def network_backend():
        return NetworkBackend("my_backend", lambda address: {"host": address})

Beside the error that the caller sees, they look at the memory: whatever was given up must not be written later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.two_hosts import ADDRESS, TwoHosts, why_not
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import (
    CapacityError,
    DecodeError,
    OmniConnectorError,
    PeerLostError,
    TransferTimeoutError,
    create_connector,
)

__all__ = ["NetworkBackend", "TestNetwork", "network_ends", "two_hosts"]

PAYLOAD = Bulk(256 << 20)
RATE_MBIT_PER_S = 1000
UNDER_WAY_NBYTES = 40 << 20
FILLER_NBYTES = 4 << 20
SETTLED_S = 3.0
HELD_S = 10.0
"""A deadline of 3 s or less is held when the call is over by then: the machine may be busy, and an engine's own wait is 30 s and
more."""
LOST_S = 30.0
"""A peer is lost within 10 s or so; the deadline is 60."""


@dataclass(frozen=True, slots=True)
class NetworkBackend:
    """A backend, and its options on the host of an address; room for 600 MiB is needed."""

    name: str
    config_at: Callable[[str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, for all tests of a module."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with TwoHosts() as hosts:
        hosts.slow(RATE_MBIT_PER_S)
        yield hosts


@pytest.fixture
def network_ends(network_backend: NetworkBackend, two_hosts: TwoHosts) -> Iterator[tuple[End, End]]:
    """Start a producer on host a and a consumer on host b, in processes that nobody used before."""
    prefixes = {"producer": two_hosts.prefix("a"), "consumer": two_hosts.prefix("b")}
    peers = Peers(processes=True, patience_s=90, prefixes=prefixes)
    ends = Ends(Backend(network_backend.name), peers)
    try:
        yield (
            ends.open("producer", config=network_backend.config_at(ADDRESS["a"])),
            ends.open("consumer", config=network_backend.config_at(ADDRESS["b"])),
        )
        ends.close()
    finally:
        peers.shutdown()


class TestNetwork:
    """A producer on one host, a consumer on another, and a cable between them."""

    @pytest.fixture(autouse=True)
    def _meet(self, two_hosts: TwoHosts, network_ends: tuple[End, End]) -> None:
        self.hosts = two_hosts
        self.producer, self.consumer = network_ends

    def start_large_get(self, timeout: float) -> Any:
        """Put the large payload, begin to get it, and return when its bytes are on the cable."""
        self.metadata = self.producer.put("large", PAYLOAD)
        before = self.hosts.received_bytes("b")
        getting = self.consumer.start_act(timed_get, "large", self.metadata, timeout)
        eventually(lambda: self.hosts.received_bytes("b") - before > UNDER_WAY_NBYTES, within_s=60)
        assert not getting.done()
        return getting

    def test_payloads_cross(self) -> None:
        before = self.hosts.received_bytes("b")
        for n, nbytes in enumerate((1000, 1 << 20, 64 << 20)):
            payload = Bulk(nbytes, seed=n)
            metadata = self.producer.put(f"k{n}", payload)
            assert self.consumer.get_fingerprint(f"k{n}", metadata, timeout=60) == fingerprint(payload)
        assert self.hosts.received_bytes("b") - before > 65 << 20

    def test_a_cut_of_three_seconds_is_survived(self) -> None:
        getting = self.start_large_get(timeout=60)
        with self.hosts.cut():
            time.sleep(3)  # the cut itself, not a wait for something
        _, error, found = getting.result()
        assert error is None
        assert found == fingerprint(PAYLOAD)

    @pytest.mark.parametrize("fault", ["cut", "blackhole"])
    def test_a_deadline_holds_through_a_cut_and_no_byte_comes_late(self, fault: str) -> None:
        self.consumer.act(open_filler, FILLER_NBYTES)
        getting = self.start_large_get(timeout=3.0)
        with getattr(self.hosts, fault)():
            seconds, error, _ = getting.result()
            assert isinstance(error, TransferTimeoutError | PeerLostError)
            assert seconds < HELD_S
            assert self.consumer.act(fill) > 0
        time.sleep(SETTLED_S)  # whatever is on its way arrives
        assert self.consumer.act(look_at_filler) == [], "bytes arrived late in memory that was handed out again"
        self.works_again()

    def test_a_reset_is_survived_or_said_at_once(self) -> None:
        getting = self.start_large_get(timeout=60)
        self.hosts.break_connections()
        seconds, error, found = getting.result()
        assert error is None or (isinstance(error, PeerLostError) and seconds < LOST_S)
        if error is None:
            assert found == fingerprint(PAYLOAD)
        self.works_again()

    def test_a_peer_that_refuses_is_lost_within_seconds(self) -> None:
        getting = self.start_large_get(timeout=60)
        with self.hosts.reset():
            seconds, error, _ = getting.result()
            assert isinstance(error, PeerLostError)
            assert seconds < LOST_S
        self.works_again()

    def test_a_cut_before_the_first_contact_holds_the_deadline(self) -> None:
        metadata = self.producer.put("k", Bulk(1000))
        with self.hosts.cut():
            seconds, error, _ = self.consumer.act(timed_get, "k", metadata, 2.0)
            assert isinstance(error, TransferTimeoutError | PeerLostError)
            assert seconds < HELD_S
        assert self.consumer.get_fingerprint("k", metadata, timeout=60) == fingerprint(Bulk(1000))

    def test_loss_only_slows_down(self) -> None:
        payload = Bulk(2 << 20)
        metadata = self.producer.put("k", payload)
        with self.hosts.loss(10):
            assert self.consumer.get_fingerprint("k", metadata, timeout=80) == fingerprint(payload)

    def works_again(self) -> None:
        """Both payloads, the one that was interrupted and a new one, can be had without a restart."""
        metadata = self.producer.put("after", Bulk(1 << 20))
        assert self.consumer.get_fingerprint("after", metadata, timeout=60) == fingerprint(Bulk(1 << 20))
        if self.producer.usage().pending:
            assert self.consumer.get_fingerprint("large", self.metadata, timeout=60) == fingerprint(PAYLOAD)


def timed_get(
    acting: Acting, key: str, metadata: Any, timeout: float
) -> tuple[float, OmniConnectorError | None, str | None]:
    """Get; returns the seconds it took, its error, and the payload's fingerprint."""
    start_s = time.monotonic()
    try:
        payload = acting.connector.get(key, metadata, timeout=timeout)
    except OmniConnectorError as error:
        return time.monotonic() - start_s, error, None
    return time.monotonic() - start_s, None, fingerprint(payload)


def open_filler(acting: Acting, nbytes: int) -> None:
    """Open a connector of another edge in the consumer's process: it takes its memory from the same place."""
    context = acting.connector.transport.context
    config = {
        name: getattr(context.options, name)
        for name in type(context.options).__dataclass_fields__
        if name not in ("control_port",)
    }
    filler = create_connector(context.backend, config, namespace=context.namespace, edge=("filler", "nobody"))
    acting.kept["filler"] = filler
    acting.kept["filler nbytes"] = nbytes
    filler.put("warm", b"up")
    filler.get("warm")


def fill(acting: Acting) -> int:
    """Fill all memory that is free now with payloads, but for the room in which to look at one; returns how many it took."""
    count = 0
    payload = np.full(acting.kept["filler nbytes"], 0x5A, np.uint8)
    while True:
        try:
            acting.kept["filler"].put(f"filler{count}", payload, timeout=0)
        except CapacityError:
            break
        count += 1
    count -= int(acting.kept["filler"].cleanup(f"filler{count - 1}"))
    acting.kept["filled"] = count
    return count


def look_at_filler(acting: Acting) -> list[int]:
    """Read every filler into private memory and close the connector; returns the numbers of those that changed."""
    buffer = np.empty(acting.kept["filler nbytes"], np.uint8)
    changed = []
    for n in range(acting.kept["filled"]):
        try:
            acting.kept["filler"].get_into(f"filler{n}", [buffer])
            same = bool((buffer == 0x5A).all())
        except DecodeError:
            same = False
        if not same:
            changed.append(n)
    acting.kept.pop("filler").close()
    return changed
