"""The backend beside bare NIXL, and beside vllm-omni's own connector over NIXL: ``make bench PLUGINS=nixl``.

Two processes, over shared memory, then over TCP; the consumer waits when the producer begins.

**read** is the engine's read alone, beside the same read with NIXL's own calls. **put -> got** is all of it, from the producer's call
to the payload in the consumer's hands. **vllm-omni** is its put and its get, one after the other: it cannot wait, so what it costs
to wake a consumer is not counted.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench import Bench, Ratio
from omni_connector_contract_tests.bench.upstream import VERSION, load
from omni_connector_core import Role, create_connector
from omni_connector_core.arena import HostMemory
from omni_connector_core.onesided import Piece
from omni_connector_nixl.engine import NixlEngine

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
NBYTES = max(SIZES.values())
AT_LEAST, JUDGED_FROM = 0.8, 1 << 20
LONGEST_1_KB_S = 200e-6
UPSTREAM_AT_LEAST, UPSTREAM_TO = 3.0, 1 << 24
SETTLE_S = 0.5e-3
CONTEXT = multiprocessing.get_context("spawn")


def measure(bench: Bench) -> Iterator[Ratio]:
    """Measure every size over both transports."""
    theirs = {} if bench.upstream is None else upstream(bench.upstream)
    for tls, name in (("all", "shared memory"), ("tcp", "TCP")):
        reads, transfers = ours(tls)
        for size, nbytes in SIZES.items():
            bare_s, read_s = reads[size]
            yield Ratio(
                f"{name}, {size}, read, against NIXL's own calls",
                read_s,
                bare_s,
                1 / AT_LEAST if nbytes >= JUDGED_FROM else None,
            )
        if tls == "all":
            yield Ratio("1 KB, put -> got, in at most 200 us", transfers["1 KB"], LONGEST_1_KB_S, 1.0)
        for size, seconds in theirs.items():
            bar = 1 / UPSTREAM_AT_LEAST if tls == "all" and SIZES[size] <= UPSTREAM_TO else None
            yield Ratio(f"{name}, {size}, put -> got, against vllm-omni {VERSION}", transfers[size], seconds, bar)


# ---- ours and bare


def ours(tls: str) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return the medians of bare and our read, and of ours from put to got, by size, seconds."""
    namespace = f"bench-nixl-{time.time_ns()}"
    here, there = CONTEXT.Pipe()
    child = CONTEXT.Process(target=serve, args=(tls, namespace, there))
    child.start()
    try:
        reads = compare_reads(tls, *here.recv())
        here.send("stop working")
        return reads, transfer(tls, namespace, here)
    finally:
        here.send(None)
        child.join()


def serve(tls: str, namespace: str, pipe: Connection) -> None:
    """Be the producer: of an engine that a bare agent reads from too, and of a connector."""
    memory = HostMemory(NBYTES)
    np.frombuffer(memory.part(0, NBYTES), np.uint8)[:] = 1
    engine = NixlEngine("127.0.0.1", ["UCX"], tls=tls)
    engine.register(memory.address, NBYTES)
    pipe.send((memory.address, engine.endpoint(memory.address)))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            engine.progress()
            if engine.progress_s:
                time.sleep(engine.progress_s)

    threading.Thread(target=work, daemon=True).start()
    with create_connector("nixl", {"tls": tls}, role=Role.PRODUCER, namespace=namespace) as conn:
        source = np.ones(NBYTES, np.uint8)
        while (order := pipe.recv()) is not None:
            if order == "stop working":
                stop.set()
                continue
            key, nbytes = order
            time.sleep(SETTLE_S)  # the consumer is in `get` by then
            start_s = time.monotonic()
            conn.put(key, source[:nbytes])
            pipe.send(start_s)


