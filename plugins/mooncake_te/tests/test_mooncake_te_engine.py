"""The engine alone: two instances in this process, and what the vendor's calls do not say."""

import ctypes
import os
import random
import threading
import time

import numpy as np
import pytest

from omni_connector_core.errors import BackendUnavailableError, PeerLostError
from omni_connector_core.onesided import HostMemory, Piece

pytest.importorskip("mooncake.engine", exc_type=ImportError)

from omni_connector_mooncake_te.engine import MooncakeEngine

NBYTES = 32 << 20


class Side:
    def __init__(self):
        self.engine = MooncakeEngine("127.0.0.1", "tcp", "")
        self.memory = HostMemory(NBYTES)
        self.bytes = np.frombuffer(self.memory.part(0, NBYTES), np.uint8)
        self.engine.register(self.memory.address, NBYTES)


@pytest.fixture(scope="module")
def sides():
    made = Side(), Side()
    yield made
    for side in made:
        side.engine.close()


def read(reader, peer, pieces, within_s=60):
    handle = reader.engine.start(peer, pieces)
    end = time.monotonic() + within_s
    while not reader.engine.done(handle):
        assert time.monotonic() < end
        time.sleep(1e-4)


@pytest.mark.parametrize(
    ("count", "nbytes", "gap"),
    [(1, NBYTES, 0), (1, NBYTES - 1, 0), (2, (1 << 20) + 1, 1), (3, 1 << 20, 1), (100, 33, 1), (5000, 33, 7)],
)
def test_done_means_that_every_piece_is_there(sides, count, nbytes, gap):
    owner, reader = sides
    rng = np.random.default_rng(count)
    owner.bytes[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    reader.bytes[:] = 0
    order = list(range(count))
    random.Random(count).shuffle(order)
    pieces = [
        Piece(owner.memory.address + n * nbytes, reader.memory.address + n * (nbytes + gap), nbytes) for n in order
    ]
    read(reader, reader.engine.connect(owner.engine.endpoint(owner.memory.address)), pieces)
    for n in range(count):
        start = n * (nbytes + gap)
        assert (reader.bytes[start : start + nbytes] == owner.bytes[n * nbytes : (n + 1) * nbytes]).all()


def test_memory_that_is_not_registered_cannot_be_read(sides):
    owner, reader = sides
    secret = ctypes.create_string_buffer(64)
    peer = reader.engine.connect(owner.engine.endpoint(owner.memory.address))
    with pytest.raises(PeerLostError):
        read(reader, peer, [Piece(ctypes.addressof(secret), reader.memory.address, 64)])


def test_overlapping_memory_is_refused_with_a_reason(sides):
    owner, _ = sides
    with pytest.raises(BackendUnavailableError, match="overlap"):
        owner.engine.register(owner.memory.address + 100, 100)


def test_a_peer_that_is_gone_cannot_be_met(sides):
    gone = Side()
    blob = gone.engine.endpoint(gone.memory.address)
    gone.engine.close()
    with pytest.raises(PeerLostError):
        sides[1].engine.connect(blob)


def test_a_description_that_is_none_is_refused(sides):
    with pytest.raises(PeerLostError, match="described itself"):
        sides[1].engine.connect(b"\x93garbage")


def test_tcp_is_forced_as_mooncake_takes_an_adapter_that_it_finds(monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    MooncakeEngine("127.0.0.1", "tcp", "").close()
    assert os.environ["MC_FORCE_TCP"] == "1"


def test_the_end_of_an_engine_does_not_stop_the_other_threads():
    """Without help it holds the GIL for up to a second, while its thread that accepts handshakes sleeps."""
    pauses = []
    MooncakeEngine("127.0.0.1", "tcp", "").close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):  # of several, as another process may have kept the core from us
        engine = MooncakeEngine("127.0.0.1", "tcp", "")
        stop = threading.Event()
        pause = [0.0]

        def tick(stop=stop, pause=pause):
            last = time.monotonic()
            while not stop.is_set():
                time.sleep(0.001)
                now = time.monotonic()
                pause[0], last = max(pause[0], now - last), now

        ticking = threading.Thread(target=tick)
        ticking.start()
        engine.close()
        stop.set()
        ticking.join()
        pauses.append(pause[0])
    assert min(pauses) < 0.2
    assert len(os.listdir("/proc/self/fd")) <= before
