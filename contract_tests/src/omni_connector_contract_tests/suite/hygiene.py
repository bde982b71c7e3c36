"""Level 1: nothing leaks over many rounds, and hostile bytes do nothing (points 13 and 15)."""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.harness.probes import LeakProbe
from omni_connector_contract_tests.suite.base import ContractTests, requires, without
from omni_connector_core import OmniConnectorError

__all__ = ["TestHostileBytes", "TestLeaks"]


class TestLeaks(ContractTests):
    """Rounds of everything that ends well or badly, with a look at both processes before and after."""

    def test_transfers_leak_nothing(self, ends: Ends) -> None:
        self._round(ends, 0)
        probe = LeakProbe(ends.peers)
        for n in range(1, 12):
            self._round(ends, n)
        probe.check()
        assert ends.producer.usage().pending == 0
        assert ends.producer.usage().bytes_held == 0

    @staticmethod
    def _round(ends: Ends, n: int) -> None:
        metadata = ends.producer.put("k", Bulk(30_000, seed=n))
        assert ends.consumer.get_fingerprint("k", metadata) == fingerprint(Bulk(30_000, seed=n))
        with pytest.raises(TimeoutError):
            ends.consumer.get("nothing", timeout=0.01)
        ends.producer.fail(f"failed-{n}", "reason")
        with pytest.raises(OmniConnectorError):
            ends.consumer.get(f"failed-{n}", timeout=1.0)
        ends.producer.put(f"abandoned-{n}", Bulk(30_000))
        ends.producer.cleanup(f"abandoned-{n}")

    def test_opening_and_closing_leaks_nothing(self, ends: Ends) -> None:
        def round_trip(n: int) -> None:
            producer, consumer = ends.open("producer"), ends.open("consumer")
            producer.put("k", n)
            assert consumer.get("k") == n
            consumer.close()
            producer.close()

        round_trip(0)
        probe = LeakProbe(ends.peers)
        for n in range(1, 8):
            round_trip(n)
        probe.check()

    def test_a_connector_that_was_never_used_leaks_nothing(self, ends: Ends) -> None:
        probe = LeakProbe(ends.peers)
        for _ in range(8):
            for role in ("producer", "consumer"):
                ends.open(role).close()
        probe.check()

    def test_closing_with_unread_payloads_leaks_nothing(self, ends: Ends) -> None:
        def abandon(n: int) -> None:
            producer = ends.open("producer", edge=(f"edge-{n}", "1"))
            for key in ("a", "b"):
                producer.put(key, Bulk(30_000))
            producer.cleanup("a")
            producer.cleanup("b")
            producer.close()

        abandon(0)
        probe = LeakProbe(ends.peers)
        for n in range(1, 8):
            abandon(n)
        probe.check()


class _Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self._path), "w"))


@requires("cross_process")
class TestHostileBytes(ContractTests):
    """Whatever arrives on a control socket: nothing is run, nothing dies, nothing leaks, the next transfer works."""

    @requires("hardened_ports")
    def test_random_and_hostile_bytes_on_every_socket_do_nothing(self, ends: Ends, tmp_path: Path) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.get_fingerprint("k")
        self._withstand(ends, tmp_path, [place for end in (ends.producer, ends.consumer) for place in _listening(end)])

    @without("hardened_ports")
    def test_random_and_hostile_bytes_on_the_control_port_do_nothing(self, ends: Ends, tmp_path: Path) -> None:
        metadata = ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.get_fingerprint("k", metadata)
        told = {port for text in map(str, metadata["at"].values()) for port in re.findall(r":(\d+)$", text)}
        control = [place for place in _listening(ends.producer) if str(place[2][-1]) in told]
        assert control, "the metadata tells no control port"
        self._withstand(ends, tmp_path, control)

    def _withstand(self, ends: Ends, tmp_path: Path, sockets: list[tuple[int, int, Any]]) -> None:
        marker = tmp_path / "executed"
        noise = random.Random(7)
        messages = [
            b"",
            b"\0" * 64,
            b"\xff" * 4096,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            (2**63 - 1).to_bytes(8, "little") + b"x",
            pickle.dumps(_Bomb(marker)),
            b"\x81" * 100_000,
            *(noise.randbytes(noise.randrange(1, 3000)) for _ in range(20)),
        ]
        probe = LeakProbe(ends.peers)
        for family, kind, address in sockets:
            for message in messages:
                _send(family, kind, address, message)
        ends.producer.put("k", Bulk(200_000, seed=2))
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000, seed=2))
        assert ends.producer.peer.alive
        assert ends.consumer.peer.alive
        assert not marker.exists()
        probe.check()


def _listening(end: End) -> list[tuple[int, int, Any]]:
    found: list[tuple[int, int, Any]] = []
    for connection in psutil.Process(end.peer.pid).net_connections("all"):
        address: Any = connection.laddr
        if connection.family == socket.AF_UNIX:
            if address:
                name = f"\0{address[1:]}" if address.startswith("@") else address
                found.append((connection.family, connection.type, name))
        elif connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
            found.append((connection.family, connection.type, tuple(address)))
    return found


def _send(family: int, kind: int, address: object, message: bytes) -> None:
    with contextlib.suppress(OSError), socket.socket(family, kind) as client:
        client.settimeout(0.2)
        client.connect(address)  # type: ignore[arg-type]
        client.sendall(message)
        with contextlib.suppress(TimeoutError):
            client.shutdown(socket.SHUT_WR)
            client.recv(4096)
