"""Many threads, ends and ways of asking at once; at the end every read was given once, and nothing is held."""

from __future__ import annotations

import collections
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from shared_memory_edge import Edge, eventually

from omni_connector_core import NOT_READY, Key, OmniConnector, Producer, Role
from omni_connector_core.errors import TransferTimeoutError
from omni_connector_core.metadata import Where

PRODUCERS, CONSUMERS, KEYS = 2, 3, 150


@pytest.mark.parametrize("seed", range(4))
def test_every_read_is_given_once(tmp_path: Path, seed: int) -> None:
    edge = Edge(tmp_path / "run")
    rng = random.Random(seed)
    readers = {(p, k): rng.choice((1, 1, 2, 3)) for p in range(PRODUCERS) for k in range(KEYS)}
    sizes = {name: rng.choice((10, 1000, 70_000, 1_500_000)) for name in readers}
    reads: collections.Counter[tuple[int, int]] = collections.Counter()
    lock = threading.Lock()

    def produce(conn: OmniConnector, replica: int) -> None:
        order = list(range(KEYS))
        random.Random(f"{seed} {replica}").shuffle(order)
        for k in order:
            name = (replica, k)
            payload = (name, np.full(sizes[name], (replica * 100 + k) % 256, np.uint8))
            conn.put(f"k{k}", payload, readers=readers[name], timeout=60)

    def left() -> list[tuple[int, int]]:
        with lock:
            return [name for name, count in readers.items() if reads[name] < count]

    def consume(conn: OmniConnector, number: int) -> None:
        mine = random.Random(f"{seed} consumer {number}")
        while names := left():
            replica, k = mine.choice(names)
            key, producer = f"k{k}", Producer(replica)
            way = mine.randrange(5)
            got: object = NOT_READY
            if way == 0:
                conn.transport.expect([Key(key)], Where(producer=producer))
            elif way == 1:
                conn.forget(key, producer=producer)
            elif way == 2:
                got = conn.poll(key, producer=producer)
            elif way == 3:
                handle = conn.submit_get(key, producer=producer)
                if handle.done():
                    got = handle.result()
                else:
                    handle.cancel()
            else:
                try:
                    got = conn.get(key, producer=producer, timeout=mine.choice((0.0, 0.001, 0.02)))
                except TransferTimeoutError:
                    continue
            if isinstance(got, tuple):
                name, data = got
                assert name == (replica, k)
                assert data.size == sizes[name]
                assert (data == (replica * 100 + k) % 256).all()
                with lock:
                    reads[name] += 1

    with ExitStack() as ends, ThreadPoolExecutor(PRODUCERS + 2 * CONSUMERS) as pool:
        consumers = [ends.enter_context(edge.open(Role.CONSUMER)) for _ in range(CONSUMERS)]
        producers = [
            ends.enter_context(edge.open(Role.PRODUCER, {"capacity_bytes": "24MiB"}, replica=n))
            for n in range(PRODUCERS)
        ]
        work = [pool.submit(consume, conn, n) for n, conn in enumerate(consumers * 2)]
        work += [pool.submit(produce, conn, n) for n, conn in enumerate(producers)]
        for one in work:
            one.result(120)
        for conn in consumers:
            for k in range(KEYS):
                for replica in range(PRODUCERS):
                    conn.forget(f"k{k}", producer=Producer(replica))
        assert reads == readers
        assert eventually(lambda: all(conn.transport.usage().bytes_held == 0 for conn in producers))
        assert all(conn.transport.usage().pending == 0 for conn in producers)
