"""Ratios of this backend to bare NIXL, interleaved in one run between two processes: shared memory, then TCP.

python plugins/nixl/bench_nixl.py

``read`` is the engine's read alone, beside the same read with NIXL's own calls; ``put -> got`` is all of it, from the producer's call
to the payload in the consumer's hands.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from omni_connector_core import Role, create_connector
from omni_connector_core.arena import HostMemory
from omni_connector_core.onesided import Piece
from omni_connector_nixl.engine import NixlEngine

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
NBYTES = 1 << 28


def serve(tls: str, namespace: str, pipe: Connection) -> None:
    """Be the producer: of a bare agent and an engine over the same memory, and of a connector."""
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
            start_s = time.perf_counter()
            conn.put(key, source[:nbytes])
            pipe.send(start_s)


def bare_read(agent: nixl_agent, peer: str, piece: Piece) -> None:
    """Read with NIXL's own calls, without pause."""
    local = agent.get_xfer_descs([(piece.local, piece.nbytes, 0)], "DRAM")
    remote = agent.get_xfer_descs([(piece.remote, piece.nbytes, 0)], "DRAM")
    read = agent.initialize_xfer("READ", local, remote, peer)
    state = agent.transfer(read)
    while state == "PROC":
        state = agent.check_xfer_state(read)
    assert state == "DONE"
    agent.release_xfer_handle(read)


def our_read(engine: NixlEngine, peer: str, piece: Piece) -> None:
    """Read with the engine, without pause."""
    read = engine.start(peer, [piece])
    while not engine.done(read):
        pass


def main() -> None:
    """Print a line for each transport and size; what issue 5 asks for is in parentheses."""
    for tls in ("all", "tcp"):
        namespace = f"bench-nixl-{time.time_ns()}"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=serve, args=(tls, namespace, theirs))
        child.start()
        remote, blob = ours.recv()
        memory = HostMemory(NBYTES)
        np.frombuffer(memory.part(0, NBYTES), np.uint8)[:] = 0
        engine = NixlEngine("127.0.0.1", ["UCX"], tls=tls)
        engine.register(memory.address, NBYTES)
        peer = engine.connect(blob)
        agent = nixl_agent(f"bare-{tls}", nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "engine_config": f"TLS={tls},NET_DEVICES=lo"})
        agent.register_memory([(memory.address, NBYTES, 0, "")], "DRAM")
        bare_peer = agent.add_remote_agent(blob[4:])
        lines = {}
        for size, nbytes in SIZES.items():
            piece = Piece(remote, memory.address, nbytes)
            bare, read = [], []
            for _ in range(10 if nbytes > 1 << 24 else 100):
                start_s = time.perf_counter()
                bare_read(agent, bare_peer, piece)
                middle_s = time.perf_counter()
                our_read(engine, peer, piece)
                bare.append(middle_s - start_s)
                read.append(time.perf_counter() - middle_s)
            lines[size] = statistics.median(bare[2:]) * 1e6, statistics.median(read[2:]) * 1e6
        ours.send("stop working")
        with create_connector("nixl", {"tls": tls}, role=Role.CONSUMER, namespace=namespace) as conn:
            for size, nbytes in SIZES.items():
                got = []
                for n in range(10 if nbytes > 1 << 24 else 100):
                    ours.send((f"{size}-{n}", nbytes))
                    payload = conn.get(f"{size}-{n}")
                    end_s = time.perf_counter()
                    got.append(end_s - ours.recv())
                    del payload
                bare_us, read_us = lines[size]
                print(
                    f"{tls:>4} {size:>7}  read {read_us:9.0f} us, {bare_us / read_us:.2f} of bare (0.8)   "
                    f"put -> got {statistics.median(got[2:]) * 1e6:9.0f} us",
                    flush=True,
                )
        ours.send(None)
        child.join()
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
