"""The backend beside the vendor's own calls, in one run over one tuned worker: ``make bench PLUGINS=yuanrong``.

Two processes. In each the vendor's call and ours alternate, and by turns the one or the other comes first, so that both
meet the same machine: the producer puts, then the consumer reads.

**raw put** is `mcreate`, a copy, `mset_buffer`; **raw read** is `get_read_only_buffers` and its view; **raw bytes** is `get`.
**put** and **get** are a connector's, encoding and decoding included.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from omni_connector_contract_tests.bench import Bench, Ratio
from omni_connector_contract_tests.bench.one_way import PATIENCE_S
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import Deadline

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}
JUDGED_FROM = 1 << 20
PUT_AT_LEAST, GET_AT_MOST, FASTER_THAN_BYTES = 0.85, 1.2, 5.0
SERVICE = ("memory=1536MiB",)
BATCH_NBYTES = 1 << 26


def measure(bench: Bench) -> Iterator[Ratio]:
    """Measure every size."""
    peers = Peers(processes=True, patience_s=PATIENCE_S)
    ends = Ends(bench.backend, peers)
    try:
        for size, nbytes in SIZES.items():
            yield from _ratios(size, nbytes, _times(ends, nbytes, 14 if nbytes > 1 << 24 else 200))
    finally:
        ends.close()
        peers.shutdown()


def _ratios(size: str, nbytes: int, times: dict[str, float]) -> Iterator[Ratio]:
    judged = nbytes >= JUDGED_FROM
    put_bar, get_bar = (1 / PUT_AT_LEAST, GET_AT_MOST) if judged else (None, None)
    yield Ratio(f"{size}, put, against raw mcreate, copy and mset_buffer", times["put"], times["raw put"], put_bar)
    yield Ratio(f"{size}, get, against raw read-only buffer", times["get"], times["raw read"], get_bar)
    bar = 1 / FASTER_THAN_BYTES if nbytes == max(SIZES.values()) else None
    yield Ratio(f"{size}, get, against raw get of bytes, 5 times faster", times["get"], times["raw bytes"], bar)


def _times(ends: Ends, nbytes: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; the first fifth warms up and does not count."""
    batch = max(min(BATCH_NBYTES // nbytes, 10), 1)
    times: dict[str, list[float]] = defaultdict(list)
    for first in range(0, rounds, batch):
        numbers = range(first, first + batch)
        put, metadata = ends.producer.act(put_by_turns, nbytes, numbers)
        got = ends.consumer.act(get_by_turns, nbytes, numbers, metadata)
        for name, seconds in {**put, **got}.items():
            times[name] += seconds
    return {name: statistics.median(seconds[rounds // 5 :]) for name, seconds in times.items()}


class _Clock:
    """Times calls, by turns in this order and the other."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def both(self, number: int, **calls: Callable[[], Any]) -> dict[str, Any]:
        """Time each; returns what they returned."""
        results = {}
        for name, call in list(calls.items())[:: 1 if number % 2 else -1]:
            start_s = time.perf_counter()
            results[name] = call()
            self.times[name.replace("_", " ")].append(time.perf_counter() - start_s)
        return results


def put_by_turns(acting: Acting, nbytes: int, numbers: range) -> tuple[dict[str, list[float]], list[Any]]:
    """Put in both ways; returns seconds, and the metadata of ours."""
    client, source, clock = _client(acting), np.ones(nbytes, np.uint8), _Clock()

    def raw(key: str) -> None:
        (buffer,) = client.mcreate([key], [nbytes], ttl_second=60)
        view = buffer.MutableData()
        np.copyto(np.frombuffer(view, np.uint8), source)
        view.release()
        client.mset_buffer([buffer])

    metadata = []
    for n in numbers:
        key = f"{nbytes}-{n}"
        done = clock.both(n, raw_put=lambda k=f"raw{key}": raw(k), put=lambda k=key: acting.connector.put(k, source))
        metadata.append(done["put"])
    return dict(clock.times), metadata


def get_by_turns(acting: Acting, nbytes: int, numbers: range, metadata: list[Any]) -> dict[str, list[float]]:
    """Get in both ways; returns seconds."""
    client, clock = _client(acting), _Clock()
    for n, known in zip(numbers, metadata, strict=True):
        key = f"{nbytes}-{n}"
        got = clock.both(
            n,
            raw_read=lambda k=f"raw{key}": client.get_read_only_buffers([k], 0)[0].immutable_data(),
            get=lambda k=key, m=known: acting.connector.get(k, m),
        )
        assert got["raw_read"].nbytes == got["get"].nbytes == nbytes
        del got
        clock.both(n, raw_bytes=lambda k=f"raw{key}": client.get([k]))
    client.delete([f"raw{nbytes}-{n}" for n in numbers])
    return dict(clock.times)


def _client(acting: Acting) -> Any:
    from omni_connector_yuanrong.sdk import open_session

    return open_session(acting.connector.transport.options, Deadline(PATIENCE_S)).reader
