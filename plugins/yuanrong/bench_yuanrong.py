"""Ratios of this backend to the vendor's own calls, interleaved in one run on one tuned worker.

python plugins/yuanrong/bench_yuanrong.py

A get of ours is the vendor's read of a buffer and the claim that makes sure that nobody else gets the same payload; both are shown.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_connector_core import OmniConnector, Role, create_connector
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.sdk import ExistenceOpt, Session, open_session
from omni_connector_yuanrong.service import start

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28}


class Times:
    """Seconds that calls took, by name."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def of(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Time one call."""
        start_s = time.perf_counter()
        result = call(*args)
        self._times[name].append(time.perf_counter() - start_s)
        return result

    def us(self, name: str) -> float:
        """Return the median in microseconds, the first two left out."""
        return statistics.median(self._times[name][2:]) * 1e6


def raw_put(session: Session, key: str, source: np.ndarray) -> None:
    """Put with the vendor's calls."""
    (buffer,) = session.client.mcreate([key], [source.nbytes], ttl_second=60)
    view = buffer.MutableData()
    np.copyto(np.frombuffer(view, np.uint8), source)
    view.release()
    session.client.mset_buffer([buffer])


def raw_read(session: Session, key: str) -> memoryview:
    """Read with the vendor's calls, without a copy."""
    return session.client.get_read_only_buffers([key], 0)[0].immutable_data()


def raw_claim(session: Session, key: str) -> None:
    """Create a marker unless it exists."""
    session.client.msettx([key], [b"1"], ttl_second=9, existence_opt=ExistenceOpt.NX)


def measure(
    session: Session, producer: OmniConnector, consumer: OmniConnector, size: str, nbytes: int, count: int
) -> Times:
    """Put and get in both ways, by turns."""
    source, times = np.ones(nbytes, np.uint8), Times()
    for n in range(count):
        key = f"raw{nbytes}-{n}"
        times.of("raw put", raw_put, session, key, source)
        view = times.of("raw read", raw_read, session, key)
        times.of("raw claim", raw_claim, session, f"claim{key}")
        del view
        times.of("raw bytes", session.client.get, [key])
        session.client.delete([key])
        metadata = times.of("put", producer.put, f"{size}{n}", source)
        payload = times.of("get", consumer.get, f"{size}{n}", metadata)
        del payload
    return times


def main() -> None:
    """Print a line for each size; what issue 5 asks for is in parentheses."""
    with start(memory="1536MiB") as service:
        config = service.config()
        session = open_session(YuanrongOptions(**config))
        with (
            create_connector("yuanrong", config, role=Role.PRODUCER, namespace="bench") as producer,
            create_connector("yuanrong", config, role=Role.CONSUMER, namespace="bench") as consumer,
        ):
            for size, nbytes in SIZES.items():
                us = measure(session, producer, consumer, size, nbytes, 12 if nbytes > 1 << 24 else 150).us
                print(
                    f"{size:>7}  put {us('put'):9.0f} us, {us('raw put') / us('put'):.2f} of raw (0.85)   "
                    f"get {us('get'):9.0f} us, {us('get') / us('raw read'):.2f} x raw read (1.2), "
                    f"{us('get') / (us('raw read') + us('raw claim')):.2f} x read and claim   "
                    f"raw bytes / get {us('raw bytes') / us('get'):.1f} (5 at 256 MB)",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(main())
