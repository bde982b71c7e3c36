"""Quick numbers for tuning this backend: put -> got between two processes, and a stream. The suite has the shared benchmark.

python plugins/shared_memory/bench_shared_memory.py
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from omni_connector_core import Role, create_connector

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
CHUNKS = 10_000


def consume(namespace: str, pipe: Connection) -> None:
    """Do what comes through the pipe, in the other process."""
    with create_connector("shared_memory", role=Role.CONSUMER, namespace=namespace) as conn:
        while (order := pipe.recv()) is not None:
            kind, name, count = order
            if kind == "get":
                for n in range(count):
                    pipe.send("waiting")
                    payload = conn.get(f"{name}-{n}")
                    got_s = time.perf_counter()
                    pipe.send(got_s)
                    del payload
            else:
                start_s = time.perf_counter()
                for _ in conn.reader(name):
                    pass
                pipe.send(time.perf_counter() - start_s)


def main() -> None:
    """Measure and print."""
    namespace = f"bench-{time.time_ns()}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=consume, args=(namespace, theirs))
    child.start()
    with create_connector("shared_memory", role=Role.PRODUCER, namespace=namespace) as conn:
        for name, nbytes in SIZES.items():
            count = 30 if nbytes > 1 << 24 else 200
            source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            taken, copied = [], []
            ours.send(("get", name, count))
            for n in range(count):
                ours.recv()
                time.sleep(0.0005)  # the consumer waits by now; that is what is measured
                start_s = time.perf_counter()
                conn.put(f"{name}-{n}", {"x": source})
                taken.append((ours.recv() - start_s) * 1e6)
                start_s = time.perf_counter()
                np.copyto(target, source)
                copied.append((time.perf_counter() - start_s) * 1e6)
            got_us, memcpy_us = statistics.median(taken[3:]), statistics.median(copied[3:])
            print(f"{name:>7} {got_us:10.1f} us, memcpy {memcpy_us:10.1f} us, ratio {got_us / memcpy_us:.2f}")
        chunk = np.ones(1024, np.uint8)
        for n in range(3):
            ours.send(("stream", f"s{n}", CHUNKS))
            with conn.writer(f"s{n}") as writer:
                for _ in range(CHUNKS):
                    writer.write(chunk)
            print(f"stream of {CHUNKS:,} x 1 KB: {ours.recv() / CHUNKS * 1e6:.1f} us a chunk")
        ours.send(None)
        child.join()


if __name__ == "__main__":
    sys.exit(main())
