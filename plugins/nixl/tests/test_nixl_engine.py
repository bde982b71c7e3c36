"""The engine alone, in one process or two: what `NixlEngine` promises beyond the contract suite."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from omni_connector_core import create_connector
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError, PeerLostError
from omni_connector_core.onesided import Piece
from omni_connector_nixl.engine import NixlEngine


class Memory:
    """A block of memory and its address."""

    def __init__(self, nbytes: int, value: int = 0) -> None:
        self.array = np.full(nbytes, value, np.uint8)
        self.address = self.array.ctypes.data


def wait(engine: NixlEngine, read: object, *, producer: NixlEngine | None = None) -> None:
    until_s = time.monotonic() + 20
    while not engine.done(read):
        if producer is not None:
            producer.progress()
        assert time.monotonic() < until_s


@pytest.fixture
def pair():
    """A producer with 1 MiB of sevens and a consumer with 1 MiB of zeros, both in this process."""
    engines = NixlEngine("127.0.0.1", ["UCX"]), NixlEngine("127.0.0.1", ["UCX"])
    memories = Memory(1 << 20, 7), Memory(1 << 20)
    for engine, memory in zip(engines, memories, strict=True):
        engine.register(memory.address, memory.array.nbytes)
    yield *engines, *memories
    for engine in engines:
        engine.close()


def test_thousands_of_pieces_in_one_read(pair):
    producer, consumer, theirs, ours = pair
    theirs.array[:] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
    pieces = [Piece(theirs.address + 128 * n, ours.address + 256 * (4095 - n), 100) for n in range(4096)]
    read = consumer.start(consumer.connect(producer.endpoint(theirs.address)), pieces)
    wait(consumer, read, producer=producer)
    rows = ours.array.reshape(4096, 256)[::-1, :100]
    assert np.array_equal(rows[: (1 << 20) // 256], theirs.array[: 4096 * 128].reshape(4096, 128)[:, :100])


def test_it_reads_its_own_memory(pair):
    producer, _, theirs, _ = pair
    theirs.array[: 1 << 19] = 9
    peer = producer.connect(producer.endpoint(theirs.address))
    wait(producer, producer.start(peer, [Piece(theirs.address, theirs.address + (1 << 19), 1 << 19)]))
    assert (theirs.array == 9).all()


@pytest.mark.parametrize("where", ["first", "middle", "last", "cut short", "empty"])
def test_damaged_metadata_is_refused_before_ucx_sees_it(pair, where):
    producer, consumer, theirs, _ = pair
    blob = bytearray(producer.endpoint(theirs.address))
    index = {"first": 0, "middle": len(blob) // 2, "last": -1}.get(where)
    if index is None:
        blob = blob[: len(blob) // 2] if where == "cut short" else bytearray()
    else:
        blob[index] ^= 0x40
    with pytest.raises(PeerLostError, match="damaged"):
        consumer.connect(bytes(blob))


def test_memory_registered_later_can_be_read_too(pair):
    producer, consumer, theirs, ours = pair
    before = producer.endpoint(theirs.address)
    consumer.connect(before)
    more = Memory(4096, 5)
    producer.register(more.address, 4096)
    assert producer.endpoint(theirs.address) == before
    peer = consumer.connect(producer.endpoint(more.address))
    pieces = [Piece(more.address, ours.address, 4096), Piece(theirs.address, ours.address + 4096, 4096)]
    wait(consumer, consumer.start(peer, pieces), producer=producer)
    assert (ours.array[:4096] == 5).all()
    assert (ours.array[4096:8192] == 7).all()
    producer.unregister(more.address)
    producer.unregister(more.address)  # unknown by now
    assert producer.endpoint(theirs.address) == before


@pytest.mark.parametrize("fault", ["unregistered", "overrun"])
def test_memory_that_is_not_served_cannot_be_read(pair, fault):
    producer, consumer, theirs, ours = pair
    peer = consumer.connect(producer.endpoint(theirs.address))
    outside = Memory(4096)
    piece = {
        "unregistered": Piece(outside.address, ours.address, 64),
        "overrun": Piece(theirs.address + (1 << 20) - 32, ours.address, 64),
    }[fault]
    with pytest.raises(PeerLostError, match="nixlNotFoundError"):
        consumer.start(peer, [piece])


def test_first_contact_from_many_threads_at_once(pair):
    producer, consumer, theirs, ours = pair
    blob = producer.endpoint(theirs.address)
    errors: list[OmniConnectorError] = []
    gate = threading.Barrier(8)

    def meet(number: int) -> None:
        try:
            gate.wait()
            peer = consumer.connect(blob)
            wait(
                consumer,
                consumer.start(peer, [Piece(theirs.address, ours.address + 64 * number, 64)]),
                producer=producer,
            )
        except OmniConnectorError as error:
            errors.append(error)

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (ours.array[:512] == 7).all()


def test_an_unknown_backend_is_named_with_those_there_are():
    with pytest.raises(BackendUnavailableError, match="no backend 'UCXX'.*UCX"):
        NixlEngine("127.0.0.1", ["UCXX"])


def test_backends_that_need_no_hardware_can_be_chosen():
    connector = create_connector("nixl", {"backends": ["UCX", "POSIX"]}, namespace=f"nixl-backends-{os.getpid()}")
    with connector:
        connector.put("k", b"over either")
        assert connector.get("k") == b"over either"


@pytest.mark.parametrize("options", [{"tls": "tcp"}, {"devices": "lo"}, {"tls": "tcp", "devices": "lo"}])
def test_transports_and_devices_are_those_of_the_options(options):
    engine = NixlEngine("127.0.0.1", ["UCX"], **options)
    memory = Memory(4096)
    engine.register(memory.address, 4096)
    everything = NixlEngine("192.0.2.1", ["UCX"])
    everything.register(memory.address, 4096)
    try:
        assert len(engine.endpoint(memory.address)) < len(everything.endpoint(memory.address))  # fewer ways to reach it
        assert "UCX_TLS" not in os.environ
        assert "UCX_NET_DEVICES" not in os.environ
    finally:
        engine.close()
        everything.close()


def test_loopback_binds_no_other_network():
    def bound() -> set[str]:
        return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = bound()
    engine = NixlEngine("127.0.0.1", ["UCX"], tls="tcp")
    try:
        assert bound() - before <= {"127.0.0.1"}
    finally:
        engine.close()


def test_an_idle_agent_costs_no_processor_time(pair):
    del pair
    process = psutil.Process()
    began, began_s = sum(process.cpu_times()[:2]), time.monotonic()
    until_s = began_s + 1.0
    while (left_s := until_s - time.monotonic()) > 0:
        threading.Event().wait(left_s)
    used_s = sum(process.cpu_times()[:2]) - began
    assert used_s < 0.1 * (time.monotonic() - began_s)


def test_a_process_that_used_nixl_ends_well():
    """The InfiniBand module of UCX crashes it at exit where the system has libibverbs: it is left out without hardware."""
    code = (
        "from omni_connector_core import create_connector\n"
        f"c = create_connector('nixl', namespace='nixl-exit-{os.getpid()}')\n"
        "c.put('k', b'x'); assert c.get('k') == b'x'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_reading_does_not_hold_the_gil(pair):
    """A thread that ticks beside a large read goes on ticking."""
    producer, consumer, _, _ = pair
    nbytes = 64 << 20
    theirs, ours = Memory(nbytes, 5), Memory(nbytes)
    producer.register(theirs.address, nbytes)
    fresh = NixlEngine("127.0.0.1", ["UCX"])
    fresh.register(theirs.address, nbytes)
    consumer.register(ours.address, nbytes)
    peer = consumer.connect(fresh.endpoint(theirs.address))
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        wait(consumer, consumer.start(peer, [Piece(theirs.address, ours.address, nbytes)]), producer=fresh)
        during = ticks - before
    finally:
        stop.set()
        thread.join()
        consumer.unregister(ours.address)
        fresh.close()
    assert ctypes.string_at(ours.address + nbytes - 1, 1) == b"\5"
    assert during > 1000  # a held GIL leaves none
