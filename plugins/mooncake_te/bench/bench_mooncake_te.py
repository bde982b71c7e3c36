"""The Transfer Engine backend beside the bare engine, and beside vllm-omni's own connector over it, in one run.

``make bench PLUGINS=mooncake_te``. Two processes, TCP over loopback; the consumer waits when the producer begins.

**bare** is the same job with the SDK's own calls, and no more than the job: the producer copies its array into registered memory (when
`put` returns the array is the caller's again, so a bare producer must copy too), says one byte over a unix socket, and the consumer,
who sleeps in `recv` on it, READs into registered memory that was touched before. The READ is the fastest of the SDK's ways for
that size: ``transfer_sync_read``, or the asynchronous read polled without pause, every 50 us or every 1 ms; which is found out first.
**ours** is from the begin of `put` to the end of `get`, encoding and decoding included. Both alternate, round by round.

**vllm-omni** is its put and its get, one after the other: it cannot wait, so what it costs to wake a consumer is not counted.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench import Bench, Ratio
from omni_connector_contract_tests.bench.one_way import PATIENCE_S, SETTLE_S, payload_of
from omni_connector_contract_tests.bench.upstream import VERSION, load
from omni_connector_contract_tests.harness.ends import End, Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting, Run
from omni_connector_core import Deadline, Key
from omni_connector_core.arena import HostMemory
from omni_connector_core.services import free_ports

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
NBYTES = max(SIZES.values())
AT_LEAST = 0.9
UPSTREAM_AT_LEAST, UPSTREAM_FROM = 1.3, 1 << 24
LONGEST_1_KB_S = 400e-6
CONSUMER_CORES, PRODUCER_CORES = 0.6, 0.05
CONFIG = {"capacity_bytes": "700MiB"}


def measure(bench: Bench) -> Iterator[Ratio]:
    """Measure every size, then processor time."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    ends = Ends(bench.backend, peers)
    try:
        producer, consumer = ends.open("producer", config=CONFIG), ends.open("consumer", config=CONFIG)
        meet(producer, consumer)
        for size, nbytes in SIZES.items():
            rounds = 12 if nbytes > 1 << 24 else 40 if nbytes > 1 << 20 else 200
            ours_s, bare_s, way = side_by_side(producer, consumer, nbytes, rounds)
            name = f"{size}, put -> got, against bare copy, word and {way}"
            yield Ratio(name, ours_s, bare_s, 1 / AT_LEAST if nbytes >= 1 << 20 else None)
            if nbytes == 1 << 10:
                yield Ratio("1 KB, put -> got, in at most 400 us", ours_s, LONGEST_1_KB_S, 1.0)
            if bench.upstream is not None:
                theirs_s = upstream(peers, bench.upstream, nbytes, max(rounds // 3, 6))
                bar = 1 / UPSTREAM_AT_LEAST if nbytes >= UPSTREAM_FROM else None
                yield Ratio(
                    f"{size} against vllm-omni {VERSION}, {UPSTREAM_AT_LEAST} times faster", ours_s, theirs_s, bar
                )
        yield from processor_time(producer, consumer)
    finally:
        ends.close()
        peers.shutdown()


# ---- ours and bare, in the same two processes


class Bare:
    """The SDK's own calls, and a word to the other side."""

    def __init__(self, wire: socket.socket, remote: int = 0, blob: bytes = b"") -> None:
        from omni_connector_mooncake_te.engine import MooncakeEngine

        self.wire = wire
        self.memory = HostMemory(NBYTES)
        self.array = np.frombuffer(self.memory.part(0, NBYTES), np.uint8)
        self.array[:] = 1
        self.ours = MooncakeEngine("127.0.0.1", "tcp", "")
        self.ours.register(self.memory.address, NBYTES)
        self.remote, self.session = remote, self.ours.connect(blob) if blob else ""

    def read(self, way: str, nbytes: int) -> None:
        """Read what the other side has."""
        if way == "sync":
            assert not self.ours._engine.transfer_sync_read(self.session, self.memory.address, self.remote, nbytes)
            return
        engine, pause_s = self.ours._engine, WAYS[way]
        batch = engine.batch_transfer_async_read(self.session, [self.memory.address], [self.remote], [nbytes])
        while (status := engine.transfer_check_status(batch)) == 0:
            if pause_s:
                time.sleep(pause_s)
        assert status == 1


WAYS = {"sync": 0.0, "polled": 0.0, "polled every 50 us": 50e-6, "polled every 1 ms": 1e-3}


def meet(producer: End, consumer: End) -> None:
    """Have the bare ends meet."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "wire"))
        described = producer.start_act(listen, path)
        consumer.act(dial, path)
        described.result()


def listen(acting: Acting, path: str) -> None:
    """Be the bare producer."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        wire, _ = listener.accept()
    bare = acting.kept["bare"] = Bare(wire)
    blob = bare.ours.endpoint(bare.memory.address)
    wire.sendall(bare.memory.address.to_bytes(8, "little") + blob)


def dial(acting: Acting, path: str) -> None:
    """Be the bare consumer."""
    deadline = Deadline(PATIENCE_S)
    wire = socket.socket(socket.AF_UNIX)
    while wire.connect_ex(path):
        assert not deadline.expired()
        time.sleep(0.01)
    described = wire.recv(65536)
    acting.kept["bare"] = Bare(wire, int.from_bytes(described[:8], "little"), described[8:])


def side_by_side(producer: End, consumer: End, nbytes: int, rounds: int) -> tuple[float, float, str]:
    """Return the median of ours and of bare, seconds, and the way that was the fastest for the latter."""
    medians = {}
    for way in WAYS:
        bare_s, _ = run_rounds(producer, consumer, nbytes, max(rounds // 4, 4), way, ours=False)
        medians[way] = bare_s
    way = min(medians, key=lambda way: medians[way])
    bare_s, ours_s = run_rounds(producer, consumer, nbytes, rounds, way, ours=True)
    return ours_s, bare_s, way


def run_rounds(producer: End, consumer: End, nbytes: int, rounds: int, way: str, *, ours: bool) -> tuple[float, float]:
    """Run rounds; returns the medians of bare and ours, the first fifth left out."""
    getting = consumer.start_act(take, nbytes, rounds, way, ours)
    begun = producer.act(give, nbytes, rounds, ours)
    ended = getting.result()
    warm = max(rounds // 5, 1)

    def median(kind: str) -> float:
        times = [end - begin for begin, end in zip(begun[kind], ended[kind], strict=True)]
        return statistics.median(times[warm:]) if times else 0.0

    return median("bare"), median("ours")


def give(acting: Acting, nbytes: int, rounds: int, ours: bool) -> dict[str, list[float]]:
    """Be the producer; returns when each transfer began."""
    bare: Bare = acting.kept["bare"]
    source, payload = np.ones(nbytes, np.uint8), payload_of(nbytes)
    begun: dict[str, list[float]] = {"bare": [], "ours": []}
    for n in range(rounds):
        time.sleep(SETTLE_S)
        begun["bare"].append(time.monotonic())
        np.copyto(bare.array[:nbytes], source)
        bare.wire.send(b"!")
        bare.wire.recv(1)
        if ours:
            key = Key(f"{nbytes}-{n}")
            time.sleep(SETTLE_S)
            begun["ours"].append(time.monotonic())
            acting.connector.put(key, payload)
            acting.connector.transport.consumed(key, deadline=Deadline(PATIENCE_S))
            bare.wire.recv(1)
    return begun


def take(acting: Acting, nbytes: int, rounds: int, way: str, ours: bool) -> dict[str, list[float]]:
    """Be the consumer; returns when each transfer was done."""
    bare: Bare = acting.kept["bare"]
    ended: dict[str, list[float]] = {"bare": [], "ours": []}
    for n in range(rounds):
        bare.wire.recv(1)
        bare.read(way, nbytes)
        ended["bare"].append(time.monotonic())
        bare.wire.send(b"!")
        if ours:
            payload = acting.connector.get(Key(f"{nbytes}-{n}"), timeout=PATIENCE_S)
            ended["ours"].append(time.monotonic())
            assert payload["hidden"].nbytes == nbytes
            del payload
            bare.wire.send(b"!")
    return ended


# ---- vllm-omni's


def upstream(peers: Peers, folder: Path, nbytes: int, rounds: int) -> float:
    """Return the median of a put and a get by vllm-omni's connector, seconds."""
    port = free_ports(2)[0]
    giver, taker = peers.get(f"upstream producer {nbytes}"), peers.get(f"upstream consumer {nbytes}")
    giver.ask(Run(None, upstream_open, (folder, port, "producer"), {}))
    taker.ask(Run(None, upstream_open, (folder, port, "consumer"), {}))
    times = []
    for n in range(rounds):
        put_s, metadata = giver.ask(Run(None, upstream_put, (f"{nbytes}-{n}", nbytes), {}))
        times.append(put_s + taker.ask(Run(None, upstream_get, (f"{nbytes}-{n}", metadata), {})))
    giver.shutdown()
    taker.shutdown()
    return statistics.median(times[1:])


_upstream: dict[str, Any] = {}


def upstream_open(folder: Path, port: int, role: str) -> None:
    """Open an end of vllm-omni's connector."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it warns of what it does itself
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ["MC_FORCE_TCP"] = "1"
    import torch

    torch.Tensor.pin_memory = lambda self: self  # it pins its pool, which needs a GPU; it would not start here
    config = {"host": "127.0.0.1", "protocol": "tcp", "memory_pool_size": 700 << 20, "zmq_port": port}
    if role == "consumer":
        config |= {"zmq_port": port + 1, "role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port}
    module = load(folder, "mooncake_transfer_engine_connector")
    _upstream["connector"] = module.MooncakeTransferEngineConnector(config)
    _upstream["source"] = torch.ones(NBYTES, dtype=torch.uint8)


def upstream_put(key: str, nbytes: int) -> tuple[float, Any]:
    """Put; returns the seconds it took, and its metadata."""
    start_s = time.perf_counter()
    done, _, metadata = _upstream["connector"].put("0", "1", key, {"x": _upstream["source"][:nbytes]})
    assert done
    return time.perf_counter() - start_s, metadata


def upstream_get(key: str, metadata: Any) -> float:
    """Get; returns the seconds it took."""
    start_s = time.perf_counter()
    payload = _upstream["connector"].get("0", "1", key, metadata)
    assert payload is not None
    return time.perf_counter() - start_s


# ---- processor time


def processor_time(producer: End, consumer: End) -> Iterator[Ratio]:
    """Measure both ends while they are idle, and while 256 MB move; the engine's own threads are told from ours."""
    for what, count in (("idle", 0), ("256 MB", 8)):
        keys = [f"cpu-{n}" for n in range(count)]
        used: dict[str, float] = {}
        took_s = 0.0
        for key in keys or [None]:
            if key is not None:
                producer.act(put_all, key)
            before = {end: end.act(spent) for end in (producer, consumer)}
            took_s += consumer.act(get_or_wait, key)
            for end, name in ((producer, "producer"), (consumer, "consumer")):
                ours_s, theirs_s = end.act(spent)
                used[f"{name}, our threads"] = used.get(f"{name}, our threads", 0) + ours_s - before[end][0]
                used[f"{name}, the engine's"] = used.get(f"{name}, the engine's", 0) + theirs_s - before[end][1]
        for name, seconds in used.items():
            bar = {"consumer, our threads": CONSUMER_CORES, "producer, our threads": PRODUCER_CORES}.get(name)
            yield Ratio(f"{what}: processor time of the {name}, in cores", seconds, took_s, bar if count else 0.01)


def put_all(acting: Acting, key: str) -> None:
    """Put 256 MB."""
    acting.connector.put(key, payload_of(NBYTES))


def get_or_wait(acting: Acting, key: str | None) -> float:
    """Get a payload that is there, or do nothing; returns the seconds it took."""
    start_s = time.perf_counter()
    if key is None:
        time.sleep(2)
    else:
        acting.connector.get(key)
    return time.perf_counter() - start_s


def spent(acting: Acting) -> tuple[float, float]:
    """Return the seconds of processor time that went into Python's threads, and into the engine's."""
    own = {thread.native_id for thread in threading.enumerate()}
    engine_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in own:
            engine_ns += int(task.joinpath("schedstat").read_text().split()[0])
    return time.process_time() - engine_ns / 1e9, engine_ns / 1e9