def compare_reads(tls: str, remote: int, blob: bytes) -> dict[str, tuple[float, float]]:
    """Read with NIXL's own calls and with the engine, by turns, both without pause."""
    from nixl._api import nixl_agent, nixl_agent_config

    memory = HostMemory(NBYTES)
    np.frombuffer(memory.part(0, NBYTES), np.uint8)[:] = 0
    engine = NixlEngine("127.0.0.1", ["UCX"], tls=tls)
    engine.register(memory.address, NBYTES)
    peer = engine.connect(blob)
    agent = nixl_agent(f"bare-{tls}", nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "engine_config": f"TLS={tls},NET_DEVICES=lo"})
    agent.register_memory([(memory.address, NBYTES, 0, "")], "DRAM")
    bare_peer = agent.add_remote_agent(blob[4:])

    def bare(piece: Piece) -> None:
        local = agent.get_xfer_descs([(piece.local, piece.nbytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(piece.remote, piece.nbytes, 0)], "DRAM")
        read = agent.initialize_xfer("READ", local, remote, bare_peer)
        state = agent.transfer(read)
        while state == "PROC":
            state = agent.check_xfer_state(read)
        assert state == "DONE"
        agent.release_xfer_handle(read)

    def engines(piece: Piece) -> None:
        read = engine.start(peer, [piece])
        while not engine.done(read):
            pass

    medians = {}
    for size, nbytes in SIZES.items():
        piece = Piece(remote, memory.address, nbytes)
        times: dict[Callable[[Piece], None], list[float]] = {bare: [], engines: []}
        for n in range(10 if nbytes > 1 << 24 else 100):
            for read in (bare, engines)[:: 1 if n % 2 else -1]:
                start_s = time.perf_counter()
                read(piece)
                times[read].append(time.perf_counter() - start_s)
        medians[size] = statistics.median(times[bare][2:]), statistics.median(times[engines][2:])
    engine.close()
    return medians


def transfer(tls: str, namespace: str, pipe: Connection) -> dict[str, float]:
    """Return the medians from the begin of put to the end of get."""
    medians = {}
    with create_connector("nixl", {"tls": tls}, role=Role.CONSUMER, namespace=namespace) as conn:
        for size, nbytes in SIZES.items():
            times = []
            for n in range(10 if nbytes > 1 << 24 else 200):
                pipe.send((f"{size}-{n}", nbytes))
                payload = conn.get(f"{size}-{n}")
                end_s = time.monotonic()
                times.append(end_s - pipe.recv())
                del payload
            medians[size] = statistics.median(times[2:])
    return medians


# ---- vllm-omni's


def upstream(folder: Path) -> dict[str, float]:
    """Return the medians of a put and a get by vllm-omni's connector, by size, seconds."""
    here, there = CONTEXT.Pipe()
    child = CONTEXT.Process(target=serve_upstream, args=(folder, there))
    child.start()
    connector, medians = upstream_connector(folder, {"role": "receiver"}), {}
    try:
        for size, nbytes in SIZES.items():
            times = []
            for n in range(6 if nbytes > 1 << 24 else 40):
                key = f"{size}-{n}"
                here.send((key, nbytes))
                put_s, metadata = here.recv()
                start_s = time.perf_counter()
                payload, _ = connector.get("0", "1", key, metadata)
                times.append(put_s + time.perf_counter() - start_s)
                assert payload.numel() == nbytes
            medians[size] = statistics.median(times[2:])
    finally:
        here.send(None)
        child.join()
        connector.close()
    return medians


def serve_upstream(folder: Path, pipe: Connection) -> None:
    """Put what is ordered with vllm-omni's connector."""
    import torch

    connector = upstream_connector(folder, {"role": "sender", "host": "127.0.0.1"})
    source = torch.ones(NBYTES, dtype=torch.uint8)
    while (order := pipe.recv()) is not None:
        key, nbytes = order
        start_s = time.perf_counter()
        done, _, metadata = connector.put("0", "1", key, source[:nbytes])
        assert done
        pipe.send((time.perf_counter() - start_s, metadata))
    connector.close()


def upstream_connector(folder: Path, config: dict[str, Any]) -> Any:
    """Open vllm-omni's connector, on NIXL's own agent as vLLM wraps it."""
    from nixl._api import nixl_agent, nixl_agent_config

    stand_in = {"NixlWrapper": nixl_agent, "nixl_agent_config": nixl_agent_config}
    module = load(folder, "nixl_connector", vllm__distributed={}, vllm__distributed__nixl_utils=stand_in)
    return module.NixlConnector({"memory_type": "DRAM", **config})
